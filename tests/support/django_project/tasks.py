"""Tasks of the project. They note what they do in ``seen``, or in a file."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection, connections
from django.tasks import task

import delayq

seen: list[Any] = []
"""What tasks have noted in this process."""


@task  # type: ignore[untyped-decorator]
def note(*args: Any, **kwargs: Any) -> None:
    seen.append((args, kwargs))


@task  # type: ignore[untyped-decorator]
async def anote(value: object) -> object:
    await asyncio.sleep(0)
    seen.append((value, threading.current_thread() is threading.main_thread()))
    return value


@task(queue_name="emails", priority=7, takes_context=True)  # type: ignore[untyped-decorator]
def with_context(context: Any, value: object) -> None:
    seen.append((context, value, threading.current_thread() is threading.main_thread()))


@task(takes_context=True)  # type: ignore[untyped-decorator]
async def awith_context(context: Any) -> None:
    seen.append(context.attempt)


@task(takes_context=True)  # type: ignore[untyped-decorator]
def fail(context: Any) -> None:
    seen.append(context.attempt)
    raise ValueError("it fails")


@task(takes_context=True)  # type: ignore[untyped-decorator]
async def afail(context: Any) -> None:
    fail.func(context)


class Unusual(Exception):
    pass


@task  # type: ignore[untyped-decorator]
def unusual() -> None:
    raise Unusual("a\nb")


@task  # type: ignore[untyped-decorator]
def reject() -> None:
    raise delayq.Reject("no use")


@task  # type: ignore[untyped-decorator]
def no_json() -> object:
    seen.append("no_json")
    return object()


@task  # type: ignore[untyped-decorator]
def query() -> None:
    with connection.cursor() as cursor:
        cursor.execute("select 1")
    seen.append(connections["default"])


@task  # type: ignore[untyped-decorator]
async def aquery() -> None:
    await sync_to_async(query.func)()


@task  # type: ignore[untyped-decorator]
def enqueue_another(value: object) -> None:
    note.enqueue(value)


@task  # type: ignore[untyped-decorator]
def write(path: str, text: str) -> None:
    """Append a line to a file."""
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@task  # type: ignore[untyped-decorator]
def write_late(path: str, until: str, text: str) -> None:
    """Append ``begun``, and then a line once another file exists."""
    write.func(path, "begun")
    while not Path(until).exists():
        time.sleep(0.01)
    write.func(path, text)


def plain() -> None:
    """Do nothing. This function is not a task."""


renamed = task(plain)
