"""Reads the errors that come over a connection."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from delayq._redis.connection import NotSent, ReplyError
from delayq._redis.retry import is_not_now
from delayq._redis.rights import is_refusal
from delayq.errors import DelayqError, OutcomeUnknown, ServerError, ServerRefused, ServerUnavailable

if TYPE_CHECKING:
    from delayq._redis.pool import ConnectionPool
    from delayq._redis.rights import Rights
    from delayq._redis.topology import Topology

# Another server has the key, for good or for this one call. Nothing was carried out.
_ELSEWHERE = re.compile(r"(MOVED|ASK) (\d+) (\S+)")


class RepeatNow(ServerUnavailable):
    """The call has to be made in another way, and nothing is wrong. Nothing was carried out."""


class UnknownScript(RepeatNow):
    """The server does not know the script of the call: send the text."""


class Redirected(RepeatNow):
    """Another server, ``pool``, has the key; if ``asking``, only for this one call."""

    def __init__(self, text: str, pool: ConnectionPool, *, asking: bool) -> None:
        super().__init__(text)
        self.pool: ConnectionPool = pool
        self.asking: bool = asking


class SettingsChanged(ServerError):
    """The queue has other settings than the caller knows: read them, and make another call."""


class ErrorReader:
    """Turns the errors of connections into those of delayq, and passes on what they tell."""

    def __init__(self, topology: Topology, rights: Rights) -> None:
        self._topology = topology
        self._rights = rights

    def read(self, error: OSError | ReplyError, pool: ConnectionPool) -> DelayqError:
        """Return the meaning of an error that came over ``pool``, without raising it."""
        return _broken(error) if isinstance(error, OSError) else self._refused(error, pool)

    def _refused(self, error: ReplyError, pool: ConnectionPool) -> DelayqError:
        text = str(error)
        if (redirection := _ELSEWHERE.match(text)) is not None:
            return self._redirected(text, pool, *redirection.groups())
        if is_unknown_script(error):
            return UnknownScript(text)
        if text.startswith("DELAYQ_SETTINGS"):
            return SettingsChanged(text)
        if is_not_now(text):
            return self._unavailable(text, pool)
        if is_refusal(text):
            self._rights.forget()
        if "WRONGTYPE" in text:
            return ServerRefused(
                "one of the queue's keys holds a value of the wrong type: "
                "something else uses that key"
            )
        return ServerRefused(text)

    def _redirected(
        self, text: str, pool: ConnectionPool, kind: str, slot: str, host_port: str
    ) -> ServerError:
        try:
            if kind == "ASK":
                return Redirected(text, self._topology.pool_at(host_port, pool), asking=True)
            owner = self._topology.note_move(int(slot), host_port, pool)
            return Redirected(text, owner, asking=False)
        except ServerError as error:
            return error

    def _unavailable(self, text: str, pool: ConnectionPool) -> DelayqError:
        # It has lost its role, or its cluster has lost some slots: another server may have them.
        self._topology.suspect(pool)
        if "READONLY" in text:
            if pool.leads_to_replica:
                return ServerRefused(
                    f"{pool.label} is a replica, which accepts no writes: use the address of its "
                    "master, or redis+sentinel:// with those of its Sentinels"
                )
            pool.renew()
        return ServerUnavailable(f"the server is temporarily unavailable: {text}")


def is_unknown_script(error: ReplyError) -> bool:
    """Return whether the server knows no script of that name. Nothing was carried out."""
    return str(error).startswith("NOSCRIPT")


def _broken(error: OSError) -> ServerError:
    if isinstance(error, NotSent):
        return ServerUnavailable(f"the connection broke: {error}")
    return OutcomeUnknown(
        f"the connection broke before the reply arrived: {error or type(error).__name__}"
    )
