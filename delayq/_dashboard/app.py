"""The dashboard's pages and actions."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from delayq._dashboard.queues import Cached, Queues
from delayq._dashboard.rendering import environment, link, packed, unpacked
from delayq._dashboard.security import Guard, SecurityHeaders, same_origin
from delayq._dashboard.source import (
    SECOND,
    DelayedSource,
    Place,
    ReliableSource,
    late_us,
    undeliverable,
)
from delayq._durations import microseconds
from delayq._reliable.keys import MOST_PARTITIONS
from delayq._reliable.settings import declare
from delayq.errors import Closed, DelayqError, OutcomeUnknown, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from delayq._dashboard.security import Login
    from delayq._engine.session import Session
    from delayq.admin.catalog import QueueKind
    from delayq.client import Client
    from delayq.stats import QueueDepth

    AnySource = DelayedSource | ReliableSource
    Page = Callable[[Request], Awaitable[Response]]

PAGE = 25
_QUEUES_PER_PAGE = 100
# Each partition is asked for all up to the end of a page, so a page's offset is limited.
_FARTHEST = 1_000_000
_FARTHEST_IN_PARTITIONS = 10_000
_MOST_FORM = 64 * 1024
# Maximum number of live views at a time; each holds a connection. They end by themselves, because a
# server that stops waits for them and cannot tell them. A browser then opens a new one.
_MOST_STREAMS = 64
_STREAM_LASTS = 15.0
_RETRY_MS = 300
_EVERY = 1.0
# Less than that, since a sleep of this length may end a moment early.
_FRESH = 0.9 * _EVERY
# Maximum number of queues whose figures are kept.
_MOST_WATCHED = 1000
_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_BARS = ("next minute", "next hour", "next day", "later")

# The text that a page shows after an action comes from here, never from the address.
DONE = {
    "cancelled": "Message cancelled. It will not be delivered.",
    "rescheduled": "Message rescheduled.",
    "gone": "Nothing changed: the message no longer exists, or a worker is handling it.",
    "paused": "Queue paused. No messages are delivered until you resume it.",
    "resumed": "Queue resumed.",
    "configured": "Settings changed. All clients use the new ones from their next call on.",
    "unchanged": "Nothing changed: the queue already has these settings.",
    "unsure": "Nothing changed: confirm that you want another number of partitions.",
    "unchosen": (
        "Nothing changed: select messages, or confirm that the action applies to all of them."
    ),
    "loggedin": "You are logged in as an operator.",
    "reading": "You are logged in with read-only access.",
    "loggedout": "You are logged out.",
}
# The same for actions on several messages, behind their number: singular and plural.
_COUNTED = {
    "redriven": ("message re-queued.", "messages re-queued."),
    "purged": ("dead letter dropped.", "dead letters dropped."),
}
_BAD = ("gone", "unchanged", "unchosen", "unsure")


def make(
    client: Client,
    *,
    token: str | None,
    read_token: str | None,
    queues: Iterable[str] | None,
    title: str,
) -> ASGIApp:
    """Make the application. See :func:`delayq.dashboard`."""
    return SecurityHeaders(_Board(client, Guard(token, read_token), queues, title).app)


class _LiveView(StreamingResponse):
    """A response without end that reports when it has ended, even if it never began."""

    ended: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


class _Board:
    def __init__(
        self, client: Client, guard: Guard, queues: Iterable[str] | None, title: str
    ) -> None:
        self._client = client
        self._guard = guard
        self._title = title
        self._queues = Queues(self._session, queues)
        self._templates = environment()
        self._streams = 0
        self._watched: dict[tuple[str, str], _Watched] = {}
        self.app = Starlette(
            routes=[
                Route("/", self._readers(self._overview)),
                Route("/queue", self._readers(self._queue)),
                Route("/dead", self._readers(self._dead)),
                Route("/settings", self._readers(self._settings)),
                Route("/message", self._readers(self._message)),
                Route("/events", self._readers(self._events)),
                Route("/login", self._login_page),
                Route("/login", self._login, methods=["POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/act", self._act, methods=["POST"]),
                Mount("/static", _Static(packages=[("delayq._dashboard", "static")])),
            ],
            exception_handlers={HTTPException: self._failed, DelayqError: self._failed},
        )
        # Slash redirects are absolute, with the host of the request, which need not be ours.
        self.app.router.redirect_slashes = False

    # Pages

    async def _overview(self, request: Request) -> Response:
        wanted = request.query_params.get("q", "")
        known = await self._queues.known()
        found = [each for each in known if wanted.casefold() in each[1].casefold()]
        offset = _whole(request.query_params.get("offset"))
        sources = [self._queues.of(*each) for each in found[offset : offset + _QUEUES_PER_PAGE]]
        counted = await asyncio.gather(
            *(self._watch(source).depth.at_most(_FRESH) for source in sources)
        )
        return await self._page(
            request,
            "overview.html",
            rows=list(zip(sources, counted, strict=True)),
            wanted=wanted,
            total=len(found),
            offset=offset,
            limit=_QUEUES_PER_PAGE,
            refresh=5,
        )

    async def _queue(self, request: Request) -> Response:
        source = await self._source(request.query_params)
        state = request.query_params.get("state", source.states[0])
        if state not in source.states:
            raise HTTPException(404, "Unknown message state.")
        offset = _offset(request, source)
        now = await self._now()
        depth, bars, rows, settings = await asyncio.gather(
            source.depth(),
            source.histogram(now),
            source.page(state, offset, PAGE),
            source.settings(),
        )
        total = undeliverable(depth) if state == "unreadable" else getattr(depth, state)
        return await self._page(
            request,
            "queue.html",
            source=source,
            depth=depth,
            settings=settings,
            bars=list(zip(_BARS, bars, (_share(bar, bars) for bar in bars), strict=True)),
            state=state,
            total=total,
            rows=rows,
            offset=offset,
            limit=PAGE,
            now=now,
            refresh=10,
        )

    async def _dead(self, request: Request) -> Response:
        source = await self._reliable(request.query_params)
        offset = _offset(request, source)
        depth, rows, now = await asyncio.gather(
            source.depth(), source.page("dead", offset, PAGE), self._now()
        )
        return await self._page(
            request,
            "dead.html",
            source=source,
            depth=depth,
            rows=rows,
            offset=offset,
            limit=PAGE,
            total=depth.dead,
            now=now,
        )

    async def _settings(self, request: Request) -> Response:
        source = await self._reliable(request.query_params)
        settings = await source.settings()
        window, unit = _in_units(settings.dedup_window)
        return await self._page(
            request,
            "settings.html",
            source=source,
            settings=settings,
            window=window,
            unit=unit,
            units=tuple(_UNITS),
            most_partitions=MOST_PARTITIONS,
        )

    async def _message(self, request: Request) -> Response:
        source = await self._source(request.query_params)
        place = unpacked(request.query_params.get("at", ""))
        dead = request.query_params.get("dead") == "1"
        row = await source.find(place, dead=dead) if place is not None else None
        if row is None:
            raise HTTPException(
                404, "This message no longer exists: it was delivered, cancelled, moved or dropped."
            )
        return await self._page(
            request,
            "message.html",
            source=source,
            row=row,
            now=await self._now(),
            units=tuple(_UNITS),
        )

    async def _events(self, request: Request) -> Response:
        source = await self._source(request.query_params)
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(
                503, "Too many live views are open. Close some of them and try again."
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        view = _LiveView(
            self._live(self._watch(source)), media_type="text/event-stream", headers=headers
        )
        # Count the view here, and not when it begins: others may be let in before that.
        self._streams += 1
        view.ended = self._stream_ended
        return view

    def _stream_ended(self) -> None:
        self._streams -= 1

    async def _live(self, watched: _Watched) -> AsyncIterator[str]:
        """Yield the figures of a queue once a second."""
        ends = time.monotonic() + _STREAM_LASTS
        last = ""
        yield f"retry: {_RETRY_MS}\n\n"
        while time.monotonic() < ends:
            try:
                said = await watched.figures.at_most(_FRESH)
            except DelayqError as error:
                said = f"event: trouble\ndata: {json.dumps(str(error))}\n\n"
                if isinstance(error, Closed):
                    yield said
                    return
            # An idle queue's figures look the same again, but they are new.
            if said is not last:
                yield said
                last = said
            await asyncio.sleep(_EVERY)

    def _watch(self, source: AnySource) -> _Watched:
        """Return the figures of a queue, shared by all its viewers."""
        key = source.kind, source.name
        if key not in self._watched and len(self._watched) >= _MOST_WATCHED:
            self._watched.clear()
        watched = self._watched.setdefault(key, _Watched(source, self._now))
        # The queue may have more partitions by now.
        watched.source = source
        return watched

    # Logging in

    async def _login_page(self, request: Request) -> Response:
        return await self._page(request, "login.html", wrong="")

    async def _login(self, request: Request) -> Response:
        if not same_origin(request):
            raise HTTPException(403, "This form was not submitted from a page of this dashboard.")
        form = await _form(request)
        address = request.client.host if request.client is not None else ""
        if self._guard.is_locked(address):
            return await self._page(
                request, "login.html", 429, wrong="Too many failed attempts. Try again in a minute."
            )
        login = self._guard.login_with(form.get("token", [""])[0], address)
        if login is None:
            return await self._page(request, "login.html", 403, wrong="Wrong token.")
        response = _see("./", done="loggedin" if login.may_act else "reading")
        self._guard.log_in(request, response, login)
        return response

    async def _logout(self, request: Request) -> Response:
        await self._form_of(self._guard.login(request), request)
        response = _see("login" if self._guard.private else "./", done="loggedout")
        self._guard.log_out(response)
        return response

    # Actions

    async def _act(self, request: Request) -> Response:
        form = await self._allowed(request)
        fields = {name: values[0] for name, values in form.items()}
        fields["name"] = unquote(fields.get("name", ""))
        source = await self._source(fields)
        name = fields.get("do", "")
        if name in ("cancel", "reschedule"):
            return await self._act_on_message(source, name, fields)
        if not isinstance(source, ReliableSource):
            raise HTTPException(400, "Delayed queues do not support this action.")
        if name in ("pause", "resume"):
            await (source.pause if name == "pause" else source.resume)()
            return _see("queue", source, done=f"{name}d")
        if name == "configure":
            return await self._configure(source, fields)
        if name in ("redrive", "purge"):
            chosen: list[Place] | None = [
                place for place in map(unpacked, form.get("at", [])) if place is not None
            ]
            if fields.get("all") == "1":
                chosen = None if fields.get("sure") == "1" else []
            if chosen == []:
                return _see("dead", source, done="unchosen")
            count = await (source.redrive if name == "redrive" else source.purge_dead)(chosen)
            return _see(
                "dead", source, done="redriven" if name == "redrive" else "purged", count=str(count)
            )
        raise HTTPException(400, "Unknown action.")

    async def _act_on_message(
        self, source: AnySource, name: str, fields: Mapping[str, str]
    ) -> Response:
        place = unpacked(fields.get("at", ""))
        if place is None or not source.has(place):
            raise HTTPException(400, "Unknown message.")
        if name == "cancel":
            return _see("queue", source, done="cancelled" if await source.cancel(place) else "gone")
        there = await source.reschedule(place, microseconds(_seconds(fields, "delay")))
        if there is None:
            return _see("queue", source, done="gone")
        return _see("message", source, at=packed(there), done="rescheduled")

    async def _configure(self, source: ReliableSource, fields: Mapping[str, str]) -> Response:
        changes = _changes(fields)
        if not changes:
            return _see("queue", source, done="unchanged")
        if "partitions" in changes and fields.get("sure") != "1":
            return _see("settings", source, done="unsure")
        await source.configure(changes)
        self._queues.search_again()
        return _see("queue", source, done="configured")

    async def _allowed(self, request: Request) -> dict[str, list[str]]:
        """Return the form of a request that may act."""
        login = self._guard.login(request)
        if not self._guard.writable or (login is not None and not login.may_act):
            raise HTTPException(403, "This dashboard is read-only.")
        return await self._form_of(login, request)

    async def _form_of(self, login: Login | None, request: Request) -> dict[str, list[str]]:
        """Return the form of a request, if a page of this login sent it."""
        if not same_origin(request):
            raise HTTPException(403, "This form was not submitted from a page of this dashboard.")
        form = await _form(request)
        if login is None or not self._guard.is_ours(login, form.get("word", [""])[0]):
            raise HTTPException(
                403,
                "Your session has expired, or this form belongs to another session. Log in and try"
                " again.",
            )
        return form

    def _readers(self, page: Page) -> Page:
        """Restrict a page to requests that may read."""

        async def shown(request: Request) -> Response:
            return await page(request) if self._guard.may_read(request) else _see("login")

        return shown

    # Internals

    def _session(self) -> Session:
        return self._client._open_session()  # noqa: SLF001 - a part of the library

    async def _now(self) -> int:
        return await self._session().server.time_us()

    async def _source(self, fields: Mapping[str, str]) -> AnySource:
        source = await self._queues.source(fields.get("kind", ""), fields.get("name", ""))
        if source is None:
            raise HTTPException(
                404, "Queue not found. A queue exists on the server only while it holds messages."
            )
        return source

    async def _reliable(self, fields: Mapping[str, str]) -> ReliableSource:
        source = await self._source(fields)
        if not isinstance(source, ReliableSource):
            raise HTTPException(404, "A delayed queue has neither dead letters nor settings.")
        return source

    async def _page(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> Response:
        login = self._guard.login(request)
        done = request.query_params.get("done", "")
        note = DONE.get(done, "")
        if done in _COUNTED:
            count = _whole(request.query_params.get("count"))
            note = f"{count:,} {_COUNTED[done][count != 1]}"
        shared = {
            "title": self._title,
            "writable": self._guard.writable,
            "private": self._guard.private,
            # One for the form that logs out, and one for the forms that act.
            "leave": None if login is None else self._guard.word(login),
            "word": self._guard.word(login) if login is not None and login.may_act else None,
            "note": note,
            "note_is_bad": done in _BAD,
            "refresh": 0,
        }
        # A payload may be large, so other requests are served in the meantime.
        text = await run_in_threadpool(
            self._templates.get_template(template).render, shared | values
        )
        # Text that cannot be encoded came from the server in this state.
        return HTMLResponse(text.encode(errors="replace"), status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        hint = ""
        if isinstance(error, HTTPException):
            status, what = error.status_code, error.detail
        elif isinstance(error, ServerRefused):
            status, what = 502, f"The server refused the request: {error}"
            hint = (
                "The dashboard's user lacks a permission. If it may not run SCAN, pass the queue"
                " names to the dashboard: see SECURITY.md."
            )
        elif isinstance(error, OutcomeUnknown) and request.method == "POST":
            status, what = 502, f"The action may have been carried out: {error}"
        elif isinstance(error, ServerUnavailable | OutcomeUnknown | Closed):
            status, what = 503, f"The server does not answer: {error}"
        else:
            status, what = 400, str(error)
        return await self._page(request, "failed.html", status, what=what, hint=hint)


class _Static(StaticFiles):
    """Serves the files of the package. Browsers keep them, and ask whether they have changed."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers["Cache-Control"] = "no-cache"
        return response


class _Watched:
    """A queue with viewers. However many there are, the server is asked once a second."""

    def __init__(self, source: AnySource, now: Callable[[], Awaitable[int]]) -> None:
        self.source = source
        self._now = now
        self.depth: Cached[QueueDepth | str] = Cached(self._depth)
        self.figures: Cached[str] = Cached(self._figures)
        self._before: tuple[int, QueueDepth, int] | None = None

    async def _depth(self) -> QueueDepth | str:
        """Return the number of messages in each state, or why it is unknown.

        A queue whose keys hold something else must not hide the others.
        """
        try:
            return await self.source.depth()
        except ServerRefused as error:
            return str(error)

    async def _figures(self) -> str:
        """Return an event with the current figures."""
        before, self._before = self._before, None
        now = await self._now()
        depth = await self.source.depth()
        # Messages that come due until the next look, and a little more: it may be late.
        soon = await self.source.due_between(now, now + int(_EVERY * SECOND))
        self._before = now, depth, soon
        if before is not None and now - before[0] > 3 * _EVERY * SECOND:
            # The queue had no viewers for a while: too much may have come and gone.
            before = None
        return f"data: {json.dumps(_figures(now, self.source.kind, depth, before))}\n\n"


def _figures(
    now: int, kind: QueueKind, depth: QueueDepth, before: tuple[int, QueueDepth, int] | None
) -> dict[str, Any]:
    """Return the figures that the live view shows.

    ``gone`` is how many messages were taken per second, at least: they were due, and have gone.
    """
    late, gone = late_us(depth, kind), None
    if before is not None:
        then, earlier, soon = before
        seconds = max((now - then) / SECOND, 0.001)
        left = earlier.ready + soon - depth.ready
        gone = round(max(0, left) / seconds, 1)
    return {
        "delayed": depth.delayed,
        "ready": depth.ready,
        "leased": depth.leased,
        "dead": undeliverable(depth),
        "paused": depth.paused,
        "late_ms": None if late is None else late // 1000,
        "gone": gone,
    }


async def _form(request: Request) -> dict[str, list[str]]:
    """Return the fields of a form. Forms carry no files, so no parser for files is needed."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_FORM:
            raise HTTPException(413, "The form is too large.")
    try:
        return parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=1000)
    except ValueError:
        raise HTTPException(400, "The form cannot be parsed.") from None


def _see(page: str, source: AnySource | None = None, **more: str) -> Response:
    """Send the browser to a page, so that reloading it repeats nothing."""
    return RedirectResponse(link(page, source, None, **more), 303)


def _seconds(fields: Mapping[str, str], name: str) -> float:
    """Return the duration that a form asks for, in seconds."""
    try:
        return float(fields.get(name, "")) * _UNITS[fields.get("unit", "")]
    except (ValueError, KeyError):
        what = name.replace("_", " ")
        raise HTTPException(400, f"The {what} must be a number of {', '.join(_UNITS)}.") from None


def _in_units(seconds: float) -> tuple[str, str]:
    """Return a duration as a form shows it: an amount, and the largest unit that divides it."""
    units = (unit for unit, size in reversed(_UNITS.items()) if seconds and seconds % size == 0)
    unit = next(units, "seconds")
    return f"{seconds / _UNITS[unit]:.15g}", unit


def _changes(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in a form that differ from those that it showed.

    The others stay as they are, even if another visitor has changed them meanwhile.

    Raises:
        HTTPException, BadInput: One of them is invalid.
    """
    changed = {
        name
        for name in ("partitions", "max_size", "expired", "dedup_window", "unit")
        if name in fields and fields[name] != fields.get(f"was_{name}")
    }
    given: dict[str, Any] = {}
    if "partitions" in changed:
        given["partitions"] = _count(fields, "partitions")
    if "max_size" in changed:
        given["max_size"] = _count(fields, "max_size") if fields["max_size"] else None
    if "expired" in changed:
        given["expired"] = fields["expired"]
    if changed & {"dedup_window", "unit"}:
        given["dedup_window"] = _seconds(fields, "dedup_window")
    return declare(**given)


def _count(fields: Mapping[str, str], name: str) -> int:
    if not (count := _whole(fields[name], 10**15)):
        what = name.replace("_", " ")
        raise HTTPException(400, f"The {what} must be a whole number, 1 or more.")
    return count


def _offset(request: Request, source: AnySource) -> int:
    return _whole(
        request.query_params.get("offset"),
        _FARTHEST if source.partitions == 1 else _FARTHEST_IN_PARTITIONS,
    )


def _whole(text: str | None, most: int = _FARTHEST * 1000) -> int:
    return min(int(text), most) if text and re.fullmatch("[0-9]{1,15}", text) else 0


def _share(bar: int, bars: Iterable[int]) -> int:
    """Return the length of a bar, out of 100. A bar that is not empty is visible."""
    most = max(bars, default=0)
    return 0 if not bar else max(1, round(100 * bar / most))
