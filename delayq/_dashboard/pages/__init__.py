"""The pages. Each has a module, a template, and an entry here, in the order of the navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._dashboard.pages import (
    dead,
    enqueue,
    groups,
    history,
    letters,
    login,
    message,
    overview,
    purge,
    queue,
    schedules,
    search,
    server,
    settings,
    workers,
)

if TYPE_CHECKING:
    from delayq._dashboard.page import Page

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    search.PAGE,
    workers.PAGE,
    server.PAGE,
    login.PAGE,
    # Of a queue
    queue.PAGE,
    history.PAGE,
    dead.PAGE,
    letters.PAGE,
    groups.PAGE,
    schedules.PAGE,
    enqueue.PAGE,
    settings.PAGE,
    purge.PAGE,
    message.PAGE,
)
