"""Tasks of Django that are enqueued in a transaction: the option ``OUTBOX``.

Each test is a program of its own, because Django connects to one database in a process. As in
``test_django.py``, everything is skipped on Python 3.11.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

try:
    import django.tasks  # noqa: F401
except ImportError:
    pytest.skip("needs Django 6.0, and so Python 3.12", allow_module_level=True)

from tests.support.postgres import NOT_FOUND, PrivatePostgres, find_programs
from tests.support.programs import output_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

PROGRAM = """
import asyncio, json, os, sys
import django
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.django_project.settings"
django.setup()
from django.conf import settings
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection, transaction
from django.tasks import default_task_backend
from django.test import override_settings
from asgiref.sync import async_to_sync
from delayq.integrations.django import new_worker
from delayq.integrations.django.models import OutboxRow
from tests.support.django_project import tasks

options = {"url": os.environ["DELAYQ_URL"], "OUTBOX": True, "prefix": "shop:"}
backend = {"BACKEND": settings.BACKEND, "QUEUES": ["default", "emails"], "OPTIONS": options}
override_settings(TASKS={"default": backend}).enable()
told = {"checks": [str(each) for each in run_checks()]}
call_command("migrate", verbosity=0)

class Undo(Exception):
    pass

ids = []
with transaction.atomic():
    ids.append(tasks.note.enqueue("committed").id)
    try:
        with transaction.atomic():
            tasks.note.enqueue("rolled back to a savepoint")
            raise Undo
    except Undo:
        pass
    ids.append(async_to_sync(tasks.anote.aenqueue)("coroutine").id)
    ids.append(tasks.with_context.enqueue("other queue").id)
try:
    with transaction.atomic():
        tasks.note.enqueue("rolled back")
        raise Undo
except Undo:
    pass
told["rows"] = list(OutboxRow.objects.order_by("number").values_list("queue", "message_id"))
queue = default_task_backend.client.reliable_queue("shop:default")
told["before"] = queue.stats().ready
tasks.seen.clear()
call_command("delayq_worker", "--burst", "--queue", "default")
told["seen"] = [list(map(str, each)) for each in tasks.seen]
told["left"] = OutboxRow.objects.count()
told["ids"] = ids

# While it runs, without a burst.
async def run():
    worker = new_worker()
    async with worker:
        await asyncio.to_thread(later)
        for _ in range(2000):
            if any("later" in str(each) for each in tasks.seen):
                return
            await asyncio.sleep(0.01)

def later():
    with transaction.atomic():
        tasks.note.enqueue("later")
    connection.close()

asyncio.run(run())
told["later"] = [str(each) for each in tasks.seen if "later" in str(each)]
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
default_task_backend.close()
print(json.dumps(told))
"""


@pytest.fixture
def postgres() -> Iterator[PrivatePostgres]:
    programs = find_programs()
    if programs is None:
        pytest.skip(NOT_FOUND)
    with PrivatePostgres(programs) as server:
        yield server


@pytest.mark.gate
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_task_is_enqueued_with_the_transaction_or_not_at_all(
    database: str, server: PrivateServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = {"DELAYQ_URL": server.url}
    if database == "sqlite":
        environment["TEST_DATABASE"] = str(tmp_path / "db")
    else:
        postgres: PrivatePostgres = request.getfixturevalue("postgres")
        environment["TEST_POSTGRES"] = str(postgres.directory)
    told: dict[str, Any] = json.loads(output_of("-c", PROGRAM, **environment).splitlines()[-1])
    assert told["checks"] == []
    assert [row[0] for row in told["rows"]] == ["shop:default", "shop:default", "shop:emails"]
    assert [row[1] for row in told["rows"]] == told["ids"]
    assert told["before"] == 0
    assert len(told["seen"]) >= 2
    assert "committed" in told["seen"][0][0]
    assert "coroutine" in told["seen"][1][0]
    assert not any("rolled back" in text for seen in told["seen"] for text in seen)
    assert told["left"] == 0
    assert len(told["later"]) == 1
