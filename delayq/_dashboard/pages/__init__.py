"""The pages. Each has a template, and an entry here, in the order of the navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._dashboard.pages import (
    batches,
    dead,
    enqueue,
    groups,
    history,
    login,
    message,
    overview,
    queue,
    retries,
    schedules,
    search,
    server,
    settings,
)

if TYPE_CHECKING:
    from delayq._dashboard.board import Page

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    search.PAGE,
    retries.ALL_RETRIES,
    dead.ALL_LETTERS,
    schedules.ALL_SCHEDULES,
    server.WORKERS,
    server.SERVER,
    login.PAGE,
    # Of a queue
    queue.PAGE,
    history.PAGE,
    retries.PAGE,
    dead.LETTERS,
    dead.MATCHING_LETTERS,
    groups.PAGE,
    batches.PAGE,
    schedules.PAGE,
    enqueue.PAGE,
    settings.PAGE,
    queue.PURGE,
    message.PAGE,
)
