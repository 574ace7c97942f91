"""Gives pages and actions what they use: queues, logins, templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from delayq._dashboard.forms import Form, whole
from delayq._dashboard.live import Live
from delayq._dashboard.queues import Queues
from delayq._dashboard.rendering import environment
from delayq._dashboard.security import Guard, same_origin
from delayq._dashboard.source import ReliableSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request

    from delayq._dashboard.page import Note, Page
    from delayq._dashboard.security import Login
    from delayq._dashboard.source import AnySource
    from delayq._engine.session import Session
    from delayq.client import Client


class Board:
    """The dashboard of one client."""

    def __init__(
        self,
        client: Client,
        guard: Guard,
        pages: Sequence[Page],
        *,
        queues: Iterable[str] | None,
        title: str,
    ) -> None:
        self._client = client
        self.guard = guard
        self.queues = Queues(self.session, queues)
        self.live = Live(self.now)
        self._templates = environment()
        self._templates.globals |= {"title": title, "site": pages}
        self._notes: dict[str, Note] = {}
        for page in pages:
            self._notes |= page.notes

    def session(self) -> Session:
        return self._client._open_session()  # noqa: SLF001 - a part of the library

    async def now(self) -> int:
        """Return the server's time, in microseconds."""
        return await self.session().server.time_us()

    # Queues

    async def source(self, request: Request) -> AnySource:
        """Return the queue in a page's address. Raises HTTPException."""
        asked = request.query_params
        return await self.source_of(asked.get("kind", ""), asked.get("name", ""))

    async def source_of(self, kind: str, name: str) -> AnySource:
        source = await self.queues.source(kind, name)
        if source is None:
            raise HTTPException(
                404, "Queue not found. A queue exists on the server only while it holds messages."
            )
        return source

    async def reliable(self, request: Request) -> ReliableSource:
        """Return the reliable queue in a page's address. Raises HTTPException."""
        source = await self.source(request)
        if not isinstance(source, ReliableSource):
            raise HTTPException(404, "A delayed queue has neither dead letters nor settings.")
        return source

    # Pages and forms

    async def page(
        self,
        request: Request,
        template: str,
        status: int = 200,
        *,
        of: Page | None = None,
        **values: Any,
    ) -> Response:
        """Show a template."""
        login = self.guard.login(request)
        note, bad = self._note(request)
        shared = {
            "writable": self.guard.writable,
            "private": self.guard.private,
            # One for the form that logs out, and one for the forms that act.
            "leave": None if login is None else self.guard.word(login),
            "word": self.guard.word(login) if login is not None and login.may_act else None,
            "note": note,
            "note_is_bad": bad,
            "refresh": of.refresh if of else 0,
            "here": of.name if of else None,
        }
        # A payload may be large, so other requests are served in the meantime.
        text = await run_in_threadpool(
            self._templates.get_template(template).render, shared | values
        )
        # Text that cannot be encoded came from the server in this state.
        return HTMLResponse(text.encode(errors="replace"), status)

    def _note(self, request: Request) -> tuple[str, bool]:
        note = self._notes.get(request.query_params.get("done", ""))
        if note is None:
            return "", False
        if not note.plural:
            return note.text, note.bad
        count = whole(request.query_params.get("count"))
        return f"{count:,} {note.text if count == 1 else note.plural}", note.bad

    async def form_to_act(self, request: Request) -> Form:
        """Return the form of a request that may act. Raises HTTPException."""
        login = self.guard.login(request)
        if not self.guard.writable or (login is not None and not login.may_act):
            raise HTTPException(403, "This dashboard is read-only.")
        return await self.form_of(login, request)

    async def form_of(self, login: Login | None, request: Request) -> Form:
        """Return the form of a request, if a page of this login sent it. Raises HTTPException."""
        form = await self.form(request)
        if login is None or not self.guard.is_ours(login, form.get("word")):
            raise HTTPException(
                403,
                "Your session has expired, or this form belongs to another session. Log in and try"
                " again.",
            )
        return form

    async def form(self, request: Request) -> Form:
        """Return the form of a request, if a page of this host sent it. Raises HTTPException."""
        if not same_origin(request):
            raise HTTPException(403, "This form was not submitted from a page of this dashboard.")
        return await Form.of(request)
