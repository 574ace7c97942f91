"""The pages. Each has a module, a template, and an entry here, in the order of the navigation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayq._dashboard.pages import dead, login, message, overview, queue, settings

if TYPE_CHECKING:
    from delayq._dashboard.page import Page

PAGES: tuple[Page, ...] = (
    overview.PAGE,
    login.PAGE,
    # Of a queue
    queue.PAGE,
    dead.PAGE,
    settings.PAGE,
    message.PAGE,
)
