# mypy: disable-error-code="import-not-found, untyped-decorator, no-any-return, unused-ignore"
"""Celery: delayed messages wait in the memory of the worker, unacknowledged."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from celery import Celery

from benchmarks._peers.adapter import Notes, Offers, Payload, main, payload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def app_for(url: str, notes: Notes | None = None) -> tuple[Any, Any]:
    app = Celery("benchmark", broker=url)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)

    @app.task(name="handle")
    def note(message: Payload) -> None:
        assert notes is not None
        notes.add(message["due"])

    return app, note


@asynccontextmanager
async def offers(url: str) -> AsyncIterator[Offers]:
    _, task = app_for(url)

    def offer_one(due: float) -> None:
        task.apply_async((payload(due),), eta=datetime.fromtimestamp(due, UTC))

    yield Offers(offer_one)


def handle(url: str, best: bool, notes: Notes) -> None:
    # By default, handlers run in child processes, which live as long as the worker but may be
    # killed.
    app, _ = app_for(url, notes.by_thread() if best else notes.at_once())
    quiet = ["worker", "--loglevel=ERROR"]
    app.worker_main(
        quiet
        + (
            ["--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat"]
            if best
            else []
        )
    )


if __name__ == "__main__":
    main(offers, handle)
