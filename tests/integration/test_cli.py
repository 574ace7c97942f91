"""The commands that inspect queues and messages and change them, on every server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shlex
import socket
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import redis

import delayq
from delayq._delayed.keys import DelayedKeys
from delayq._delayed.records import pack
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.store import ReliableStore
from delayq.admin import inspect as inspection
from delayq.admin.acl import acl_rules
from delayq.cli.app import run
from delayq.codecs import BytesCodec, StringCodec
from tests.support.fields import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delayq import Client
    from tests.support.clusters import TestCluster
    from tests.support.servers import PrivateServer

    # Returns the completions of the last word, as bash asks for them.
    Shell = Callable[..., list[str]]


MAILS = ReliableKeys.of("mails")
CLOSING = DelayedKeys.of("closing")
SECRET = "geheim"
BOTH_KINDS = ("mails", "delayed:closing")


class Cli:
    """Runs the command line in this process, against one server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        self.error = ""

    def __call__(self, line: str, *more: str) -> tuple[int, list[Any]]:
        """Run a command with ``--json``, and return its exit status and its JSON documents."""
        status, out = self.plain(line, *more, "--json")
        return status, [json.loads(line) for line in out.splitlines()]

    def plain(self, line: str, *more: str) -> tuple[int, str]:
        """Run a command: a line as in a shell, and further arguments."""
        self._capsys.readouterr()
        status = run([*shlex.split(line), *more, "--url", self.url])
        captured = self._capsys.readouterr()
        self.error = captured.err
        return status, captured.out

    def assert_refused(self, line: str, *more: str, words: str = "") -> None:
        """Assert that a command fails with status 2 and one line on stderr that has the words."""
        assert self.plain(line, *more) == (2, "")
        assert self.error.startswith("delayq: ")
        assert self.error.count("\n") == 1
        assert words.lower() in self.error.lower()

    def check(self, name: str, line: str = "doctor") -> dict[str, Any]:
        """Return what a doctor says of one check. Its status is 1 if anything is wrong."""
        status, every = self(line)
        assert status == any(one["level"] == "wrong" for one in every)
        (found,) = [one for one in every if one["check"] == name]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def cli(
    server: PrivateServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    # With this variable set, lines would be wrapped as at a terminal of that width.
    monkeypatch.delenv("COLUMNS", raising=False)
    # Lateness is measured for a moment only.
    monkeypatch.setattr("delayq.cli.bench._SPREAD", (0.1, 0.2))
    return Cli(server.url, capsys)


@pytest.fixture
def sync_raw(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


def seed(url: str) -> None:
    """Fill two whole queues and a partitioned one; between them, messages are in every state."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            mails = client.reliable_queue("mails", lease=3600)
            long = {
                "to": "ada@example.org",
                "subject": "a subject that does not fit into a table of eighty columns",
            }
            for place, delay in enumerate((0, 90, 4000, 100_000)):
                await mails.offer(
                    long, delay, id=f"welcome-{place}", priority=place, headers={"tenant": "acme"}
                )
            await mails.offer({"n": 1}, id="bad", priority=9)
            await mails.offer({"n": 2}, id="busy", priority=8)
            bad, busy = await mails.claim(2)
            assert (bad.id, busy.id) == ("bad", "busy")
            await bad.bury("rejected")
            closing = client.delayed_queue("closing")
            for delay in (3000, 100_000):
                await closing.offer(
                    {"order": 1, "customer": "Ada Lovelace, 12 St James's Square, London"}, delay
                )
            await closing.ready.size()
            parts = client.reliable_queue("orders", partitions=4)
            await parts.offer_many(delayq.Offer(number, delay=500) for number in range(40))

    asyncio.run(main())


# Queues


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{metadata.version('delayq')}\n"


def test_queues_are_found_with_their_counts(cli: Cli) -> None:
    seed(cli.url)
    status, (closing, mails, orders) = cli("queues")
    assert status == 0
    assert fields(closing, "kind queue") == ("delayed", "closing")
    assert fields(closing, "delayed ready leased quarantined") == (2, 0, 0, 0)
    assert closing["next_due_at"].endswith("Z")
    assert fields(mails, "kind queue partitions") == ("reliable", "mails", 1)
    assert fields(mails, "delayed ready leased dead paused") == (3, 1, 1, 1, False)
    assert mails["oldest_due_age"] >= 0
    assert fields(orders, "kind queue partitions") == ("reliable", "orders", 4)
    assert fields(orders, "delayed ready") == (40, 0)


def test_no_queue_at_all_is_a_one(cli: Cli) -> None:
    assert cli("queues") == (1, [])
    assert cli.plain("queues") == (1, "no queues\n")


def test_foreign_keys_are_no_queues(cli: Cli, server: PrivateServer) -> None:
    for key in (
        *("delayq:{x}", "redisson_delay_queue_timeout:", "dela"),
        *("delayq:part:{1:01:x}:waiting", "delayq:{}:waiting"),
    ):
        server.call("SET", key, "1")
    assert cli("queues") == (1, [])


def test_a_queue_with_foreign_keys_hides_no_other(cli: Cli, server: PrivateServer) -> None:
    cli("offer good 1")
    server.call("SET", ReliableKeys.of("bad").dead, "x")
    status, (bad, good) = cli("queues")
    assert (status, good["queue"], good["ready"]) == (0, "good", 1)
    assert bad["queue"] == "bad"
    assert "a value of the wrong type" in bad["error"]
    _, line, _ = cli.plain("queues")[1].splitlines()
    assert line.split() == ["reliable", "bad", "-", "-", "-", "-", "see", "doctor"]


def test_stats_of_both_kinds(cli: Cli) -> None:
    seed(cli.url)
    for queue, names, figures in (
        ("mails", "delayed ready leased dead", (3, 1, 1, 1)),
        ("delayed:closing", "kind delayed", ("delayed", 2)),
        ("reliable:orders", "delayed", (40,)),
        ("nobody", "ready", (0,)),
    ):
        _, (stats,) = cli(f"stats {queue}")
        assert fields(stats, names) == figures


def test_looking_moves_nothing(cli: Cli, sync_raw: Any) -> None:
    sync_raw.zadd(CLOSING.timeout, {pack(b"ABCDEFGH", b'"due"', 8): 1000.0})
    name = b"ABCDEFGH".hex()
    for command in ("stats {}", "peek {}", "list {}", "inspect {}", f"get {{}} {name}"):
        status, found = cli(command.format("delayed:closing"))
        assert (status, len(found)) == (0, 1)
    cli("queues")
    cli("doctor")
    assert sync_raw.zcard(CLOSING.timeout) == 1
    assert sync_raw.llen(CLOSING.ready) == 0


def test_pause_and_resume(cli: Cli) -> None:
    assert cli.plain("pause mails")[0] == 0
    assert cli("stats mails")[1][0]["paused"] is True
    assert [cli.plain("resume mails")[0] for _ in range(2)] == [0, 1]
    cli.assert_refused("pause delayed:closing")


def test_configure(cli: Cli) -> None:
    for options in ("", " --max-size 2"):
        cli.assert_refused(
            f"configure mails{options}", words="no reliable queue 'mails'; to give a new queue"
        )
    assert cli("stats mails")[1][0]["max_size"] is None
    lines = cli.plain("configure mails --partitions 1 --create")[1].splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "partitions: 1",
        "max size: none",
        "expired: drop",
        "dedup window: none",
        "keep dead: for good",
        "max dead: none",
        "keep: none",
        "limit: none",
        "group limit: none",
    ]
    status, (settings,) = cli("configure mails --max-size 2 --dedup-window 1h")
    assert (status, settings) == (
        0,
        {"queue": "mails", "partitions": 1, "max_size": 2}
        | {"expired": "drop", "dedup_window": 3600.0}
        | {"keep_dead": None, "max_dead": None, "keep": 0.0, "max_kept": 10_000}
        | {"limit": None, "group_limit": None},
    )
    assert [cli(f"offer mails {n}")[0] for n in range(3)] == [0, 0, 2]
    assert "full" in cli.error
    assert cli("configure mails --max-size none --expired dead")[0] == 0
    assert cli("offer mails 2")[0] == 0
    _, (stats,) = cli("stats mails")
    assert fields(stats, "max_size expired dedup_window") == (None, "dead", 3600.0)
    shown = [line.split() for line in cli.plain("stats mails")[1].splitlines()]
    assert ["expired:", "dead"] in shown
    assert ["partitions:", "1"] in shown
    assert cli("configure mails --dedup-window none")[1][0]["dedup_window"] == 0.0
    _, (changed,) = cli("configure mails --keep-dead 30d --max-dead 1000")
    assert fields(changed, "keep_dead max_dead") == (30 * 86400.0, 1000)
    shown = [line.split() for line in cli.plain("stats mails")[1].splitlines()]
    assert ["max", "dead:", "1,000"] in shown
    _, (changed,) = cli("configure mails --keep-dead none --max-dead none")
    assert fields(changed, "keep_dead max_dead") == (None, None)
    _, (changed,) = cli("configure mails --keep 7d --max-kept 5")
    assert fields(changed, "keep max_kept") == (7 * 86400.0, 5)
    assert "up to 5" in cli.plain("stats mails")[1]
    assert cli("configure mails --keep none")[1][0]["keep"] == 0.0
    for option in ("keep soon", "max-kept 0"):
        cli.assert_refused(f"configure mails --{option}")
    for option in ("keep-dead 0", "keep-dead soon", "max-dead 0", "max-dead few"):
        cli.assert_refused(f"configure mails --{option}")
    for option in ("max-size 0", "max-size few", "expired keep", "dedup-window -1"):
        cli.assert_refused(f"configure mails --{option}")
    cli.assert_refused("configure mails --dedup-window soon")


def test_configure_limits(cli: Cli) -> None:
    _, (settings,) = cli("configure mails --create --limit 50,100/s --group-limit ordered")
    whole = {"concurrency": 50, "rate": 100, "per": 1.0, "ordered": False}
    of_groups = {"concurrency": None, "rate": None, "per": 1.0, "ordered": True}
    assert fields(settings, "limit group_limit") == (whole, of_groups)
    shown = cli.plain("stats mails")[1]
    assert "50 at a time, 100 in 1.0 s" in shown
    assert "in order" in shown
    _, (settings,) = cli("configure mails --limit none --group-limit 1")
    assert settings["limit"] is None
    assert settings["group_limit"]["concurrency"] == 1
    for option in ("limit few", "limit ordered", "group-limit 0"):
        cli.assert_refused(f"configure mails --{option}")


async def _offer_to_groups(url: str) -> None:
    async with delayq.connect(url) as client:
        await client.reliable_queue("mails").offer_many(
            [delayq.Offer(number, group=name) for name in ("ada", "bob") for number in range(3)]
        )


def test_groups(cli: Cli) -> None:
    assert cli("groups list mails") == (1, [])
    asyncio.run(_offer_to_groups(cli.url))
    status, (ada, bob) = cli("groups list mails")
    assert (status, ada["group"], bob["group"]) == (0, "ada", "bob")
    assert fields(ada, "waiting running limit paused") == (3, 0, None, False)
    assert ada["next_at"].endswith("Z")
    assert cli("groups list mails --after ada")[1] == [bob]
    assert "continue with --after 'ada'" in cli.plain("groups list mails --limit 1")[1]

    status, (limited,) = cli("groups limit mails ada 2,10/m")
    assert (status, limited["queue"], limited["group"]) == (0, "mails", "ada")
    assert fields(limited["limit"], "concurrency rate per") == (2, 10, 60.0)
    assert "2 at a time, 10 in 1 min" in cli.plain("groups list mails")[1]
    assert cli("configure mails --group-limit 7")[0] == 0
    found = [
        (cli(f"groups limit mails ada {limit}")[1][0]["limit"] or {}).get("concurrency")
        for limit in ("none", "queue")
    ]
    assert found == [None, 7]

    assert cli("groups pause mails ada")[1] == [{"queue": "mails", "group": "ada", "paused": True}]
    assert [row["paused"] for row in cli("groups list mails")[1]] == [True, False]
    assert [cli.plain("groups resume mails ada")[0] for _ in range(2)] == [0, 1]
    _, (offered,) = cli("offer mails 7 --group eve --id m7")
    assert offered["id"] == "m7"
    assert cli("get mails m7")[1][0]["group"] == "eve"
    assert "group:    eve" in cli.plain("get mails m7")[1]
    cli.assert_refused("offer delayed:closing 7 --group eve", words="--group")
    cli.assert_refused("groups limit mails ada few", words="LIMIT")
    cli.assert_refused("groups list")
    cli.assert_refused("groups pause delayed:closing ada", words="cannot have groups")


def test_purge(cli: Cli) -> None:
    seed(cli.url)
    _, dropped = cli("purge mails --state delayed --yes")
    assert dropped == [{"queue": "mails", "state": "delayed", "dropped": 3}]
    for queue, count in (("mails", 2), ("orders", 40), ("delayed:closing", 2)):
        status, (dropped,) = cli(f"purge {queue} --yes")
        assert (status, dropped["dropped"]) == (0, count)
    # Of one a dead letter is left, and of both the history.
    figures = {
        one["queue"]: (one["ready"], one["delayed"], one["dead"]) for one in cli("queues")[1]
    }
    assert figures.pop("mails") == (0, 0, 1)
    assert figures in ({}, {"orders": (0, 0, 0)})


async def test_a_purge_counts_what_is_offered_meanwhile(client: Client) -> None:
    orders = client.delayed_queue("closing")
    await orders.offer(0, 3600)

    async def offer() -> None:
        for number in range(500):
            await orders.offer(number, 3600)

    offering = asyncio.create_task(offer())
    dropped = 0
    while not offering.done():
        dropped += await inspection.purge(client, "closing")
    assert dropped + await inspection.purge(client, "closing", "delayed") == 501


def test_a_purge_of_a_foreign_key_drops_nothing(cli: Cli, server: PrivateServer) -> None:
    seed(cli.url)
    server.call("SET", CLOSING.ready, "x")
    cli.assert_refused("purge delayed:closing --yes")
    assert server.call("ZCARD", CLOSING.timeout) == b":2"


# Messages


def test_an_offer_is_listed_looked_at_moved_taken(cli: Cli) -> None:
    options = "--delay 1h30m --id a --header k=v=w --priority 3 --ttl 2d"
    status, (offered,) = cli(f"offer mails '{{\"to\": 1}}' {options}")
    assert (status, offered["queue"], offered["id"]) == (0, "mails", "a")
    (status, (found,)), got, peeked = (
        cli(command) for command in ("list mails", "get mails a", "peek mails")
    )
    assert [found] == got[1] == peeked[1]
    seen = ("delayed", {"to": 1}, {"k": "v=w"}, 3, offered["due_at"])
    assert (status, *fields(found, "state value headers priority due_at")) == (0, *seen)
    assert cli("take mails") == (1, [])
    status, (moved,) = cli("reschedule mails a --delay 0")
    assert (status, moved["id"]) == (0, "a")
    status, (taken,) = cli("take mails")
    assert (status, *fields(taken, "id value attempt")) == (0, "a", {"to": 1}, 1)
    assert cli("get mails a") == (1, [])


def test_the_same_of_a_delayed_queue(cli: Cli) -> None:
    began = datetime.now(UTC)
    _, (offered,) = cli("offer delayed:closing hello --text --at 2030-01-31T12:00+01:00")
    # Only the distance from now counts, from when the server gets it.
    off_by = datetime.fromisoformat(offered["due_at"]) - datetime(2030, 1, 31, 11, tzinfo=UTC)
    assert abs(off_by) <= datetime.now(UTC) - began
    name = offered["id"]
    _, (found,) = cli("list delayed:closing")
    assert fields(found, "id due_at value") == (name, offered["due_at"], "hello")
    assert cli(f"get delayed:closing {name}")[1] == [found]
    assert cli("take delayed:closing") == (1, [])
    assert cli(f"reschedule delayed:closing {name} --delay 0.01")[0] == 0
    taken = cli("take delayed:closing --wait 5s")
    assert taken == (0, [{"queue": "closing", "value": "hello"}])
    assert cli(f"cancel delayed:closing {name}") == (1, [])


@pytest.mark.parametrize("queue", BOTH_KINDS)
def test_cancel(cli: Cli, queue: str) -> None:
    _, (offered,) = cli(f"offer {queue} 1 --delay 1h")
    status, (told,) = cli(f"cancel {queue} {offered['id']}")
    assert (status, *fields(told, "id cancelled")) == (0, offered["id"], True)
    assert cli(f"cancel {queue} {offered['id']}") == (1, [])
    assert cli(f"list {queue}") == (1, [])


def test_result(cli: Cli) -> None:
    assert cli("result mails a") == (1, [])
    assert "keeps none; give it keep=" in cli.error
    cli("offer mails 5 --id a")
    assert cli("configure mails --keep 1h")[0] == 0
    assert cli("result mails b") == (1, [])
    assert "never offered" in cli.error
    assert cli("result mails a") == (1, [])
    assert "was not finished within 0 s" in cli.error
    assert cli("take mails")[0] == 0
    status, (told,) = cli("result mails a --timeout 1m")
    assert (status, *fields(told, "queue id value")) == (0, "mails", "a", None)
    cli("offer mails 5 --id b")
    with delayq.sync.connect(cli.url) as client:
        client.run(handle_with_a_result)
    assert cli("result mails b")[1][0]["value"] == {"pages": 12}
    assert cli.plain("result mails b") == (0, '{"pages": 12}\n')
    cli.assert_refused("result delayed:mails b", words="a delayed queue cannot have results")
    cli.assert_refused("result mails b --timeout soon", words="--timeout must be a duration")


async def handle_with_a_result(client: delayq.Client) -> None:
    (message,) = await client.reliable_queue("mails").claim(wait=20)
    await message.ack({"pages": 12})


def test_an_id_that_is_taken_is_a_one(cli: Cli) -> None:
    assert [cli("offer mails 1 --id a")[0] for _ in range(2)] == [0, 1]
    told = "delayq: the id 'a' is taken, and the message was not stored: see --on-duplicate\n"
    assert cli.error == told
    assert cli("offer mails 2 --id a --on-duplicate replace")[0] == 0
    assert cli("get mails a")[1][0]["value"] == 2


def test_a_message_may_have_limits_of_its_own(cli: Cli) -> None:
    own = "--id a --max-attempts 1 --timeout 5 --unique-for 1h"
    assert cli(f"offer mails 1 {own}")[0] == 0
    assert cli("cancel mails a")[0] == 0
    assert cli("offer mails 1 --id a")[0] == 1


def test_a_value_from_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"big": true}\n')))
    assert cli("offer mails -")[0] == 0
    assert cli("peek mails")[1][0]["value"] == {"big": True}


@pytest.mark.parametrize(
    ("codec", "value", "shown"),
    [
        ("string", "hello", "hello"),
        ("bytes", "hello", "68656c6c6f"),
        ("long", "42", 42),
        ("integer", "42", 42),
        ("typed-json", '{"a": 1}', {"a": 1}),
        ("json-jackson", '{"a": [1]}', {"a": [1]}),
        ("kryo5", '"text"', "text"),
    ],
)
def test_codecs(cli: Cli, codec: str, value: str, shown: object) -> None:
    for queue in BOTH_KINDS:
        assert cli(f"offer {queue} --codec {codec} --delay 60", value)[0] == 0
        assert cli(f"list {queue} --codec {codec}")[1][0]["value"] == shown


async def offer_undecodable(url: str) -> None:
    async with delayq.connect(url) as client:
        await client.delayed_queue("closing", codec=BytesCodec()).offer(b"\xff\x00", 60)
        await client.reliable_queue("mails", codec=BytesCodec()).offer(b"\xff\x00")
        await client.delayed_queue("due", codec=StringCodec()).offer("no json")


def test_what_cannot_be_decoded_is_shown_as_bytes(cli: Cli, server: PrivateServer) -> None:
    asyncio.run(offer_undecodable(cli.url))
    for queue in BOTH_KINDS:
        _, (found,) = cli(f"peek {queue}")
        assert fields(found, "value hex") == (None, "ff00")
        assert "JsonCodec" in found["error"]
    for queue, payload in (("mails", b"\xff\x00"), ("delayed:due", b"no json")):
        status, (taken,) = cli(f"take {queue} --wait 5")
        assert (status, taken["hex"]) == (0, payload.hex())
    assert server.call("LLEN", DelayedKeys.of("due").quarantine) == b":0"


def test_lists_are_of_one_state_and_have_pages(cli: Cli) -> None:
    seed(cli.url)
    _, (busy,) = cli("list mails --state leased")
    assert fields(busy, "id state due_at") == ("busy", "leased", None)
    assert busy["lease_ends_at"].endswith("Z")
    _, some = cli("list mails --state delayed --limit 2 --offset 1")
    assert [one["id"] for one in some] == ["welcome-2", "welcome-1"]
    assert len(cli("list orders --limit 7")[1]) == 7


# Dead letters


def evaluate_in_steps(url: str, script: str, keys: Sequence[str], count: int, *args: str) -> None:
    """Call a script for the numbers from 0 to ``count``, 10,000 at a time: one call for all of them
    would block a busy machine's server for longer than a client waits.
    """
    with redis.Redis.from_url(url, socket_timeout=60) as raw:
        for first in range(0, count, 10_000):
            last = min(first + 10_000, count) - 1
            raw.eval(script, len(keys), *keys, first, last, *args)


def bury(url: str, count: int) -> None:
    why = (
        '{"reason":"attempts","attempt":3,"priority":0,"error":"Traceback\\n  here\\nValueError:'
        ' no"}\n1700000000000000 \n'
    )
    fill = """for n = ARGV[1], ARGV[2] do
      local id = string.format('dead-%06d', n)
      redis.call('ZADD', KEYS[1], string.format('%.0f', 1.7e15 + n), id)
      redis.call('HSET', KEYS[2], id, ARGV[3] .. '"' .. id .. '"')
    end"""
    evaluate_in_steps(url, fill, (MAILS.dead, MAILS.dead_messages), count, why)


def test_dead_letters_are_listed_redriven_and_purged(cli: Cli) -> None:
    bury(cli.url, 250)
    status, found = cli("dead list mails --limit 2 --offset 1")
    assert (status, [one["id"] for one in found]) == (0, ["dead-000001", "dead-000002"])
    letter = ("attempts", 3, "ValueError: no", "dead-000001")
    assert fields(found[0], "reason attempt error value") == letter
    for command, status, told in (
        ("redrive mails dead-000003 nobody", 0, {"redriven": 1}),
        ("purge mails dead-000004 --yes", 0, {"purged": 1}),
        ("redrive mails", 0, {"redriven": 248}),
        ("purge mails --yes", 1, {"purged": 0}),
    ):
        assert cli(f"dead {command}") == (status, [{"queue": "mails"} | told])
    assert cli("stats mails")[1][0]["ready"] == 249
    assert cli("dead list mails") == (1, [])


def bury_some(url: str, partitions: int = 1) -> None:
    """Bury 350 messages one after the other: each tenth for want of money, others for an error."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            queue = client.reliable_queue("mails", partitions=partitions, max_attempts=1)
            await queue.offer_many(delayq.Offer(n, id=f"m{n:03}") for n in range(350))
            while messages := await queue.claim(100):
                for message in messages:
                    if message.value % 10 == 0:
                        await message.bury("No money")
                    else:
                        await message.nack(error=ValueError(f"user {message.value % 3}"))

    asyncio.run(main())


@pytest.mark.parametrize("partitions", [1, 3])
def test_dead_letters_are_grouped_by_cause(cli: Cli, partitions: int) -> None:
    bury_some(cli.url, partitions)
    _, found = cli("dead list mails --group-by reason")
    counts = [fields(one, "reason count") for one in found]
    assert counts == [("attempts", 315), ("No money", 35)]
    assert found[0]["first_at"] <= found[0]["last_at"]
    _, found = cli("dead list mails --group-by error --reason ATTEMPTS")
    assert sum(one["count"] for one in found) == 315
    assert {one["error"] for one in found} == {f"ValueError: user {n}" for n in range(3)}
    _, found = cli("dead list mails --group-by type --limit 1 --offset 1")
    assert [fields(one, "type count") for one in found] == [("No money", 35)]
    assert cli("dead list mails --group-by error --older-than 1h") == (1, [])


@pytest.mark.parametrize("partitions", [1, 3])
def test_dead_letters_are_chosen_by_cause(cli: Cli, partitions: int) -> None:
    bury_some(cli.url, partitions)
    _, found = cli("dead list mails --error 'user 2' --limit 3 --offset 2")
    numbers = [n for n in range(350) if n % 10 and n % 3 == 2]
    if partitions == 1:
        assert [one["value"] for one in found] == numbers[2:5]
    assert {one["error"] for one in found} == {"ValueError: user 2"}
    _, shown = cli.plain("dead list mails --error 'user 2' --limit 3")
    assert "1 to 3 of more" in shown
    for command in ("redrive", "purge"):
        status, (told,) = cli(f"dead {command} mails --error 'USER 2' --dry-run")
        assert (status, told) == (0, {"queue": "mails", "matched": len(numbers), "dry_run": True})
    assert cli("dead redrive mails --error 'user 2'")[1] == [
        {"queue": "mails", "redriven": len(numbers)}
    ]
    assert cli("stats mails")[1][0]["ready"] == len(numbers)
    assert cli("dead purge mails --error 'user 2' --yes") == (1, [{"queue": "mails", "purged": 0}])
    purged = {"queue": "mails", "purged": 35}
    assert cli("dead purge mails --reason money --yes") == (0, [purged])
    left = 350 - 35 - len(numbers)
    assert cli("stats mails")[1][0]["dead"] == left
    assert cli("dead purge mails --older-than 0 --yes")[1] == [{"queue": "mails", "purged": left}]


def test_dead_letters_are_chosen_by_age(cli: Cli) -> None:
    bury(cli.url, 150)  # in 2023
    bury_some(cli.url)
    assert cli("dead purge mails --older-than 1d --dry-run")[1][0]["matched"] == 150
    redriven = {"queue": "mails", "redriven": 150}
    assert cli("dead redrive mails --older-than 365d") == (0, [redriven])
    assert cli("stats mails")[1][0]["dead"] == 350


def test_a_search_goes_on_past_messages_that_are_gone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        assert cli(f"offer mails {number}")[0] == 0
    assert cli("offer mails 7 --delay 1h")[0] == 0

    async def none(*_: object, **__: object) -> list[object]:
        return []

    # Workers took what was ready between the count and the reading.
    monkeypatch.setattr("delayq._reliable.store.ReliableStore.page", none)
    _, (told,) = cli("search mails --payload x")
    assert (told["searched"], told["total"], told["next_offset"]) == (0, 4, None)


async def test_progress_is_told_of_purges_and_of_all_partitions(client: Client) -> None:
    queue = client.reliable_queue("parts", partitions=3)
    await queue.offer_many(delayq.Offer(number) for number in range(30))
    while messages := await queue.claim(100):
        for message in messages:
            await message.bury("no")
    told: list[tuple[int, int]] = []
    assert await queue.dead.redrive(["nobody"], progress=lambda *now: told.append(now)) == 0
    assert told == [(1, 1)]
    told.clear()
    assert await queue.dead.purge(progress=lambda *now: told.append(now)) == 30
    assert told[-1] == (30, 30)
    assert told == sorted(told)
    told.clear()
    await queue.offer_many(delayq.Offer(number, delay=60 * (number % 2)) for number in range(900))
    assert await queue.purge("delayed", progress=lambda *now: told.append(now)) == 450
    assert {total for _, total in told} == {450}
    assert told == sorted(told)
    assert told[-1][0] == 450
    await queue.purge(progress=lambda *now: told.append(now))
    assert told[-1] == (450, 450)


# Search, schedules


def test_messages_are_found_by_what_they_contain(cli: Cli) -> None:
    seed(cli.url)

    def found(line: str) -> tuple[list[str], dict[str, Any]]:
        status, (*some, figures) = cli(f"search {line}")
        assert status == (0 if some else 1)
        assert figures["found"] == len(some)
        return [one["id"] or one["value"]["order"] for one in some], figures

    welcome = [f"welcome-{place}" for place in range(4)]
    names, figures = found("mails --payload ADA@example")
    assert sorted(names) == welcome
    assert figures == {"searched": 6, "total": 6, "found": 4, "next_offset": None}
    assert found("mails --id come-2")[0] == ["welcome-2"]
    assert sorted(found("mails --header tenant=ac --payload subject")[0]) == welcome
    assert found("mails --header tenant=other")[0] == []
    assert found("mails --header nothing=")[0] == []
    assert found("mails --error REJECT")[0] == ["bad"]
    assert found("mails --id b --state dead")[0] == ["bad"]
    assert found("mails --id b --state leased")[0] == ["busy"]
    assert len(found("delayed:closing --payload lovelace")[0]) == 2
    assert cli.plain("search mails --id welcome-2")[1].splitlines()[-1] == (
        "1 found; 6 of 6 messages were searched"
    )
    assert cli("offer mails 1 --id grouped --group tenant-9")[0] == 0
    assert found("mails --group NANT-9")[0] == ["grouped"]


def test_a_search_has_bounds_and_pages(cli: Cli) -> None:
    seed(cli.url)
    seen: list[int] = []
    offset: int | None = 0
    looks = 0
    while offset is not None:
        line = f"search orders --payload 1 --scan 15 --offset {offset}"
        _, (*some, figures) = cli(line)
        seen += [one["value"] for one in some]
        assert figures["searched"] <= 15
        offset, looks = figures["next_offset"], looks + 1
    assert looks == 3
    assert sorted(seen) == [number for number in range(40) if "1" in str(number)]
    _, shown = cli.plain("search orders --payload 1 --limit 1 --state delayed")
    assert "1 found; " in shown
    assert " of 40 messages were searched; continue with --offset " in shown


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_search_finds_messages_behind_expired_ones(cli: Cli, partitions: int) -> None:
    async def main() -> None:
        async with delayq.connect(cli.url) as client:
            jobs = client.reliable_queue("jobs", partitions=partitions)
            await jobs.offer_many(delayq.Offer("old", id=f"old-{n}", ttl=3600) for n in range(700))
            with redis.Redis.from_url(cli.url, socket_timeout=60) as raw:
                for number in range(partitions):
                    expiries = ReliableKeys.of("jobs", partition=number).expiries
                    raw.hset(expiries, mapping=dict.fromkeys(raw.hkeys(expiries), 1))
            await jobs.offer_many(delayq.Offer("new", id=f"new-{n}") for n in range(300))

    asyncio.run(main())
    found: list[str] = []
    offset: int | None = 0
    while offset is not None:
        line = f"search jobs --payload new --state ready --limit 70 --offset {offset}"
        _, (*some, figures) = cli(line)
        found += [one["id"] for one in some]
        offset = figures["next_offset"]
    assert sorted(found) == sorted(f"new-{n}" for n in range(300))


@pytest.mark.parametrize("partitions", [1, 2])
def test_lists_show_messages_behind_expired_ones(cli: Cli, partitions: int) -> None:
    async def main() -> None:
        async with delayq.connect(cli.url) as client:
            jobs = client.reliable_queue("jobs", partitions=partitions)
            await jobs.offer_many(delayq.Offer("old", ttl=3600) for _ in range(120))
            with redis.Redis.from_url(cli.url, socket_timeout=60) as raw:
                for number in range(partitions):
                    expiries = ReliableKeys.of("jobs", partition=number).expiries
                    raw.hset(expiries, mapping=dict.fromkeys(raw.hkeys(expiries), 1))
            await jobs.offer_many(delayq.Offer(n) for n in range(120))

    asyncio.run(main())
    status, some = cli("peek jobs")
    assert (status, len(some)) == (0, 10)
    found: list[int] = []
    for offset in range(0, 120, 50):
        status, some = cli(f"list jobs --state ready --limit 50 --offset {offset}")
        assert status == 0
        found += [one["value"] for one in some]
    assert sorted(found) == list(range(120))
    assert cli("list jobs --state ready --offset 120") == (1, [])


def test_a_search_reads_each_dead_letter_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with delayq.connect(cli.url) as client:
            await client.reliable_queue("jobs", partitions=2).stats()

    asyncio.run(main())
    with redis.Redis.from_url(cli.url, socket_timeout=60) as raw:
        for number in range(2):
            keys = ReliableKeys.of("jobs", partition=number)
            ids = range(number, 1000, 2)
            raw.zadd(keys.dead, {f"d{n}": 1e15 + n for n in ids})
            letters = {f"d{n}": f'{{"reason":"x"}}\n1 \n{n}' for n in ids}
            raw.hset(keys.dead_messages, mapping=letters)
    read: list[str] = []
    page = ReliableStore.dead_page

    async def counted(self: Any, offset: int, limit: int) -> Any:
        found = await page(self, offset, limit)
        read.extend(letter.name.decode() for letter in found)
        return found

    monkeypatch.setattr(ReliableStore, "dead_page", counted)
    status, (*some, figures) = cli("search jobs --state dead --payload 99 --limit 100")
    assert status == 0
    assert sorted(one["value"] for one in some) == [n for n in range(1000) if "99" in str(n)]
    assert figures == {"searched": 1000, "total": 1000, "found": len(some), "next_offset": None}
    assert sorted(read) == sorted(f"d{n}" for n in range(1000))


def schedule_two(url: str) -> None:
    async def main() -> None:
        async with delayq.connect(url) as client:
            mails = client.reliable_queue("mails")
            await mails.schedule("nightly", cron="0 3 * * *", value=1, timezone="Europe/Berlin")
            await mails.schedule("often", every=90, value=2, priority=3, version=7)

    asyncio.run(main())


def test_schedules_are_listed_and_deleted(cli: Cli) -> None:
    schedule_two(cli.url)
    status, (nightly, often) = cli("schedules mails")
    assert status == 0
    assert fields(nightly, "name cron timezone") == ("nightly", "0 3 * * *", "Europe/Berlin")
    assert fields(nightly, "every last_at") == (None, None)
    assert nightly["next_at"].endswith(":00:00.000Z")
    assert fields(often, "name every priority version") == ("often", 90, 3, 7)
    for command, done in (("pause", "paused"), ("resume", "resumed")):
        assert cli(f"{command} mails --schedule nightly")[1] == [
            {"queue": "mails", "name": "nightly", done: True}
        ]
        status, (nightly, _) = cli("schedules mails")
        assert (nightly["paused"], nightly["next_at"] is None) == ((done == "paused"),) * 2
        assert cli(f"{command} mails --schedule none") == (1, [])
    assert cli("unschedule mails nightly")[1] == [
        {"queue": "mails", "name": "nightly", "unscheduled": True}
    ]
    assert cli("unschedule mails nightly") == (1, [])
    assert [one["name"] for one in cli("schedules mails")[1]] == ["often"]
    assert cli("schedules others") == (1, [])


# Inspect, doctor, bench


@pytest.mark.every_server
def test_inspect_shows_each_byte(cli: Cli, sync_raw: Any) -> None:
    record = pack(b"ABCDEFGH", b'{"a":1}', 8)
    sync_raw.zadd(CLOSING.timeout, {record: 1.9e12, record[1:]: 1.91e12, b"noise": 1.92e12})
    sync_raw.rpush(CLOSING.quarantine, b"junk")
    _, (now, old, noise) = cli("inspect closing")
    assert now == {
        "id": b"ABCDEFGH".hex(),
        "state": "delayed",
        "form": "current, 8-byte length",
        "due_at": "2030-03-17T17:46:40.000Z",
        "lease_ends_at": None,
        "value": {"a": 1},
        "error": None,
        "payload": b'{"a":1}'.hex(),
        "raw": record.hex(),
    }
    assert fields(old, "form id value") == ("old, 8-byte length", now["id"], {"a": 1})
    assert fields(noise, "form id value") == ("malformed", None, None)
    _, (junk,) = cli("inspect closing --state quarantined")
    assert junk["raw"] == b"junk".hex()
    status, shown = cli.plain("inspect closing --limit 1")
    assert status == 0
    dump = "  0000  08 41 42 43 44 45 46 47  48 07 00 00 00 00 00 00  .ABCDEFGH......."
    assert dump in shown.splitlines()


@pytest.mark.every_server
def test_a_doctor_finds_nothing_wrong(cli: Cli) -> None:
    status, found = cli("doctor")
    assert status == 0, found
    checks = {one["check"]: one for one in found}
    assert {"version", "role", "persistence", "memory", "clock", "queues", "rights"} <= set(checks)
    assert checks["version"]["level"] == "ok"
    assert all({"level", "check", "text", "advice"} == set(one) for one in found)


@pytest.mark.every_server
def test_a_doctor_finds_what_is_stuck(cli: Cli, sync_raw: Any) -> None:
    cli("offer mails 1")
    cli("offer halted 1")
    cli.plain("pause halted")
    sync_raw.zadd(CLOSING.timeout, {pack(b"ABCDEFGH", b"1", 8): 1000.0})
    status, found = cli("doctor --overdue 0")
    wrong = {one["check"]: one["advice"] for one in found if one["level"] == "wrong"}
    assert status == 1
    assert set(wrong) == {"reliable mails", "reliable halted", "delayed closing"}
    assert "delayq worker" in wrong["reliable mails"]
    assert wrong["reliable halted"] == "delayq resume halted"
    status, found = cli("doctor halted --overdue 1h")
    queues = [one["check"] for one in found if one["check"].startswith(("reliable", "delayed"))]
    assert (status, queues) == (0, ["reliable halted"])


def test_advice_can_be_copied_to_a_shell_for_any_name(cli: Cli, sync_raw: Any) -> None:
    name = "x; touch 'y' #"
    _, paused = cli.plain("pause", name)
    for advice in (paused.partition("with: ")[2], cli.check(f"reliable {name}")["advice"]):
        assert shlex.split(advice) == ["delayq", "resume", name]
    sync_raw.rpush(DelayedKeys.of(name).quarantine, b"junk")
    _, (*_, broken) = cli("doctor", f"delayed:{name}")
    assert shlex.split(broken["advice"])[:3] == ["delayq", "inspect", f"delayed:{name}"]


@pytest.mark.every_server
def test_a_doctor_finds_a_server_that_drops_messages(cli: Cli, sync_raw: Any) -> None:
    sync_raw.config_set("maxmemory", "100mb")
    sync_raw.config_set("maxmemory-policy", "allkeys-lru")
    try:
        memory = cli.check("memory")
    finally:
        sync_raw.config_set("maxmemory-policy", "noeviction")
        sync_raw.config_set("maxmemory", "0")
    assert memory["level"] == "wrong"
    assert "noeviction" in memory["advice"]


def test_a_doctor_knows_what_a_user_lacks(
    own_server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [*acl_rules("dashboard", reliable=["mails"]), "+acl|dryrun", "+acl|whoami", "+command"]
    own_server.call("ACL", "SETUSER", "dash", "on", f">{SECRET}", *rules)
    cli = Cli(own_server.url.replace("unix://", f"unix://dash:{SECRET}@"), capsys)
    assert cli.check("reliable mails", "doctor mails --role consumer")["level"] == "ok"
    rights = cli.check("rights", "doctor mails --role consumer")
    assert rights["level"] == "wrong"
    assert "'dash' cannot act as consumer: lacks +" in rights["text"]
    assert rights["advice"] == "see: delayq acl consumer mails"
    status, found = cli("doctor mails --role dashboard")
    assert status == 0
    assert SECRET not in json.dumps(found)
    # A user who may not even list keys is advised to name queues.
    assert cli.check("queues")["level"] == "note"
    # A queue that this user has no rights to.
    assert cli.check("reliable others", "doctor others")["level"] == "wrong"


@pytest.mark.parametrize(
    ("options", "partitions"),
    [("--kind reliable", 1), ("--kind delayed", None), ("--partitions 2", 2)],
)
def test_a_bench_leaves_nothing_behind(
    cli: Cli, server: PrivateServer, options: str, partitions: int | None
) -> None:
    status, (figures,) = cli(f"bench {options} --messages 300 --punctual 10")
    assert (status, figures["messages"], figures["partitions"]) == (0, 300, partitions)
    assert figures["offers_per_s"] > 0
    assert figures["deliveries_per_s"] > 0
    assert -5 < figures["late_p50_ms"] <= figures["late_p99_ms"] <= figures["late_max_ms"]
    assert server.call("KEYS", "*bench*") in (b"*0", b"")


def test_a_bench_that_takes_too_long_is_a_one(cli: Cli, server: PrivateServer) -> None:
    assert cli.plain("bench --messages 1000000 --timeout 0.3s")[0] == 1
    assert server.call("KEYS", "*bench*") in (b"*0", b"")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("stats", "missing argument 'QUEUE'"),
        ("offer a", "missing argument 'VALUE'"),
        ("stats a b", "unexpected extra argument"),
        ("stats ''", "non-empty"),
        ("stats delayed:", "non-empty"),
        ("dead list delayed:a", "a delayed queue cannot have dead letters"),
        ("configure delayed:a", "a delayed queue cannot be configured"),
        (f"configure a --limit {'9' * 5000}", "--limit is too large"),
        (f"configure a --max-size {'9' * 5000}", "--max-size is too large"),
        ("inspect reliable:a", "for delayed queues"),
        ("offer a {", "not JSON"),
        ("offer a 1 --delay soon", "--delay must be a duration"),
        ("offer a 1 --delay -1", "negative"),
        ("offer a 1 --delay nan", "--delay must be a duration"),
        ("offer a 1 --delay inf", "finite"),
        ("doctor --overdue nan", "--overdue must be a duration"),
        ("bench --timeout nan", "--timeout must be a duration"),
        ("offer a 1 --at '2030-01-01 x/y'", "timezone"),
        ("offer a 1 --at noon", "--at must be a date or a time"),
        ("offer a 1 --at 2030-01-01T00:00Z --delay 1", "not both"),
        ("offer a 1 --header x", "NAME=VALUE"),
        ("offer a 1 --on-duplicate x", "--on-duplicate"),
        ("offer a 1 --codec x", "--codec must be one of"),
        ("offer delayed:a 1 --id x", "need a reliable queue"),
        ("list a --state dead", "--state"),
        ("get delayed:a zz", "16 hexadecimal digits"),
        ("reschedule a x", "no due time given"),
        ("purge a", "--yes"),
        ("dead list a --limit 0", "--limit"),
        ("dead purge a", "--yes"),
        ("dead purge a --error x", "--yes"),
        ("dead purge a --error '' --yes", "--error must not be empty"),
        ("dead redrive a --reason ''", "--reason must not be empty"),
        ("dead redrive a x --error x", "not both"),
        ("dead redrive a x --dry-run", "pass no ids"),
        ("dead redrive a --older-than soon", "--older-than must be a duration"),
        ("dead redrive a --older-than -1", "from 0 to 100 years"),
        ("dead list a --group-by x", "--group-by"),
        ("inspect a --state x", "--state"),
        ("search a", "nothing to search for"),
        ("search a --header x", "NAME=VALUE"),
        ("search delayed:a --error x", "need a reliable queue"),
        ("schedules delayed:a", "a delayed queue cannot have schedules"),
        ("doctor --role king", "--role"),
        ("bench --kind x", "--kind"),
        ("nonsense", "nonsense"),
    ],
)
def test_what_cannot_work_is_one_line(
    cli: Cli, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    cli.assert_refused(line, words=words)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@127.0.0.1:1/0?x={SECRET}",
        f"redis://user:{SECRET}@127.0.0.1:1/0",
        f"redis://user:half@{SECRET}.invalid?x@127.0.0.1:1/0",
    ],
)
def test_no_secret_is_in_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.02)
    cli = Cli(url, capsys)
    for line in ("queues", "take a", "doctor", "offer delayed:a 1", "bench"):
        cli.assert_refused(line)
        assert SECRET not in cli.error


@pytest.fixture
def _logged() -> Iterator[None]:
    """Turn logging on again, which a completion turns off in its process."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, _logged: None
) -> Shell:
    def completed(*words: str, url: str = "") -> list[str]:
        for name, value in {
            "_DELAYQ_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(("delayq", *words)),
            "COMP_CWORD": str(len(words)),
            "DELAYQ_URL": url,
            "_DELAYQ_COMPLETE_AFTER": "",
        }.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            run([])
        out, error = capsys.readouterr()
        assert error == ""
        return out.split()

    return completed


def test_a_shell_is_told_how_to_complete(shell: Shell) -> None:
    assert shell("re") == ["result", "reschedule", "resume"]
    assert shell("list", "x", "--state", "") == ["delayed", "ready", "leased"]


def test_a_shell_completes_the_names_of_queues(
    cli: Cli, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed(cli.url)
    monkeypatch.setattr("delayq.cli.completion._PATIENCE", 60)
    assert shell("stats", "", url=cli.url) == ["delayed:closing", "mails", "orders"]
    assert shell("stats", "m", url=cli.url) == ["mails"]
    assert shell("dead", "list", "", url=cli.url) == ["mails", "orders"]
    assert shell("migrate", "", url=cli.url) == ["delayed:closing"]
    assert shell("stats", "--url", cli.url, "o") == ["orders"]
    assert shell("stats", "") == []
    # For bash, each colon is a word of its own, and only what comes after it is replaced.
    for last in ([":"], [":", "clo"]):
        assert shell("stats", "delayed", *last, url=cli.url) == ["closing"]


@pytest.mark.usefixtures("_logged")
@pytest.mark.parametrize("of", ["complete_bash", "complete_zsh", "complete_fish"])
def test_a_shell_is_given_no_name_that_it_could_carry_out(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], of: str
) -> None:
    hostile = (r"z\$(touch PWNED)", "z$(x)", "z`x`", 'z"x', "z'x", "z;x", "z x", "z\nx", "z\x1bx")
    for name in (*hostile, "z-plain"):
        assert cli.plain("offer", name, "1")[0] == 0, cli.error
    monkeypatch.setattr("delayq.cli.completion._PATIENCE", 60)
    for name, value in {
        "_DELAYQ_COMPLETE": of,
        "_TYPER_COMPLETE_ARGS": "delayq stats ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "delayq\nstats\n",
        "COMP_CWORD": "2",
        "DELAYQ_URL": cli.url,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    out, _ = capsys.readouterr()
    assert re.findall(r"\bz[^\"]*", out.strip()) == ["z-plain"]


def test_a_server_that_is_away_completes_nothing_and_says_nothing(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for url in (f"redis://127.0.0.1:{port}", "redis://127.0.0.1:1", "nonsense"):
            assert shell("stats", "", url=url) == []


def test_a_cluster_has_its_queues_on_all_masters(cluster: TestCluster, cli: Cli) -> None:
    cli.url = cluster.url
    seed(cluster.url)
    status, found = cli("queues")
    assert (status, [one["queue"] for one in found]) == (0, ["closing", "mails", "orders"])
    assert fields(found[2], "partitions delayed") == (4, 40)
    status, found = cli("doctor")
    assert status == 0, found
    assert sum(one["check"] == "version" for one in found) == 3
    served = ("ok", "ok, 16,384 of 16,384 slots served by 3 masters")
    assert fields(cli.check("cluster"), "level text") == served
    status, (figures,) = cli("bench --partitions 3 --messages 200 --punctual 5")
    assert (status, figures["partitions"]) == (0, 3)
    assert [one["queue"] for one in cli("queues")[1]] == ["closing", "mails", "orders"]
    # A URL that names a single server of the cluster is pointed out.
    cli.url = cluster.nodes[0].url
    alone = cli.check("cluster", "doctor nobody")
    assert fields(alone, "level advice") == ("wrong", "use redis+cluster://host:port")
