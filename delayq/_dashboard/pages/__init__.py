"""The pages. Each has a module, a template, and an entry here, in the order of the navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._dashboard.pages import (
    dead,
    history,
    login,
    message,
    overview,
    queue,
    settings,
    workers,
)

if TYPE_CHECKING:
    from delayq._dashboard.page import Page

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    workers.PAGE,
    login.PAGE,
    # Of a queue
    queue.PAGE,
    history.PAGE,
    dead.PAGE,
    settings.PAGE,
    message.PAGE,
)
