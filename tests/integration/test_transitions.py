"""Every event that may happen to a message of a reliable queue, in every state."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from redis import Redis

from delayq._redis.scripts import Script, scripts_in
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.settings import LAYOUT
from delayq._reliable.transitions import EVENTS, IdState
from tests.support.rights_cases import calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.servers import PrivateServer

HOUR = 3_600_000_000
KEYS = ReliableKeys.of("jobs")
# An earlier offer never has this token: it is past the last moment that a score can hold exactly.
NO_TOKEN = "9007199254740993"
DOCUMENT = Path(__file__).parents[2] / "docs" / "redis-data-model.md"


script_of = cache(Script)


class Bench:
    """One message on a server, and the scripts.

    Attributes:
        id: The id of the message, which may belong to an occurrence of the schedule ``daily``.
        before: The id of the occurrence before it.
        ran: The names of the scripts that were run.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.ran: set[str] = set()
        self.moment = self.now() + 10 * HOUR
        self.id = f"daily@{self.moment}"
        self.before = f"daily@{self.moment - HOUR}"
        self.token = NO_TOKEN
        raw.hset(KEYS.settings, mapping={"layout": LAYOUT, "partitions": "1"})

    def now(self) -> int:
        seconds, rest = self.raw.time()
        return int(seconds) * 1_000_000 + int(rest)

    def run(self, name: str, *args: Any, folder: str = "reliable") -> Any:
        script = script_of(f"{folder}/{name}")
        keys = [KEYS.call("0") if key == "call" else KEYS.named(key) for key in script.keys]
        self.ran.add(name)
        return self.raw.eval(script.text, len(keys), *keys, *args)

    def offer(
        self, *, key: str = "", delay: int = 0, ttl: int = 0, on_duplicate: str = "raise"
    ) -> None:
        self.run("offer", self.now(), 1, key or self.id, 0, delay, ttl, 0, on_duplicate, b"\n1")

    def claim(
        self, *, suspects: int = 1, max_attempts: int = 0, expired: str = "drop", limit: int = 1
    ) -> Any:
        self.raw.hset(KEYS.settings, "expired", expired)
        arguments = (self.now(), limit, HOUR, max_attempts, "", suspects, 0, "", "")
        reply = self.run("claim", *arguments)
        if self.id.encode() in reply[6]:
            self.token = reply[5].decode()
        return reply

    def end_batch(self, scope: str) -> None:
        """Let the message belong to a batch, and end messages of that."""
        self.raw.hset(KEYS.batches, "1", f"1 1 0 {2**53 - 1}")
        self.raw.zadd(KEYS.batch_members, {f"1\0o\0{self.id}": 0})
        if body := self.raw.hget(KEYS.named("bodies"), self.id):
            self.raw.hset(KEYS.named("bodies"), self.id, body.replace(b"\n", b"b1\n", 1))
        self.run("cancel_members", "1", scope, "")

    def ack(self, remember: int = 0) -> None:
        self.raw.hset(KEYS.settings, "dedup_window", remember)
        self.run("ack", f"1:{self.token}", self.id)

    @property
    def lease(self) -> tuple[str, str]:
        return self.id, self.token

    def let_pass(self, by: int) -> None:
        self.run("advance_reliable", by, folder="testing")

    def schedule(
        self, next_: int | str, *upcoming: int, last: int | str = "", **more: Any
    ) -> Bench:
        """Store the schedule of the message as if it had got this far."""
        facts = more | {"every": "0", "first": "0", "ttl": "0", "version": "1", "priority": 0}
        moments = {"next": str(next_), "last": str(last), "upcoming": [*map(str, upcoming)]}
        record = json.dumps({**facts, **moments, "timing": "t"}) + "\n\n1"
        self.raw.hset(KEYS.schedules, "daily", record)
        return self

    def define(self, moment: int) -> None:
        self.run("schedule", 1, "daily", f"at {moment}", 2, 0, 0, 0, b"\n1", moment)

    def reach(self, state: IdState) -> None:
        """Bring the message into a state, by scripts and time alone."""
        if state is IdState.DELAYED:
            self.offer(delay=HOUR)
        elif state is IdState.EXPIRED:
            self.offer(ttl=HOUR)
            self.let_pass(2 * HOUR)
        elif state is not IdState.GONE:
            self.offer()
        if state not in (IdState.GONE, IdState.DELAYED, IdState.READY, IdState.EXPIRED):
            self.claim()
            self.run("save", *self.lease, "1;1;\n1")
        if state is IdState.DEAD:
            self.run("bury", *self.lease, '{"reason":"buried","error":""}')
        elif state is IdState.REMEMBERED:
            self.ack(HOUR)
        elif state in (IdState.OVERDUE, IdState.SUSPECT, IdState.ON_TRIAL):
            self.let_pass(2 * HOUR)
        if state in (IdState.SUSPECT, IdState.ON_TRIAL):
            self.claim()
            self.let_pass(2 * HOUR)
            self.claim()
        if state is IdState.SUSPECT:
            self.run("release", *self.lease, 0)

    def state(self) -> IdState:
        """Return the state that the keys and the server's clock show."""
        now = self.now()
        due = self.raw.zscore(KEYS.waiting[0], self.id)
        ends = self.raw.zscore(KEYS.leased, self.id)
        _, body, record, expiry, *_ = details = [
            self.raw.hget(key, self.id)
            for key in (*KEYS.messages[11:18], KEYS.named("checkpoints"))
        ]
        if due is None and ends is None:
            assert not any(details), "something is left of the message"
            is_dead = self.raw.hexists(KEYS.dead_messages, self.id)
            assert is_dead == (self.raw.zscore(KEYS.dead, self.id) is not None)
            is_remembered = (self.raw.zscore(KEYS.remembered, self.id) or 0) > now
            return (
                IdState.DEAD if is_dead else IdState.REMEMBERED if is_remembered else IdState.GONE
            )
        assert body is not None
        assert (due is None) != (ends is None), "it both waits and has a lease"
        if ends is not None and ends > now:
            return IdState.ON_TRIAL if (record or b"").endswith(b":2") else IdState.LEASED
        if expiry and float(expiry) < now:
            return IdState.EXPIRED
        if ends is not None:
            return IdState.SUSPECT if ends < 0 else IdState.OVERDUE
        return IdState.READY if due <= now else IdState.DELAYED


def expire(at: Bench) -> None:
    if at.raw.hexists(KEYS.named("bodies"), at.id):
        at.raw.hset(KEYS.expiries, at.id, "1.00")
        at.raw.zadd(KEYS.named("expiry_index"), {at.id: 1})


def record(at: Bench, usual: bytes) -> None:
    """Change what is stored about attempts, but not whether the message is a suspect."""
    known = at.raw.hget(KEYS.named("attempts"), at.id) or b""
    if at.raw.hexists(KEYS.named("bodies"), at.id):
        new = b"1-0::2" if known.endswith(b":2") else usual
        at.raw.hset(KEYS.named("attempts"), at.id, new)


def use_all_attempts(at: Bench) -> None:
    record(at, b"1-0:")
    at.claim(max_attempts=1)


def lose_again(at: Bench) -> None:
    record(at, b"1-1::1")
    at.claim()


def follows(at: Bench) -> None:
    at.schedule(at.moment - HOUR, at.moment)
    at.offer(key=at.before)
    at.raw.zrem(KEYS.waiting[0], at.before)
    token = at.now() + HOUR
    at.raw.zadd(KEYS.leased, {at.before: token})
    at.run("occur", at.before, token)


def comes_too_early(at: Bench) -> None:
    at.offer(key=at.before, delay=HOUR)
    at.schedule(at.moment, last=at.moment - HOUR)
    at.run("occur", *at.lease)


def redrive_as_before(at: Bench) -> None:
    if letter := at.raw.hget(KEYS.dead_messages, at.id):
        facts = b'{"due":"%d",' % at.moment
        at.raw.hset(KEYS.dead_messages, at.id, letter.replace(b"{", facts, 1))
    at.run("redrive", 1, at.id)


HAPPENS: dict[str, Callable[[Bench], Any]] = {
    "offered as a new message": lambda at: at.run("offer_new", at.now(), 1, at.id, 0, b"\n1"),
    "offered without a delay": lambda at: at.offer(),
    "offered with a delay": lambda at: at.offer(delay=HOUR),
    "offered in place of an earlier one": lambda at: at.offer(on_duplicate="replace"),
    "its delay, lease or dedup window ends": lambda at: at.let_pass(2 * HOUR),
    "its time to live ends": expire,
    "claimed": lambda at: at.claim(),
    "claimed, and the lease before was lost as well": lose_again,
    "claimed by a client with a suspect at work": lambda at: at.claim(suspects=0),
    "claimed, and all attempts are used": use_all_attempts,
    "claimed from a queue that keeps expired messages": lambda at: at.claim(expired="dead"),
    "acknowledged": lambda at: at.ack(),
    "acknowledged in a queue with a dedup window": lambda at: at.ack(HOUR),
    "acknowledged in a queue that keeps results": lambda at: at.run(
        "finish", f"1:{at.token}", at.id, "0", 0, "{}", ""
    ),
    "acknowledged, and followed by another": lambda at: at.run(
        "ack_then", f"1:{at.token}", at.id, "0", 0, "{}", "", "1:2:a0 0 0 0 raise \n1", ""
    ),
    "failed, and retried at once": lambda at: at.run("nack", *at.lease, 0, 1, "", "0", ""),
    "failed, and retried after a delay": lambda at: at.run("nack", *at.lease, HOUR, 1, "", "0", ""),
    "snoozed": lambda at: at.run("nack", *at.lease, HOUR, 0, "", "0", ""),
    "returned untouched": lambda at: at.run("release", *at.lease, 0),
    "its lease is extended": lambda at: at.run("extend", HOUR, 1, f"1:{at.token}", at.id),
    "buried": lambda at: at.run("bury", *at.lease, '{"reason":"buried","error":""}', "0", ""),
    "buried while no worker has it": lambda at: at.run("bury_waiting", "why", at.id),
    "cancelled": lambda at: at.run("cancel", 0, at.id),
    "cancelled even if a worker has it": lambda at: at.run("cancel", 1, at.id),
    "its batch is looked at": lambda at: at.end_batch("expired"),
    "its batch is cancelled": lambda at: at.end_batch("waiting"),
    "its batch is cancelled even if workers have its messages": lambda at: at.end_batch("all"),
    "rescheduled without a delay": lambda at: at.run("reschedule", 0, at.id),
    "rescheduled with a delay": lambda at: at.run("reschedule", HOUR, at.id),
    "purged with the delayed messages": lambda at: at.run("purge", "delayed", 10, 0, ""),
    "purged with the ready messages": lambda at: at.run("purge", "ready", 10, 0, ""),
    "purged with all messages": lambda at: at.run("purge", "all", 10, 0, ""),
    "redriven": lambda at: at.run("redrive", 0, at.id),
    "redriven, and due as before it was buried": redrive_as_before,
    "dropped as a dead letter": lambda at: at.run("drop_dead", at.id),
    "scheduled as an occurrence": lambda at: at.define(at.moment),
    "replaced by an occurrence at another time": lambda at: at.schedule(at.moment).define(
        at.moment + HOUR
    ),
    "its schedule ends": lambda at: at.schedule(at.moment).run("unschedule", "daily"),
    "its schedule is paused": lambda at: at.schedule(at.moment).run("pause_schedule", "daily"),
    "its schedule is resumed": lambda at: at.schedule(at.moment, paused=True).run(
        "resume_schedule", "daily"
    ),
    "follows the occurrence that is handed out": follows,
    "handed out while the occurrence before it lives": comes_too_early,
    "follows an occurrence that was lost": lambda at: at.schedule(at.moment - HOUR, at.moment).run(
        "recur", "daily"
    ),
    "its moment becomes known": lambda at: at.schedule("").run("refill", "daily", "t", at.moment),
}


@pytest.mark.every_server
@pytest.mark.parametrize("state", IdState)
def test_an_event_changes_exactly_its_states(server: PrivateServer, state: IdState) -> None:
    with Redis.from_url(server.url, socket_timeout=60) as raw:
        for event in EVENTS:
            raw.flushall()
            at = Bench(raw)
            at.reach(state)
            assert at.state() is state
            at.ran.clear()
            HAPPENS[event.name](at)
            assert event.script is None or event.script in at.ran
            expected = event.changes.get(state, state)
            assert at.state() is expected, f"after {event.name}, it was {state}"


MOVING = (
    *("discard", "drop", "pause_for_move", "receive", "receive_letters"),
    *("repartition", "set_aside"),
)


def calls_without_rows() -> list[tuple[str, int]]:
    """Return each script that no event names, once for each example of its arguments."""
    names = {script.name.removeprefix("reliable/") for script in scripts_in("reliable")}
    # A move to other partitions has tests of its own: its scripts get keys that it chooses.
    rest = sorted(names - {event.script for event in EVENTS} - {*MOVING})
    return [(name, call) for name in rest for call in range(len(arguments(name)))]


def arguments(name: str, id: str = "") -> list[list[Any]]:  # noqa: A002
    message = {"id": id, "name": id, "token": NO_TOKEN, "priority": 0}
    return calls(script_of(f"reliable/{name}"), [message])


@pytest.mark.every_server
@pytest.mark.parametrize("state", IdState)
def test_a_script_without_rows_keeps_the_state(server: PrivateServer, state: IdState) -> None:
    with Redis.from_url(server.url, socket_timeout=60) as raw:
        for name, call in calls_without_rows():
            raw.flushall()
            at = Bench(raw)
            at.reach(state)
            at.run(name, *arguments(name, at.id)[call])
            assert at.state() is state, f"{name}.lua: describe it in _reliable/transitions.py"


def test_the_document_shows_every_row() -> None:
    rows = []
    for event in EVENTS:
        before: dict[IdState, list[str]] = {}
        for old, new in event.changes.items():
            before.setdefault(new, []).append(old)
        changes = "; ".join(f"{', '.join(old)} → {new}" for new, old in before.items())
        cause = f"`{event.script}.lua`" if event.script else "time"
        rows.append(f"| {event.name} | {cause} | {changes} |")
    shown = (
        DOCUMENT.read_text("utf-8")
        .partition("| event | script | changes |\n|---|---|---|\n")[2]
        .partition("\n\n")[0]
    )
    assert shown.splitlines() == rows
