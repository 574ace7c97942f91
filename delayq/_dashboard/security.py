"""Who may look and act: tokens, a signed cookie, a word in each form, where a request comes from. And what browsers are told."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "delayq_session"
SHORTEST_TOKEN = 16
# A login lasts so long, seconds.
_LASTS = 12 * 3600
# Wrong tokens per minute from one address, before it is let in no more for the rest of it.
_TRIES = 10
# Addresses whose wrong tokens are counted.
_MOST_ADDRESSES = 10_000

HEADERS = {
    # Everything comes from here, and nothing stands inline. Forms go here, nobody frames us.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Names of queues stay here. Not "no-referrer": browsers then say "null" for the origin of our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Login:
    """Who has given a token.

    Attributes:
        name: What names it.
        may_act: Whether it was the token with which one may act.
    """

    name: str
    may_act: bool


class Guard:
    """Lets in who knows a token."""

    def __init__(self, token: str | None, read_token: str | None = None) -> None:
        for each in (token, read_token):
            if each is not None and len(each) < SHORTEST_TOKEN:
                raise ConfigurationError(f"the dashboard's tokens have {SHORTEST_TOKEN} characters or more")
        if token is not None and token == read_token:
            raise ConfigurationError("the dashboard's two tokens differ: who may look is not yet to act")
        # By whether one may act with it.
        self._tokens = {
            may_act: each.encode(errors="surrogateescape") for may_act, each in ((True, token), (False, read_token)) if each
        }
        # From the tokens alone: several processes that serve one dashboard accept each other's cookies.
        self._keys = {
            may_act: hmac.digest(each, b"delayq dashboard, cookies", hashlib.sha256) for may_act, each in self._tokens.items()
        }
        # By address, the one with the last wrong token last.
        self._wrong: dict[str, list[float]] = {}

    @property
    def writable(self) -> bool:
        """Whether anybody may act."""
        return True in self._tokens

    @property
    def private(self) -> bool:
        """Whether reading takes a token."""
        return False in self._tokens

    def is_locked(self, address: str) -> bool:
        """Whether too many wrong tokens came from an address lately. Others are not affected."""
        now = time.monotonic()
        return len([at for at in self._wrong.get(_network(address), ()) if at > now - 60]) >= _TRIES

    def login_with(self, token: str, address: str) -> Login | None:
        """Return the login that a token from an address gives; None if it is wrong. Takes equally long for all wrong ones."""
        given = hmac.digest(b"delayq", token.encode(errors="surrogateescape"), hashlib.sha256)
        right = [
            may_act
            for may_act, each in self._tokens.items()
            if hmac.compare_digest(given, hmac.digest(b"delayq", each, hashlib.sha256))
        ]
        if not right:
            self._count_wrong(_network(address))
            return None
        return Login(f"{int(time.time()) + _LASTS}.{secrets.token_urlsafe(16)}", right[0])

    def _count_wrong(self, network: str) -> None:
        now = time.monotonic()
        self._wrong[network] = [*(at for at in self._wrong.pop(network, ()) if at > now - 60), now]
        if len(self._wrong) > _MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]

    def log_in(self, request: Request, response: Response, login: Login) -> None:
        """Hand out a cookie."""
        # Without a path of its own it is for the pages beside the one that sets it, whatever prefix a proxy puts before them.
        response.set_cookie(
            COOKIE,
            f"{login.name}.{self._sign(login.may_act, login.name)}",
            max_age=_LASTS,
            path=None,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def log_out(self, response: Response) -> None:
        """Take the cookie back."""
        response.delete_cookie(COOKIE, path=None, httponly=True, samesite="strict")  # type: ignore[arg-type]

    def login(self, request: Request) -> Login | None:
        """The login of this request; None if there is none."""
        name, _, signature = request.cookies.get(COOKIE, "").rpartition(".")
        for may_act in self._keys:
            if hmac.compare_digest(signature.encode(), self._sign(may_act, name).encode()):
                return Login(name, may_act) if int(name.partition(".")[0]) > time.time() else None
        return None

    def may_read(self, request: Request) -> bool:
        """Whether this request may see anything."""
        return not self.private or self.login(request) is not None

    def word(self, login: Login) -> str:
        """What each form of this login says, and nobody else's page can."""
        return self._sign(login.may_act, f"form {login.name}")

    def is_ours(self, login: Login, word: str) -> bool:
        """Whether a form comes from a page of this login."""
        return hmac.compare_digest(word.encode(), self.word(login).encode())

    def _sign(self, may_act: bool, content: str) -> str:
        return hmac.new(self._keys[may_act], content.encode(), hashlib.sha256).hexdigest()


def _network(address: str) -> str:
    """Return what counts as one address: of IPv6, the network that one customer has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else address


def same_origin(request: Request) -> bool:
    """Whether a form was sent from a page of this host, as the browser says: it always does.

    A proxy may have changed the host; then it says which one it was. No page can let a browser say so.
    """
    said = request.headers.get("origin") or request.headers.get("referer") or ""
    hosts = {request.headers.get("host", ""), request.headers.get("x-forwarded-host", "")} - {""}
    try:
        return urlsplit(said).netloc.lower() in {host.lower() for host in hosts}
    except ValueError:
        # No browser says such a thing.
        return False


class SecurityHeaders:
    """Puts :data:`HEADERS` on each answer. What is no static file stays in no cache."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, with_headers)
