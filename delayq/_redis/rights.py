"""Refuses a script before its first write if the user lacks a right.

A server checks the keys of a call before it runs the script, but the right to each command only
when the script reaches it. A script that is refused halfway leaves what it has written. So a
script's first call on a connection, and one every few seconds, is made in its *checked* form: the
same script, preceded by lines that try each of its commands in a form that changes nothing. If one
of them is refused, so is the call as a whole. All other calls are made in the plain form, at no
extra cost. If a right is taken away between two checks, a script may still be refused halfway: so
the last writes of a script are those that take messages from where they were.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from delayq._redis.connection import Connection
    from delayq._redis.scripts import Script

# How long a check of a user's rights counts, seconds: they may be taken away at any time.
_CHECK_EVERY = 5.0
# The servers' words, for a call and for a command within a script.
_NOT_PERMITTED = re.compile(r"NOPERM|ACL failure|[Pp]ermission|The user executing the script can't")

# Not an id, name, token or record: those are text, or longer.
_ABSENT = r"'\255'"
# The arguments after the key, in a form that changes nothing. Some are wrong on purpose, because
# rights are checked first. A key of another type does no harm either.
_READS: dict[str, str] = {
    "EXISTS": "",
    "GET": "",
    "HGETALL": "",
    "HEXISTS": _ABSENT,
    "HGET": _ABSENT,
    "HLEN": "",
    "HMGET": _ABSENT,
    "HSCAN": "'wrong'",
    "HSTRLEN": _ABSENT,
    "LINDEX": "'wrong'",
    "LLEN": "",
    "LRANGE": "1, 0",
    "PTTL": "",
    "ZCARD": "",
    "ZCOUNT": "1, 0",
    "ZLEXCOUNT": "'(', '('",
    "ZMSCORE": _ABSENT,
    "ZRANDMEMBER": "0",
    "ZRANGE": "1, 0",
    "ZRANGEBYLEX": "'(', '('",
    "ZRANGEBYSCORE": "1, 0",
    "ZREVRANGEBYLEX": "'(', '('",
    "ZSCORE": _ABSENT,
}
_WRITES: dict[str, str] = {
    "HDEL": _ABSENT,
    "HINCRBY": "'', 'wrong'",
    "HSET": "'a', 'value', 'missing'",
    "LPOP": "0",
    "LREM": "'wrong', ''",
    "LSET": "'wrong', ''",
    "LTRIM": "'wrong', ''",
    "PEXPIRE": "'wrong'",
    "RENAME": "KEYS[1]",
    "RPOP": "0",
    "SET": "'', 'wrong'",
    "ZADD": f"'XX', 0, {_ABSENT}",
    "ZREM": _ABSENT,
    "ZREMRANGEBYLEX": "'(', '('",
    "ZREMRANGEBYRANK": "1, 0",
}
# Pushes have no such form. From Redis 7 on, a script can ask instead. On Redis 6.2 it pushes an
# element and removes it again, which it tries only for a user who may do both.
_PUSHES = {"LPUSH": 1, "RPUSH": -1}
_PUSH = """if redis.acl_check_cmd then
    if not redis.acl_check_cmd('{command}', KEYS[1], {absent}) then
      refused = refused or redis.error_reply("NOPERM no permission to run '{command}' on this key")
    end
  elseif permitted(redis.pcall('LREM', KEYS[1], 'wrong', '')) then
    local pushed = redis.pcall('{command}', KEYS[1], {absent})
    try(pushed)
    if type(pushed) == 'number' then redis.pcall('LREM', KEYS[1], {end_}, {absent}) end
  end"""
# Not tried. A script publishes before its first write, or only as a hint, and can do without the
# number of subscribers; and it deletes by one command, which is its only write.
_UNTRIED = {"PUBLISH", "PUBSUB", "UNLINK", "DEL"}

# A full server refuses a script only before its first write, so there nothing is tried.
_FULL = f"redis.pcall('ZADD', KEYS[1], 'XX', 0, {_ABSENT})"
_CHECK = """do
  local function says(reply, what)
    return type(reply) == 'table' and string.find(tostring(reply.err), what)
  end
  local function permitted(reply)
    return not (says(reply, 'NOPERM') or says(reply, 'ACL failure')
      or says(reply, 'The user executing'))
  end
  local refused
  local function try(reply) if not permitted(reply) then refused = refused or reply end end
  if not says(%s, 'OOM') then
  %s
  end
  if refused then return refused end
end
"""

# Commands whose first argument is not a key, with arguments that work.
_WITHOUT_KEY: dict[str, tuple[str, ...]] = {
    "eval": ("return 1", "0"),
    "evalsha": ("0" * 40, "0"),
    "ping": (),
    "time": (),
    "asking": (),
    "role": (),
    "select": ("0",),
    "unsubscribe": (),
}
_WITH_CHANNEL = ("subscribe", "publish")

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")


class Form(NamedTuple):
    """One text of a script, and its name on the server."""

    sha: str
    text: str


@cache
def commands(script: Script) -> frozenset[str]:
    """Return the commands that a script may call."""
    return frozenset(_CALL.findall(re.sub(r"--.*", "", script.text)))


@cache
def commands_tried(script: Script) -> frozenset[str]:
    """Return the commands that the checked form tries: none for a script without several writes."""
    of_its_own = commands(script)
    if not of_its_own & (_WRITES.keys() | _PUSHES.keys()):
        return frozenset()
    # A client that takes messages also gives them back, and by then nothing may be refused.
    return of_its_own.union(commands(script.undone_by) if script.undone_by else ()) - _UNTRIED


def _line(command: str) -> str:
    if command in _PUSHES:
        return _PUSH.format(command=command, end_=_PUSHES[command], absent=_ABSENT)
    if command == "TIME":
        return "try(redis.pcall('TIME'))"
    arguments = _READS[command] if command in _READS else _WRITES[command]
    return f"try(redis.pcall('{command}', KEYS[1]{arguments and ', '}{arguments}))"


@cache
def checked(script: Script) -> Form | None:
    """Return the script preceded by the check of its rights, or None if it needs no check."""
    if not commands_tried(script):
        return None
    full = _FULL if "ZADD" in commands_tried(script) else "nil"
    text = _CHECK % (full, "\n  ".join(map(_line, sorted(commands_tried(script))))) + script.text
    return Form(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), text)


def is_refusal(error: str) -> bool:
    """Tell whether a server's reply says that a right is missing."""
    return _NOT_PERMITTED.search(error) is not None


async def missing_rights(
    run: Callable[..., Awaitable[Any]],
    user: str,
    commands: Sequence[str],
    key: str,
    channel: str,
) -> AsyncIterator[str]:
    """Yield the rights that a user lacks to run commands on a key or a channel, as ACL rules.

    ``run`` is :meth:`RedisClient.command <delayq._redis.client.RedisClient.command>`.
    """
    infos = await run("COMMAND", "INFO", *commands, key=key)
    for command, info in zip(commands, infos, strict=True):
        if not info:
            continue
        if command in _WITHOUT_KEY:
            arguments = list(_WITHOUT_KEY[command])
        else:
            arguments = [channel if command in _WITH_CHANNEL else key]
            arguments += ["1"] * (abs(int(info[1])) - 2)
        reply = await run("ACL", "DRYRUN", user, command, *arguments, key=key)
        if reply != b"OK":
            yield (
                f"+{command}"
                if b"command" in reply
                else f"~{key}"
                if b"key" in reply
                else f"&{channel}"
            )


class Rights:
    """Remembers for which scripts and queues the user of a connection lately had all rights.

    Its results are in :attr:`Connection.permits`, where a call finds it at once.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._checked_connections: WeakSet[Connection] = WeakSet()

    def form(self, wire: Connection, script: Script, key: str) -> Form | Script:
        """Return the form in which to send a call with this first key over this connection."""
        is_known = wire.permits.get((script.name, key), 0.0) > self._now()
        return script if is_known else checked(script) or script

    def permitted(self, wire: Connection, script: Script, key: str, form: Form | Script) -> None:
        """Record that a call in this form was carried out."""
        if form is script:
            return
        permits, now = wire.permits, self._now()
        permits[script.name, key] = now + _CHECK_EVERY
        permits.move_to_end((script.name, key))
        # A client may use many queues, one after the other.
        while next(iter(permits.values())) <= now:
            permits.popitem(last=False)
        self._checked_connections.add(wire)

    def forget(self) -> None:
        """Forget all checks, because a right is missing."""
        for wire in self._checked_connections:
            wire.permits.clear()
        self._checked_connections.clear()
