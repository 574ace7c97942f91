"""Controls access: tokens, the users of the host application, cookies, forms and their origin.

Also sets headers for browsers.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import ipaddress
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from itsdangerous import BadSignature, TimestampSigner
from starlette.datastructures import MutableHeaders

from delayq.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DashboardRole = Literal["viewer", "operator"]
"""The rights of a visitor: a viewer reads, an operator acts as well."""

if TYPE_CHECKING:
    Authenticate = Callable[
        [HTTPConnection], DashboardRole | Awaitable[DashboardRole | None] | None
    ]

_log = logging.getLogger("delayq")

COOKIE = "delayq_session"
SHORTEST_TOKEN = 16
# How long a login lasts, in seconds.
_LOGIN_SECONDS = 12 * 3600
# Number of wrong tokens from an address in a minute before further ones are answered late, and how
# late, in seconds. A right one never is: behind a proxy, many visitors may share an address.
_MOST_WRONG_TOKENS = 10
LATE = 1.0
# Maximum number of addresses whose wrong tokens are counted.
_MOST_ADDRESSES = 10_000
# Maximum number of logins that have been logged out and are remembered until they would have ended.
_MOST_ENDED = 10_000

_NAME = re.compile("[A-Za-z0-9_-]{22}")

HEADERS = {
    # Everything comes from here, nothing is inline, forms go here, and no other page may frame us.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    # Queue names are not sent to other sites. With "no-referrer", browsers would send "null" as
    # the origin of our forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class Login:
    """A visitor with rights.

    Attributes:
        name: Distinguishes the login from others, in the cookie.
        may_act: Whether the login may change queues, or may only read.
        hosted: Whether the host application logged the visitor in.
    """

    name: str
    may_act: bool
    hosted: bool = False


class Guard:
    """Admits visitors with a token, or those that the host application knows."""

    def __init__(
        self,
        token: str | None,
        read_token: str | None = None,
        authenticate: Authenticate | None = None,
    ) -> None:
        if authenticate is not None and (token is not None or read_token is not None):
            raise ConfigurationError("give either authenticate or tokens, not both")
        for secret in (token, read_token):
            if secret is not None and len(secret) < SHORTEST_TOKEN:
                raise ConfigurationError(
                    f"the dashboard's tokens must have at least {SHORTEST_TOKEN} characters"
                )
        if token is not None and token == read_token:
            raise ConfigurationError(
                "token and read_token must differ: otherwise, every reader could change queues"
            )
        # Whether any login may act, and whether reading takes a token.
        self.hosted: bool = authenticate is not None
        self.writable: bool = self.hosted or token is not None
        self.private: bool = self.hosted or read_token is not None
        self._authenticate = authenticate
        # By whether the token allows actions.
        self._tokens = {
            may_act: secret.encode(errors="surrogateescape")
            for may_act, secret in ((True, token), (False, read_token))
            if secret
        }
        # Keys come from the tokens alone: several processes accept each other's cookies.
        self._signers = {
            may_act: TimestampSigner(
                secret, "delayq dashboard", key_derivation="hmac", digest_method=hashlib.sha256
            )
            for may_act, secret in self._tokens.items()
        }
        # By address. The one with the latest wrong token comes last.
        self._wrong: dict[str, list[float]] = {}
        # When each login that was logged out would have ended by itself. The latest comes last.
        self._logged_out: dict[str, float] = {}

    def is_guessing(self, address: str) -> bool:
        """Return whether too many wrong tokens came from this address in the last minute."""
        now = time.monotonic()
        return (
            len([at for at in self._wrong.get(_network(address), ()) if at > now - 60])
            > _MOST_WRONG_TOKENS
        )

    def login_with(self, token: str, address: str) -> Login | None:
        """Return the login for a token; None if it is wrong. All wrong ones take equally long."""
        digest = hmac.digest(b"delayq", token.encode(errors="surrogateescape"), hashlib.sha256)
        right = [
            may_act
            for may_act, secret in self._tokens.items()
            if hmac.compare_digest(digest, hmac.digest(b"delayq", secret, hashlib.sha256))
        ]
        if not right:
            self._count_wrong(_network(address))
            return None
        return Login(_new_name(), right[0])

    def _count_wrong(self, network: str) -> None:
        now = time.monotonic()
        self._wrong[network] = [*(at for at in self._wrong.pop(network, ()) if at > now - 60), now]
        if len(self._wrong) > _MOST_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]

    def log_in(self, request: Request, response: Response, login: Login) -> None:
        """Set the cookie of a login."""
        # Without a path, the cookie applies to the pages beside this one, behind any prefix.
        response.set_cookie(
            COOKIE,
            self._signers[login.may_act].sign(login.name).decode(),
            max_age=_LOGIN_SECONDS,
            path=None,
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    def log_out(self, response: Response, login: Login) -> None:
        """Delete the cookie, and accept no copy of it in this process."""
        now = time.monotonic()
        self._logged_out[login.name] = now + _LOGIN_SECONDS
        first = next(iter(self._logged_out))
        if len(self._logged_out) > _MOST_ENDED or self._logged_out[first] <= now:
            del self._logged_out[first]
        response.delete_cookie(COOKIE, path=None, httponly=True, samesite="strict")  # type: ignore[arg-type]

    async def login(self, request: Request) -> Login | None:
        """Return the login of this request; None if there is none."""
        if self._authenticate is not None:
            return await self._hosted_login(request, self._authenticate)
        for may_act, signer in self._signers.items():
            with suppress(BadSignature):
                name = signer.unsign(
                    request.cookies.get(COOKIE, ""), max_age=_LOGIN_SECONDS
                ).decode()
                return None if name in self._logged_out else Login(name, may_act)
        return None

    async def _hosted_login(self, request: Request, authenticate: Authenticate) -> Login | None:
        """Ask the host application. If it fails, the visitor is not logged in."""
        try:
            answer = authenticate(request)
            role = await answer if inspect.isawaitable(answer) else answer
        except Exception:  # noqa: BLE001 - the code of the host application
            _log.exception("authenticate() of the dashboard failed: access refused")
            return None
        if role not in ("viewer", "operator"):
            if role is not None:
                _log.error("authenticate() of the dashboard returned %r: access refused", role)
            return None
        name = request.cookies.get(COOKIE, "")
        return Login(name if _NAME.fullmatch(name) else _new_name(), role == "operator", True)

    def remember(self, request: Request, response: Response, login: Login) -> None:
        """Let the browser keep the name of a login that the host application made.

        Forms carry a token that belongs to this name. The name itself grants no access.
        """
        if request.cookies.get(COOKIE) != login.name:
            response.set_cookie(
                COOKIE,
                login.name,
                path=None,
                secure=request.url.scheme == "https",
                httponly=True,
                # Unlike a strict one, it is also sent when a link on another site leads here.
                samesite="lax",
            )

    def form_token(self, login: Login) -> str:
        """Return the token that each form of this login contains, and that no other page can."""
        if login.hosted:
            # Only pages of this host know the name, and every process finds the same token.
            return hmac.digest(login.name.encode(), b"delayq form", hashlib.sha256).hex()
        return self._signers[login.may_act].get_signature(f"form {login.name}").decode()

    def is_ours(self, login: Login, form_token: str) -> bool:
        """Return whether a form comes from a page of this login."""
        return hmac.compare_digest(form_token.encode(), self.form_token(login).encode())


def _new_name() -> str:
    return secrets.token_urlsafe(16)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _network(address: str) -> str:
    """Return the unit that counts as one address: for IPv6, the network that one customer has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address


def same_origin(request: Request) -> bool:
    """Return whether a form was sent from a page of this host, as browsers always report.

    A proxy may have changed the host, and then reports the original one. No page can make a browser
    send that report.
    """
    origin = request.headers.get("origin") or request.headers.get("referer") or ""
    hosts = {request.headers.get("host", ""), request.headers.get("x-forwarded-host", "")} - {""}
    try:
        return urlsplit(origin).netloc.lower() in {host.lower() for host in hosts}
    except ValueError:
        # No browser sends such a value.
        return False


class SecurityHeaders:
    """Adds :data:`HEADERS` to each response, and keeps all but static files out of caches."""

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
