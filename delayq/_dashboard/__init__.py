"""The dashboard. What it needs of the extra ``dashboard`` is imported when one is made.

The package is called otherwise than the function: as a submodule of the same name it would take the function's place.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from delayq.client import Client

    Messages = MutableMapping[str, Any]
    ASGIApp = Callable[[Messages, Callable[[], Awaitable[Messages]], Callable[[Messages], Awaitable[None]]], Awaitable[None]]

_NEEDED = ("starlette", "jinja2")


def dashboard(
    client: Client,
    *,
    token: str | None = None,
    read_token: str | None = None,
    queues: Iterable[str] | None = None,
    title: str = "delayq",
) -> ASGIApp:
    """Make a web application that shows the queues of a server: ``app.mount("/queues", delayq.dashboard(client))``.

    It never takes part in a queue: it opens none, and moves nothing that is due. Without a ``read_token`` everybody who reaches
    it may read: then put it behind your own access control.

    Args:
        client: Of this event loop, and open by the time of the first request. To read it needs the role ``dashboard`` of
            ``delayq acl``, and ``SCAN`` unless ``queues`` are given; to act, the role ``admin``.
        token: Who gives it may cancel, reschedule, redrive, purge, pause and resume: 16 characters or more. Without one the
            dashboard is read-only.
        read_token: Who gives it, or the other one, may look; nobody else then. 16 characters or more.
        queues: These and no others, by their names on the server: ``"reliable:jobs"``, ``"reliable:jobs/16"`` for one in
            16 partitions, ``"delayed:orders"``. Without them all that are found.
        title: What stands above each page.

    Raises:
        ConfigurationError: The extra is missing, a token is too short, or both are the same.
        BadInput, BadName: ``queues`` cannot be read.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigurationError(f"{missing[0]} is missing: pip install 'delayq[dashboard]'")
    from delayq._dashboard.app import make  # noqa: PLC0415 - not before it is known that it can be imported

    return make(client, token=token, read_token=read_token, queues=queues, title=title)
