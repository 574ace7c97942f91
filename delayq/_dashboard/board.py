"""The pages of the dashboard, and the board that provides them with queues, logins and templates.

Each module of :mod:`delayq._dashboard.pages` declares a page.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from delayq._dashboard.counts import Counts
from delayq._dashboard.forms import Form, redirect, whole_number
from delayq._dashboard.live import Answers, Live
from delayq._dashboard.queues import Cached, Queues
from delayq._dashboard.rendering import environment, link
from delayq._dashboard.security import Guard, is_loopback, same_origin
from delayq._dashboard.sources import ReliableSource
from delayq._dashboard.undo import Undos
from delayq._logging import log
from delayq.admin.catalog import KINDS
from delayq.admin.payloads import PayloadCipher
from delayq.errors import DelayqError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from jinja2 import Template
    from starlette.requests import Request

    from delayq._dashboard.security import Login
    from delayq._dashboard.sources import AnySource
    from delayq._engine.session import Session
    from delayq.admin.catalog import QueueKind
    from delayq.client import Client
    from delayq.codecs.encrypted import Keys

    Load = Callable[["Board", Request], Awaitable[Mapping[str, Any]]]
    # Gets the queue that the form names, of a kind that the action supports.
    Act = Callable[["Board", Any, Form], Awaitable[Response]]

T = TypeVar("T")

_log = logging.getLogger("delayq")

_LOGIN = "delayq.login"
# How long the answers of all queues count, in seconds: the time between two live updates.
_FRESH = 0.9
# Parts of an address that only say how the visitor got there.
_TRANSIENT = ("done", "count", "undo")


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
        every: The time between two updates of its live parts, if it is longer than a second (s);
            less than 5, since a page says after that time that it hears nothing.
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
    every: float = 0
    operators: bool = False
    public: bool = False
    actions: Mapping[str, Action] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the address in links."""
        return self.path.removeprefix("/")


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
        keys: Keys | None,
    ) -> None:
        self.client = client
        self.guard = guard
        self.queues = Queues(self.session, queues)
        self.undos = Undos()
        self.live = Live()
        self.counts = Counts()
        self._pages = {page.template.removesuffix(".html"): page for page in pages}
        self.cipher = PayloadCipher(keys)
        self._templates = environment()
        self._templates.globals |= {"title": title, "site": pages}
        self._warned = False
        self._answers: dict[str, Cached[Any]] = {}
        self._notes: dict[str, Note] = {}
        for page in pages:
            self._notes |= page.notes

    def session(self) -> Session:
        return self.client.session

    async def now(self) -> int:
        """Return the server's time, in microseconds."""
        return await self.session().server.time_us()

    def login(self, request: Request) -> Login | None:
        """Return the login of a request, which was looked up once at its beginning."""
        login: Login | None = request.scope.get(_LOGIN)
        return login

    async def admit(self, request: Request) -> bool:
        """Find the login of a request. Returns whether it may read."""
        request.scope[_LOGIN] = login = await self.guard.login(request)
        return login is not None or not self.guard.private

    def may_act(self, request: Request) -> bool:
        login = self.login(request)
        return login is not None and login.may_act

    async def shared(
        self, question: str, ask: Callable[[], Coroutine[None, None, T]], age: float
    ) -> T:
        """Return the answer to a question, shared by all callers.

        It is at most ``age`` seconds old, or older if asking took long.
        """
        answer: T = await self._answers.setdefault(question, Cached(ask)).sparingly(age)
        return answer

    async def ask_all(
        self, question: str, ask: Callable[[ReliableSource], Coroutine[None, None, T]]
    ) -> list[tuple[ReliableSource, T | str]]:
        """Return all reliable queues, each with its answer, or why the server refused it.

        The answers are shared by all callers, and as old as those of :meth:`shared`.
        """

        async def ask_each() -> list[tuple[ReliableSource, T | str]]:
            sources = [
                source
                for queue in await self.queues.find_all()
                if isinstance(source := self.queues.of(*queue), ReliableSource)
            ]
            answers = await Answers(ask).of(sources, 0)
            return list(zip(sources, answers, strict=True))

        return await self.shared(question, ask_each, _FRESH)

    # Queues

    async def source(self, request: Request) -> AnySource:
        """Return the queue in a page's address. Raises HTTPException."""
        params = request.query_params
        return await self.source_of(params.get("kind", ""), params.get("name", ""))

    async def source_of(self, kind: str, name: str) -> AnySource:
        source = await self.queues.source(kind, name)
        if source is None:
            raise HTTPException(
                404,
                "Queue not found. A delayed queue exists only while it holds messages, and a"
                " reliable queue until it has been idle for 30 days.",
            )
        return source

    async def reliable(self, request: Request) -> ReliableSource:
        """Return the reliable queue in a page's address. Raises HTTPException."""
        source = await self.source(request)
        if not isinstance(source, ReliableSource):
            raise HTTPException(
                404, "A delayed queue has no dead letters, groups, schedules or settings."
            )
        return source

    # Pages and forms

    async def page(
        self,
        request: Request,
        template: str,
        status: int = 200,
        *,
        page: Page | None = None,
        **values: Any,
    ) -> Response:
        """Show a template."""
        login = self.login(request)
        note, bad = self._note(request.query_params)
        undo = request.query_params.get("undo", "")
        undoable = self.undos.find(undo)
        # The answer to a form has no address that could be requested again.
        is_at_rest = request.method != "POST"
        compiled = self._templates.get_template(template)
        query = _lasting(request) | dict(values.get("settled", {}))
        refresh = values.get("refresh", page.refresh if page else 0)
        values |= self._common_values(request, page, may_act=login is not None and login.may_act)
        values |= {
            # One token for the form that logs out, and one for the forms that act.
            "logout_token": None if login is None or login.hosted else self.guard.form_token(login),
            "form_token": self.guard.form_token(login)
            if login is not None and login.may_act
            else None,
            "admitted": login is not None or not self.guard.private,
            "note": note,
            "note_is_bad": bad,
            "undo": undo,
            "undo_of": undoable and undoable.queue,
            "is_final": undo == "no",
            "refresh": refresh if is_at_rest else 0,
            "live": is_at_rest
            and values.get("is_live", True)
            and _live_blocks(compiled)
            and link("events", **query | {"page": template[:-5]}),
        }
        # A payload may be large, so other requests are served in the meantime.
        text = await run_in_threadpool(compiled.render, values)
        # Text that cannot be encoded came from the server in this state.
        response = HTMLResponse(text.encode(errors="replace"), status)
        if login is not None and login.hosted:
            self.guard.remember(request, response, login)
        return response

    async def refuse(self, form: Form, page: Page, **values: Any) -> Response:
        """Show a page again, with what was typed into its form and why that was refused."""
        return await self.page(form.request, page.template, 400, page=page, **values)

    def _common_values(
        self, request: Request, page: Page | None, *, may_act: bool
    ) -> dict[str, Any]:
        """Return the values of all templates, including live parts."""
        return {
            "guard": self.guard,
            "cipher": self.cipher,
            "operator": may_act,
            "here": page.name if page else None,
            "back": link(page.name or "./", **_lasting(request))
            if page and not page.public
            else "",
            "exposed": self._is_exposed(request),
        }

    def forget(self, source: AnySource) -> None:
        """Read everything again, because a queue was changed."""
        self.live.forget()
        self.counts.forget(source.name)
        self._answers.clear()

    async def live_view(self, request: Request) -> Response:
        """Send the live parts of a page until the viewer leaves. Raises HTTPException."""
        page = self._pages.get(request.query_params.get("page", "queue"))
        if page is None or not _live_blocks(self._templates.get_template(page.template)):
            raise HTTPException(404, "There is no such page, or it has no live parts.")
        login = self.login(request)
        # The name of a visitor whom the host application knows is the browser's choice.
        owner = None if login is None or login.hosted else login.name
        may_act = self.may_act(request)
        render = partial(self._live_parts, page, request, may_act)
        query = tuple(sorted(request.query_params.multi_items()))
        key = page.path, query, may_act
        return await self.live.view(key, render, owner, operator=may_act, every=page.every)

    async def _live_parts(self, page: Page, request: Request, may_act: bool) -> dict[str, str]:
        template = self._templates.get_template(page.template)
        values = {
            **await page.load(self, request),
            **self._common_values(request, page, may_act=may_act),
        }

        def render() -> dict[str, str]:
            context = template.new_context(values)
            return {name: "".join(block(context)) for name, block in _live_blocks(template).items()}

        return await run_in_threadpool(render)

    def _is_exposed(self, request: Request) -> bool:
        """Return whether other machines can read, and warn of it once."""
        server = request.scope.get("server")
        if self.guard.private or server is None or server[1] is None or is_loopback(server[0]):
            return False
        if not self._warned:
            self._warned = True
            _log.warning(
                "the dashboard has no read_token and no authenticate: anyone who can reach"
                " %s can read all payloads",
                server[0],
            )
        return True

    def own_address(self, address: str) -> tuple[str, dict[str, str]]:
        """Return the page and the query of an address; the first page if it is not one of ours.

        Both are rebuilt, so that a link to the login cannot lead to another site.
        """
        name, _, query = address.removeprefix("./").partition("?")
        if name not in {page.name for page in self._pages.values()}:
            return "./", {}
        try:
            parameters = dict(parse_qsl(query, max_num_fields=20))
        except ValueError:
            return "./", {}
        return name or "./", {
            key: value for key, value in parameters.items() if key not in _TRANSIENT
        }

    def redirect_back(self, form: Form, source: AnySource, page: str, /, **query: str) -> Response:
        """Send the browser to the page that the form names, or to a page of the queue."""
        name, parameters = self.own_address(form.get("back"))
        if not form.get("back"):
            return redirect(page, source, **query)
        lasting = {key: text for key, text in query.items() if key in _TRANSIENT}
        return RedirectResponse(link(name, **parameters | lasting), 303)

    def log_action(self, form: Form, source: AnySource, outcome: Response | DelayqError) -> None:
        """Log what an operator has done to a queue, or may have, if the outcome is an error."""
        if isinstance(outcome, DelayqError):
            text, is_refused = str(outcome), False
        else:
            address = outcome.headers.get("location", "")
            text, is_refused = self._note(QueryParams(urlsplit(address).query))
        if is_refused or not text:
            return
        client, target = form.request.client, form.target()
        log(
            logging.INFO,
            source.name,
            "an operator at %s asked the dashboard for %s%s: %s",
            client.host if client else "an unknown address",
            form.get("do"),
            f" of {target!r}" if target else "",
            text,
        )

    def _note(self, parameters: QueryParams) -> tuple[str, bool]:
        note = self._notes.get(parameters.get("done", ""))
        if note is None:
            return "", False
        if not note.plural:
            return note.text, note.bad
        count = whole_number(parameters.get("count"))
        return f"{count:,} {note.text if count == 1 else note.plural}", note.bad

    async def form_to_act(self, request: Request) -> Form:
        """Return the form of a request that may act. Raises HTTPException."""
        login = self.login(request)
        if not self.guard.writable or (login is not None and not login.may_act):
            raise HTTPException(403, "This dashboard is read-only.")
        form = await self.form_of(login, request)
        form.add_address()
        return form

    async def form_of(self, login: Login | None, request: Request) -> Form:
        """Return the form of a request, if a page of this login sent it. Raises HTTPException."""
        form = await self.form(request)
        if login is None or not self.guard.is_ours(login, form.get("form_token")):
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
        return await Form.of(request, operator=self.may_act(request))


def is_live(request: Request) -> bool:
    """Return whether a page is read to update it in a browser that has it open."""
    return request.url.path.endswith("/events")


def _lasting(request: Request) -> dict[str, str]:
    """Return the query of a page's address, without what only says how the visitor got there."""
    params = request.query_params
    # The address of a live view has that of its page, and the page's name.
    transient = {*_TRANSIENT, "page"} if is_live(request) else _TRANSIENT
    return {name: text for name, text in params.items() if name not in transient}


def _live_blocks(template: Template) -> dict[str, Any]:
    return {name: block for name, block in template.blocks.items() if name.startswith("live_")}
