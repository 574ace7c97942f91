"""Which rights a script needs, and how it is refused before its first write where one of them is missing.

A server checks a user's rights command by command, while a script runs. A script that is refused half way leaves what it has
written. So a script's first call on a connection, and one every few seconds, is made in its *checked* form: the same script
behind lines that try every command on every key in a form that changes nothing. If one is refused, so is the call, as a whole.
The other calls are made in the plain form, and cost nothing more.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from delayq._redis import reliable_scripts as reliable
from delayq._redis import scripts as delayed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from delayq._redis.scripts import Script
    from delayq._redis.wire import Wire

# How long what was seen of a user's rights counts, seconds: they may be taken away at any time.
_CHECK_EVERY = 5.0
# As the servers say it, of a call and of a command within a script; the last one is Redis 6.2's.
_NOT_PERMITTED = re.compile(r"NOPERM|ACL failure|[Pp]ermission|The user executing the script can't")

# What is in the ordered list goes in one of several ways.
_FORGET = "llen lrange lpop rpop lset lrem"
_STORE = {"timeout": "zrange zmscore zadd", "ordered": "lindex rpush"}
# Everything about a message but its place.
_ERASE = {
    "bodies": "hdel",
    "leases": "hdel",
    "attempts": "exists hdel",
    "expiries": "exists hdel",
    "errors": "exists hdel",
    "priorities": "exists hdel",
}
_PLACE = {"live": "zadd zrange"}


def _joined(*needs: Mapping[str, str]) -> dict[str, str]:
    result: dict[str, str] = {}
    for each in needs:
        for key, commands in each.items():
            result[key] = " ".join(dict.fromkeys(f"{result.get(key, '')} {commands}".split()))
    return result


_OCCURRENCE = _joined(
    _PLACE,
    {"bodies": "hexists hset", "expiries": "hset", "priorities": "hset", "schedules": "hget hset"},
)

_RIGHTS: dict[Script, dict[str, str]] = {
    delayed.OFFER: _STORE,
    delayed.TRANSFER: {
        "ready": "llen lpush rpush lpop",
        "timeout": "zrangebyscore zremrangebyrank zrange zadd",
        "ordered": f"{_FORGET} lpush",
        "quarantine": "llen rpush",
        "fence": "exists",
        "leases": "zrangebyscore zrem zadd zrange",
        "leased": "hlen hget hdel hset",
    },
    delayed.GIVE_BACK: {
        "ready": "llen lpush",
        "timeout": "zscore zadd",
        "ordered": "llen lpush",
        "leases": "zscore zrem",
        "leased": "hlen hget hdel",
        "fence": "set",
    },
    delayed.CANCEL: {"timeout": "zrem", "ordered": _FORGET},
    delayed.POLL_PENDING: {
        "timeout": "zcard zrange zmscore zrem",
        "ordered": _FORGET,
        "quarantine": "llen rpush",
        "leases": "zcard zadd",
        "leased": "hlen hset",
        "fence": "exists",
    },
    delayed.POLL_LAST: {
        "timeout": "zcard zrange zrem",
        "ordered": f"lindex {_FORGET}",
        "quarantine": "llen rpush",
        "destination": "llen lpush",
    },
    delayed.EXPIRE: {"timeout": "zcard pexpire", "ordered": "pexpire"},
    delayed.ACK: {"leases": "zrem", "leased": "hlen hdel"},
    delayed.NACK: _joined(_STORE, {"leases": "zscore zrem", "leased": "hget hdel", "ordered": "llen"}),
    delayed.RELEASE: {
        "ready": "llen lpush",
        "timeout": "zadd",
        "ordered": "lpush",
        "leases": "zrem",
        "leased": "hlen hget hdel",
    },
    delayed.MIGRATE: {"timeout": "zcard zscore zrem zadd", "ordered": "llen lrange lset"},
    reliable.OFFER: _joined(
        _ERASE,
        {
            "live": "exists zmscore zscore zrange zadd zrem",
            "bodies": "hexists hlen hset",
            "leases": "hexists",
            "expiries": "hset",
            "priorities": "hget hset",
            "done": "exists zscore zrangebyscore zrem",
            "call": "get set",
        },
    ),
    reliable.CLAIM: _joined(
        _ERASE,
        {
            "live": "exists zrangebyscore zrange zadd zrem",
            "bodies": "hmget",
            "leases": "exists hmget hset",
            "attempts": "hmget",
            "expiries": "hmget",
            "errors": "hget",
            "paused": "exists",
            "dead": "zadd",
            "dead_messages": "hset",
        },
    ),
    reliable.ACK: _joined(_ERASE, {"live": "zrem", "leases": "hmget", "done": "zrangebyscore zrem zadd pttl pexpire"}),
    reliable.NACK: _joined(_PLACE, {"leases": "hget hdel", "attempts": "hset", "errors": "hset"}),
    reliable.RELEASE: _joined(_PLACE, {"leases": "hget hdel", "attempts": "hset"}),
    reliable.EXTEND: {"live": "zadd", "leases": "hmget", "attempts": "hdel"},
    reliable.BURY: _joined(
        _ERASE,
        {"live": "zrem", "bodies": "hget", "leases": "hget", "errors": "hget", "dead": "zadd", "dead_messages": "hset"},
    ),
    reliable.CANCEL: _joined(_ERASE, {"live": "zscore zrem", "bodies": "hexists", "leases": "hexists", "priorities": "hget"}),
    reliable.RESCHEDULE: _joined(
        _PLACE, {"live": "zscore", "bodies": "hexists", "leases": "hexists hget hdel", "attempts": "hset", "priorities": "hget"}
    ),
    reliable.PURGE: _joined(_ERASE, {"live": "exists zcard zrangebyscore zscore zrem", "leases": "hlen hexists"}),
    reliable.REDRIVE: _joined(
        _PLACE,
        {"bodies": "hexists hset", "priorities": "hset", "dead": "zcard zrem", "dead_messages": "hget hdel"},
    ),
    reliable.DROP_DEAD: {"dead": "zcard zrem", "dead_messages": "hdel"},
    reliable.SCHEDULE: _joined(_ERASE, _OCCURRENCE, {"live": "zscore zrem", "leases": "hexists", "priorities": "hget"}),
    reliable.UNSCHEDULE: _joined(
        _ERASE,
        {"live": "zscore zrem", "bodies": "hexists", "leases": "hexists", "priorities": "hget", "schedules": "hget hdel"},
    ),
    reliable.OCCUR: _joined(_ERASE, _OCCURRENCE, {"live": "zrem", "leases": "hget"}),
    reliable.RECUR: _OCCURRENCE,
    reliable.REFILL: _OCCURRENCE,
}
RIGHTS: dict[str, dict[str, str]] = {script.name: needs for script, needs in _RIGHTS.items()}
"""By script and by the name of a key, the commands that it may use there; ``live`` are the ten sorted sets. Not here: scripts
that only read, or write once."""
_SCRIPTS = {script.name: script for script in _RIGHTS}

# No id, name, token or record: those are text, or longer.
_NOTHING = r"'\255'"
# Commands in a form that changes nothing. Some are wrong on purpose: the server looks at the user's rights first.
_HARMLESS: dict[str, str] = {
    "exists": "",
    "get": "",
    "hdel": _NOTHING,
    "hexists": _NOTHING,
    "hget": _NOTHING,
    "hlen": "",
    "hmget": _NOTHING,
    "hset": "'a', 'value', 'missing'",
    "lindex": "'wrong'",
    "llen": "",
    "lpop": "0",
    "lrange": "1, 0",
    "lrem": "'wrong', ''",
    "lset": "'wrong', ''",
    "pexpire": "'wrong'",
    "pttl": "",
    "rpop": "0",
    "set": "'', 'wrong'",
    "zadd": f"'XX', 0, {_NOTHING}",
    "zcard": "",
    "zmscore": _NOTHING,
    "zrange": "1, 0",
    "zrangebyscore": "1, 0",
    "zrem": _NOTHING,
    "zremrangebyrank": "1, 0",
    "zscore": _NOTHING,
}
# Of these there is no such form. What is pushed is taken away again; without the right to do that, it is not tried.
_PUSH = """if permitted(redis.pcall('LREM', {key}, 'wrong', '')) then
    try(redis.pcall('{command}', {key}, {nothing}))
    redis.pcall('LREM', {key}, {end_}, {nothing})
  end"""

# What a full server must not take in. It refuses a script only before its first write, and some of the lines below are writes.
_GROWS = (delayed.OFFER.name, reliable.OFFER.name)
_FULL = """do
  local answer = redis.pcall('ZADD', KEYS[1], 'XX', 0, %s)
  if type(answer) == 'table' and answer.err and string.find(answer.err, 'OOM') then return answer end
end
"""

_CHECK = """do
  local refused
  local function permitted(answer)
    local text = type(answer) == 'table' and answer.err or ''
    return not (string.find(text, 'NOPERM') or string.find(text, 'ACL failure') or string.find(text, 'The user executing'))
  end
  local function try(answer) if not permitted(answer) then refused = refused or answer end end
  %s
  if refused then return refused end
end
"""


class Form(NamedTuple):
    """What is sent of a script."""

    sha: str
    text: str


def _line(command: str, key: str) -> str:
    if command in ("lpush", "rpush"):
        return _PUSH.format(command=command.upper(), key=key, end_=1 if command == "lpush" else -1, nothing=_NOTHING)
    arguments = _HARMLESS[command]
    return f"try(redis.pcall('{command.upper()}', {key}{arguments and ', '}{arguments}))"


@cache
def _checked(name: str) -> Form:
    lines = ["try(redis.pcall('TIME'))"] if "'TIME'" in _SCRIPTS[name].text else []
    for place, commands in RIGHTS[name].items():
        for index, key in enumerate(_SCRIPTS[name].keys, 1):
            if key == place or (place == "live" and key.startswith("live_")):
                lines += [_line(command, f"KEYS[{index}]") for command in commands.split()]
    text = (_FULL % _NOTHING if name in _GROWS else "") + _CHECK % "\n  ".join(lines) + _SCRIPTS[name].text
    return Form(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), text)


def is_refusal(error: str) -> bool:
    """Whether a server's answer says that a right is missing."""
    return _NOT_PERMITTED.search(error) is not None


class Rights:
    """Remembers, by connection, for which scripts and queues its user was lately seen to have all rights."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Args:
        now: The time, seconds.
        """
        self._now = now
        self._seen: WeakKeyDictionary[Wire, dict[tuple[str, str], float]] = WeakKeyDictionary()

    def form(self, wire: Wire, script: Script, key: str) -> Form | Script:
        """The form in which to send a call over this connection; ``key`` is the call's first one."""
        if script.name not in RIGHTS:
            return script
        if (seen := self._seen.get(wire)) is not None and seen.get((script.name, key), 0.0) > self._now():
            return script
        return _checked(script.name)

    def permitted(self, wire: Wire, script: Script, key: str, form: Form | Script) -> None:
        """Note that a call was carried out in this form."""
        if form is not script:
            self._seen.setdefault(wire, {})[script.name, key] = self._now() + _CHECK_EVERY

    def forget(self) -> None:
        """Check all rights again: one is missing."""
        self._seen.clear()
