"""The dashboard.

The packages that it needs from the extra ``dashboard`` are imported when a dashboard is made.

This package has another name than the function, as a submodule of its name would replace it.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from starlette.requests import HTTPConnection

    from delayq._dashboard.security import DashboardRole
    from delayq.client import Client
    from delayq.codecs.encrypted import Keys

    Messages = MutableMapping[str, Any]
    ASGIApp = Callable[
        [Messages, Callable[[], Awaitable[Messages]], Callable[[Messages], Awaitable[None]]],
        Awaitable[None],
    ]

_PACKAGES = ("starlette", "jinja2", "itsdangerous")


def dashboard(
    client: Client,
    *,
    token: str | None = None,
    read_token: str | None = None,
    authenticate: Callable[[HTTPConnection], DashboardRole | Awaitable[DashboardRole | None] | None]
    | None = None,
    queues: Iterable[str] | None = None,
    title: str = "delayq",
    keys: Keys | None = None,
) -> ASGIApp:
    """Make a web application that shows the queues of a server: ``app.mount("/queues",
    delayq.dashboard(client))``.

    The dashboard never takes part in a queue: it opens none, and moves no due messages. Without a
    ``read_token`` or ``authenticate``, anyone who can reach it can read it, payloads included.

    Args:
        client: A client of this event loop, open by the time of the first request. To read, it
            needs the role ``dashboard`` of ``delayq acl``, and ``SCAN`` unless ``queues`` is given;
            to act, it needs the role ``admin``.
        token: Allows its holder to cancel, reschedule, redrive, purge, pause, resume and change
            settings. It has 16 characters or more. Without a token, the dashboard is read-only.
        read_token: Allows its holder to read. If it is given, reading takes one of the two tokens.
            It has 16 characters or more.
        authenticate: Decides by itself instead of the tokens: it gets the connection of each
            request, with the cookies, headers and session of your application, and returns
            ``"operator"``, ``"viewer"``, or None to refuse access; sync or async. An error, or
            another value, refuses access and is logged.
        queues: The only queues to show, by their names on the server: ``"reliable:jobs"``,
            ``"delayed:orders"``. Without them,
            all queues that are found are shown.
        title: The text at the top of each page.
        keys: The keys of :class:`~delayq.codecs.EncryptedCodec`: everyone who may read sees what
            they decrypt. Without them, encrypted payloads are shown as such.

    Raises:
        ConfigurationError: An extra is missing, a token is too short, both tokens are the same, or
            there are tokens besides ``authenticate``.
        BadInput, BadName: ``queues`` or ``keys`` cannot be read.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigurationError(f"{missing[0]} is missing: pip install 'delayq[dashboard]'")
    from delayq._dashboard.app import make  # noqa: PLC0415 - only once it is known that the import works

    return make(
        client,
        token=token,
        read_token=read_token,
        authenticate=authenticate,
        queues=queues,
        title=title,
        keys=keys,
    )
