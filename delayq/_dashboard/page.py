"""Declares the parts of a page. Each module of :mod:`delayq._dashboard.pages` declares one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from delayq._dashboard.board import Board
    from delayq._dashboard.forms import Form
    from delayq.admin.catalog import QueueKind

    Load = Callable[[Board, Request], Awaitable[Mapping[str, Any]]]
    # Gets the queue that the form names, of a kind that the action supports.
    Act = Callable[[Board, Any, Form], Awaitable[Response]]

KINDS: tuple[QueueKind, ...] = ("reliable", "delayed")


@dataclass(frozen=True)
class Note:
    """The text that a page shows after an action. It never comes from the address.

    Attributes:
        text: The text; it follows a number if there is a plural.
        plural: The text after every number except 1.
        bad: Whether nothing was done.
    """

    text: str
    plural: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Action:
    """A change that operators can make. Its form is sent to ``act``, with its name as ``do``."""

    run: Act
    kinds: tuple[QueueKind, ...] = KINDS


@dataclass(frozen=True)
class Page:
    """A page, and the actions whose forms it has.

    Attributes:
        path: The address below the dashboard's. The pages are all on one level, since their links
            are relative.
        template: The file that shows the page.
        load: Reads the values that the template shows. Raises HTTPException.
        label: The name in the navigation; empty for pages that other pages lead to.
        scope: The navigation that lists the page: of the whole server, or of each queue.
        kinds: The queues that have this page.
        refresh: The time until the page reloads itself where scripts do not run (s); 0 for never.
        operators: Whether the navigation lists the page for operators only.
        public: Whether the page is shown without a login.
        actions: The actions by name. A name belongs to one page.
        notes: The texts that these actions lead to, by the value of ``done`` in the address.
    """

    path: str
    template: str
    load: Load
    label: str = ""
    scope: Literal["", "server", "queue"] = ""
    kinds: tuple[QueueKind, ...] = KINDS
    refresh: int = 0
    operators: bool = False
    public: bool = False
    actions: Mapping[str, Action] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the address in links."""
        return self.path.removeprefix("/")
