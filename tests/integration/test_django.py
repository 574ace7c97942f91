"""The backend of Django's Tasks framework, and ``manage.py delayq_worker``.

There is no Django 6 for Python 3.11: there, everything here is skipped, and ``make packages`` runs
it on the other interpreters.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

try:
    import django
    import django.tasks
except ImportError:
    pytest.skip("needs Django 6.0, and so Python 3.12", allow_module_level=True)

import delayq
from delayq.backoff import Backoff
from tests.support.programs import run_python
from tests.support.servers import free_port
from tests.support.terminal import ROOT
from tests.support.waiting import until

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.django_project.settings"
django.setup()

from asgiref.sync import async_to_sync  # noqa: E402
from django.core.checks import run_checks  # noqa: E402
from django.core.exceptions import ImproperlyConfigured  # noqa: E402
from django.core.management import CommandError, call_command  # noqa: E402
from django.tasks import TaskResultStatus, default_task_backend, task_backends  # noqa: E402
from django.tasks.exceptions import (  # noqa: E402
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
)
from django.tasks.signals import task_enqueued, task_finished, task_started  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.utils import timezone  # noqa: E402

from delayq.integrations.django import DelayqBackend, new_worker  # noqa: E402
from delayq.integrations.django._backend import message_priority  # noqa: E402
from tests.support.django_project import tasks  # noqa: E402
from tests.support.django_project.settings import BACKEND  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.support.servers import PrivateServer

    Configure = Callable[..., None]

SIGNALS = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}


@pytest.fixture
def configure(server: PrivateServer) -> Iterator[Configure]:
    """Return a function that sets the options of the backend, and other keys of ``TASKS``."""
    changed: list[Any] = []

    def configure(alias: str = "default", queues: Any = ("default", "emails"), **more: Any) -> None:
        options = {"url": server.url, **more}
        changed.append(
            override_settings(
                TASKS={alias: {"BACKEND": BACKEND, "QUEUES": queues, "OPTIONS": options}}
            )
        )
        changed[-1].enable()

    configure()
    tasks.seen.clear()
    yield configure
    for alias in task_backends:
        task_backends[alias].options = {"url": server.url}
        task_backends[alias].__dict__.pop("delayq_options", None)
        task_backends[alias].close()
    for each in reversed(changed):
        each.disable()


def work(**options: Any) -> None:
    """Run everything that is due."""
    asyncio.run(new_worker(**options).run(burst=True))


def queue(name: str = "default") -> Any:
    return default_task_backend.client.reliable_queue(name)


@pytest.fixture
def signals(configure: Configure) -> Iterator[list[tuple[str, Any, Any]]]:
    """Return the signals that are sent: their names, the status and the errors of the result."""
    sent: list[tuple[str, Any, Any]] = []
    receivers = {}
    for name, signal_ in SIGNALS.items():

        def receive(sender: Any, *, task_result: Any, name: str = name, **more: Any) -> None:
            assert sender is DelayqBackend
            kinds = [error.exception_class for error in task_result.errors]
            sent.append((name, task_result.status, kinds))

        signal_.connect(receive)
        receivers[signal_] = receive
    yield sent
    for signal_, receive in receivers.items():
        signal_.disconnect(receive)


# Enqueueing


def test_a_task_is_a_message_that_a_worker_runs(configure: Configure) -> None:
    for enqueue in (tasks.note.enqueue, async_to_sync(tasks.note.aenqueue)):
        before = timezone.now()
        result = enqueue(1, (2, b"3"), key={"a": None})
        assert result.status == TaskResultStatus.READY
        assert before <= result.enqueued_at <= timezone.now()
        assert (result.args, result.kwargs) == ([1, [2, "3"]], {"key": {"a": None}})
        assert result.backend == "default"
        assert queue().get(result.id).value == {
            "task": "tests.support.django_project.tasks.note",
            "args": [1, [2, "3"]],
            "kwargs": {"key": {"a": None}},
        }
    work()
    assert tasks.seen == [((1, [2, "3"]), {"key": {"a": None}})] * 2
    assert queue().get(result.id) is None
    tasks.seen.clear()
    # One task may enqueue another.
    tasks.enqueue_another.enqueue("inner")
    work()
    work()
    assert tasks.seen == [(("inner",), {})]


def test_the_backend_tells_what_it_can_do(configure: Configure) -> None:
    for feature in ("defer", "async_task", "priority"):
        assert getattr(default_task_backend, f"supports_{feature}")
    assert not default_task_backend.supports_get_result
    with pytest.raises(NotImplementedError, match="it needs keep in OPTIONS"):
        tasks.note.get_result("1")
    configure(queues=[], keep=60)
    with pytest.raises(NotImplementedError, match="it needs names in QUEUES"):
        async_to_sync(tasks.note.aget_result)("1")
    configure(keep=60)
    assert default_task_backend.supports_get_result


def test_the_context_has_what_is_known(configure: Configure) -> None:
    result = tasks.with_context.enqueue("a")
    work()
    ((context, value, in_main_thread),) = tasks.seen
    assert (value, in_main_thread, context.attempt) == ("a", False, 1)
    task_result = context.task_result
    assert (task_result.id, task_result.args, task_result.backend) == (result.id, ["a"], "default")
    assert task_result.task == tasks.with_context
    assert abs(task_result.enqueued_at - result.enqueued_at) < timedelta(minutes=1)
    assert task_result.started_at == task_result.last_attempted_at
    assert task_result.worker_ids[-1].endswith(f":{os.getpid()}")
    tasks.awith_context.enqueue()
    work()
    assert tasks.seen[1:] == [1]


def test_a_task_may_run_later(configure: Configure) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    for use_tz, when in ((True, timedelta(hours=1)), (True, due), (False, None)):
        with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Tokyo"):
            run_after = timezone.make_naive(due) if when is None else when
            result = tasks.note.using(run_after=run_after).enqueue()
        assert abs(queue().get(result.id).due_at - due) < timedelta(minutes=1), when
    work()
    assert tasks.seen == []
    tasks.note.using(run_after=datetime(2020, 1, 1, tzinfo=UTC)).enqueue()
    work()
    assert len(tasks.seen) == 1
    for wrong in (timedelta(seconds=-1), 5, datetime(2030, 1, 1)):  # noqa: DTZ001
        with pytest.raises(InvalidTask, match="run_after"):
            tasks.note.using(run_after=wrong)


def test_a_task_of_higher_priority_runs_first(configure: Configure) -> None:
    priorities = [message_priority(each) for each in range(-100, 101)]
    assert priorities == sorted(priorities)
    assert set(priorities) == set(range(10))
    assert [priorities[100 + each] for each in (-1, 0, 1)] == [3, 4, 5]
    for priority in (0, -50, 3, 100, -1):
        tasks.note.using(priority=priority).enqueue(priority)
    work(concurrency=1)
    assert [args[0] for args, _ in tasks.seen] == [100, 3, 0, -1, -50]


def test_a_task_that_no_worker_could_run_is_refused(configure: Configure) -> None:
    with pytest.raises(TypeError):
        tasks.note.enqueue(object())
    with pytest.raises(delayq.EncodeError, match="NaN"):
        tasks.note.enqueue(float("nan"))
    with pytest.raises(TypeError):
        async_to_sync(tasks.note.aenqueue)(datetime.now(UTC))
    with pytest.raises(InvalidTask, match="decorate the function"):
        tasks.renamed.enqueue()

    def own() -> None: ...

    own.__module__, own.__qualname__ = "__main__", "own"
    with pytest.raises(InvalidTask, match="'own' is in the program itself"):
        django.tasks.task(own).enqueue()
    assert queue().stats().ready == 0


def test_all_threads_and_loops_share_a_client_and_its_queues(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    clients: list[Any] = []
    open_queue = delayq.Client.reliable_queue

    def noted(client: delayq.Client, name: str, **more: Any) -> Any:
        opened.append(name)
        return open_queue(client, name, **more)

    monkeypatch.setattr(delayq.Client, "reliable_queue", noted)

    def enqueue() -> None:
        # Each thread has a backend of its own.
        clients.append(task_backends["default"].client)
        tasks.note.enqueue()
        async_to_sync(tasks.note.aenqueue)()

    enqueue()
    threads = [threading.Thread(target=enqueue) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(clients)) == 1
    tasks.note.using(queue_name="emails").enqueue()
    assert opened == ["default", "emails"]
    configure(lease=60)
    enqueue()
    assert opened == ["default", "emails", "default"]
    assert queue().stats().ready == 20
    task_backends.close_all()
    with pytest.raises(delayq.Closed):
        clients[-1].server_time()
    tasks.note.enqueue()
    assert queue().stats().ready == 21


# Failures


def test_a_task_that_fails_is_retried_and_then_a_dead_letter(
    configure: Configure, signals: list[Any]
) -> None:
    async_to_sync(tasks.anote.aenqueue)("value")
    work()
    # It has run in the event loop.
    assert tasks.seen == [("value", True)]
    statuses: list[Any] = [("enqueued", "READY", []), ("started", "RUNNING", [])]
    assert signals == [*statuses, ("finished", "SUCCESSFUL", [])]
    tasks.seen.clear()
    signals.clear()
    configure(max_attempts=2, backoff=Backoff.fixed(0))
    result = tasks.fail.enqueue()
    while queue().stats().ready:
        work()
    assert tasks.seen == [1, 2]
    (letter,) = queue().dead.list()
    assert (letter.id, letter.reason) == (result.id, "attempts")
    assert letter.error == "ValueError: it fails"
    assert signals == [*statuses, statuses[1], ("finished", "FAILED", [ValueError])]


def test_a_receiver_that_fails_changes_nothing(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("broken receiver")

    for each in SIGNALS.values():
        monkeypatch.setattr(each, "receivers", list(each.receivers))
        each.connect(broken)
    tasks.note.enqueue()
    tasks.anote.enqueue(1)
    work()
    assert len(tasks.seen) == 2
    assert queue().stats().dead == queue().stats().delayed == 0


def test_a_message_that_is_no_task_becomes_a_dead_letter(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tests.support.django_project.tasks"
    names = (5, "nowhere", "nowhere.tasks.note", f"{module}.gone", f"{module}.plain")
    wrong = ("text", {"args": []}, *({"task": name, "args": [], "kwargs": {}} for name in names))
    for value in wrong:
        queue().offer(value)
    # One whose module cannot be imported now is tried again.
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needy_tasks.py").write_text("import a_module_that_is_not_installed\n")
    queue().offer({"task": "needy_tasks.go", "args": [], "kwargs": {}})
    work()
    reasons = [letter.reason for letter in queue().dead.list()]
    assert len(reasons) == len(wrong)
    for reason in reasons:
        assert reason.startswith(("unknown task", "it is not a call of a Django task"))
    assert queue().stats().delayed == 1


# Results


KEEP = {"keep": timedelta(hours=1), "max_attempts": 3, "backoff": Backoff.fixed(3600)}


def get(task: Any, known: str) -> Any:
    """Get the result of a task, as a project of its kind does."""
    return (async_to_sync(task.aget_result) if task.name[0] == "a" else task.get_result)(known)


@pytest.mark.parametrize("name", ["note", "anote"])
def test_a_result_is_what_the_task_has_returned(configure: Configure, name: str) -> None:
    configure(**KEEP)
    task = getattr(tasks, name).using(priority=5, queue_name="emails")
    sent = task.enqueue((1, b"2"))
    before = get(task, sent.id)
    assert (before.status, before.is_finished, before.attempts) == ("READY", False, 0)
    with pytest.raises(ValueError, match="not finished"):
        _ = before.return_value

    async def claim(client: delayq.Client) -> Any:
        (message,) = await client.reliable_queue("emails").claim()
        return message

    message = default_task_backend.client.run(claim)
    within = get(task, sent.id)
    assert (within.status, within.attempts, within.started_at) == ("RUNNING", 1, None)
    default_task_backend.client.run(lambda _: message.release())
    assert get(task, sent.id).attempts == 0
    work()
    task_result = get(task, sent.id)
    assert (task_result.status, task_result.errors, task_result.attempts) == ("SUCCESSFUL", [], 1)
    assert task_result.return_value == (None if name == "note" else [1, "2"])
    assert (task_result.id, task_result.args, task_result.kwargs) == (sent.id, [[1, "2"]], {})
    assert (task_result.task, task_result.backend) == (task, "default")
    assert task_result.worker_ids[0].endswith(f":{os.getpid()}")
    moments = [task_result.enqueued_at, task_result.started_at, task_result.finished_at]
    assert moments == sorted(moments)
    assert task_result.last_attempted_at == task_result.started_at
    assert abs(task_result.enqueued_at - sent.enqueued_at) < timedelta(minutes=1)
    sent.refresh()
    async_to_sync(sent.arefresh)()
    assert sent.is_finished


@pytest.mark.parametrize("name", ["fail", "afail"])
def test_a_result_tells_the_error_of_each_attempt(configure: Configure, name: str) -> None:
    configure(**KEEP)
    task = getattr(tasks, name)
    id = task.enqueue().id  # noqa: A001
    for attempt in (1, 2, 3):
        work()
        queue().reschedule(id, 0)
        task_result = get(task, id)
        assert [error.exception_class for error in task_result.errors] == [ValueError] * attempt
        assert task_result.errors[-1].traceback.startswith("Traceback")
        assert task_result.errors[-1].traceback.endswith("ValueError: it fails")
        assert (task_result.attempts, task_result.status) == (
            attempt,
            "FAILED" if attempt == 3 else "READY",
        )
        assert (task_result.finished_at is None) == (attempt < 3)
        assert task_result.started_at <= task_result.last_attempted_at
    with pytest.raises(ValueError, match="Task failed"):
        _ = task_result.return_value


def test_a_task_that_was_rejected_has_failed(configure: Configure, signals: list[Any]) -> None:
    configure(**KEEP)
    for task, error, reason in (
        (tasks.reject, delayq.Reject, "no use"),
        (tasks.no_json, TypeError, "its return value is not JSON"),
    ):
        id = task.enqueue().id  # noqa: A001
        work()
        task_result = task.get_result(id)
        assert task_result.status == TaskResultStatus.FAILED
        assert task_result.errors[-1].exception_class is delayq.Reject
        assert task_result.errors[-1].traceback.startswith(reason)
        assert queue().dead.list()[-1].reason.startswith(reason)
        assert signals[-1] == ("finished", "FAILED", [error])
    assert tasks.seen == ["no_json"]
    id = tasks.unusual.enqueue().id  # noqa: A001
    work()
    (error,) = tasks.unusual.get_result(id).errors
    assert error.exception_class is tasks.Unusual
    assert "Unusual: a\nb" in error.traceback


def test_there_is_no_result_of_what_is_unknown(configure: Configure) -> None:
    configure(**KEEP)
    id = tasks.note.enqueue().id  # noqa: A001
    with pytest.raises(TaskResultMismatch):
        tasks.anote.get_result(id)
    queue().cancel(id)
    other = queue().offer("not a task")
    for unknown in (id, other, "no such", "", "x" * 5000):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.note.get_result(unknown)


# The database


@pytest.mark.parametrize("name", ["query", "aquery"])
def test_connections_are_closed_after_each_task(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    from django.db import connections

    monkeypatch.setitem(connections.settings["default"], "NAME", str(tmp_path / "db"))
    getattr(tasks, name).enqueue()
    work()
    (used,) = tasks.seen
    assert used.settings_dict["NAME"] == str(tmp_path / "db")
    assert used.connection is None


# Settings


def test_wrong_settings_are_found_by_the_checks(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELAYQ_URL", raising=False)
    options: Any
    for options, ids in (
        ({}, []),
        ({"lease": timedelta(minutes=5), "durability": "fsync", "timeout": 60}, []),
        ({"max_atempts": 3}, ["delayq.E001"]),
        ({"lease": "long"}, ["delayq.E001"]),
        ({"url": 5}, ["delayq.E001"]),
        ({"url": "http://example.org"}, ["delayq.E002"]),
        ({"url": None}, ["delayq.W001"]),
        ({"url": "embedded:"}, ["delayq.E002"]),
        ({"url": "embedded:./data"}, []),
        ({"queues": "default"}, ["delayq.E003"]),
        ({"queues": ["default", 5]}, ["delayq.E003"]),
    ):
        configure(**options)
        assert [check.id for check in run_checks()] == ids, options


def test_wrong_settings_are_refused_when_they_are_used(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELAYQ_URL", raising=False)
    options: Any
    for options, why in (
        ({"url": None}, "no address of a server"),
        ({"url": "embedded:"}, "its own embedded server"),
        ({"max_atempts": 3}, "no option 'max_atempts', only backoff"),
    ):
        configure(**options)
        with pytest.raises(ImproperlyConfigured, match=why):
            tasks.note.enqueue()
        with pytest.raises(ImproperlyConfigured, match=why):
            new_worker()
        # Nothing was opened.
        task_backends.close_all()


def test_a_worker_is_for_queues_that_there_are(configure: Configure) -> None:
    with pytest.raises(ImproperlyConfigured, match="no queue 'mail', only default, emails"):
        new_worker(queues=["mail"])
    configure(prefix="shop:")
    tasks.note.using(queue_name="emails").enqueue(1)
    tasks.note.enqueue(2)
    assert (queue("shop:emails").stats().ready, queue("shop:default").stats().ready) == (1, 1)
    work(queues=["emails"])
    assert tasks.seen == [((1,), {})]
    configure(queues=[])
    with pytest.raises(ImproperlyConfigured, match="allows any name"):
        new_worker()
    tasks.note.using(queue_name="any").enqueue()
    work(queues=["any"])
    assert len(tasks.seen) == 2
    dummy = {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}
    with override_settings(TASKS={"default": dummy}):
        with pytest.raises(ImproperlyConfigured, match="is a DummyBackend"):
            new_worker()
        with pytest.raises(CommandError, match="is a DummyBackend"):
            call_command("delayq_worker")


# The command


@asynccontextmanager
async def worker_command(
    *arguments: str, url: str, cwd: Path, until_log_has: list[str]
) -> AsyncIterator[subprocess.Popen[str]]:
    """Run ``manage.py delayq_worker`` until a log has these lines, and then until it ends."""
    with subprocess.Popen(
        [sys.executable, "-m", "django", "delayq_worker", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DELAYQ_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
    ) as process:
        try:
            await until(lambda: sorted(lines(cwd / "log")) == until_log_has, 180)
            yield process
            output = await asyncio.to_thread(process.communicate)
        finally:
            process.kill()
    assert process.returncode == 0, output


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_the_command_runs_what_is_due(
    configure: Configure, server: PrivateServer, tmp_path: Path
) -> None:
    tasks.write.enqueue(str(tmp_path / "log"), "one")
    tasks.write.using(queue_name="emails").enqueue(str(tmp_path / "log"), "two")
    done = run_python(
        "-m", "django", "delayq_worker", "--burst", "--queue", "default", DELAYQ_URL=server.url
    )
    assert done.returncode == 0, done.stderr
    assert "<Worker of 'default'> runs tasks" in done.stdout
    assert lines(tmp_path / "log") == ["one"]


@pytest.mark.gate
async def test_a_signal_stops_the_command_when_tasks_have_ended(
    configure: Configure, server: PrivateServer, tmp_path: Path
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    await tasks.write_late.aenqueue(str(log), str(go), "done")
    health, metrics = (f"127.0.0.1:{port}" for port in (free_port(), free_port()))
    options = (f"--health={health}", f"--metrics-port={metrics.rpartition(':')[2]}")
    async with worker_command(
        *options, url=server.url, cwd=tmp_path, until_log_has=["begun"]
    ) as process:
        for page in (f"{health}/livez", f"{health}/metrics", f"{metrics}/metrics"):
            with await asyncio.to_thread(urlopen, f"http://{page}") as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGINT)
        await tasks.write.aenqueue(str(log), "later")
        go.touch()
    assert lines(log) == ["begun", "done"]
    assert (await asyncio.to_thread(queue().stats)).ready == 1


def test_wrong_options_of_the_command_are_named(configure: Configure) -> None:
    for arguments, words in (
        (["--processes=0"], "--processes must be at least 1"),
        (["--reload", "--burst"], "--reload goes with neither"),
        (["--concurrency=0"], "concurrency must be an int of at least 1"),
        (["--queue=nowhere"], "no queue 'nowhere'"),
        (["--health=8080"], "must be HOST:PORT"),
        (["--metrics-port=65536"], "--metrics-port must be from 1 to 65535"),
    ):
        with pytest.raises(CommandError, match=words):
            call_command("delayq_worker", *arguments)
