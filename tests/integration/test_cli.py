"""The commands that inspect queues and messages and change them, on every server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import redis

import delayq
from delayq._delayed.keys import DelayedKeys
from delayq._delayed.records import pack
from delayq._reliable.keys import ReliableKeys
from delayq.admin import inspect as inspection
from delayq.cli.app import run
from delayq.codecs import BytesCodec, StringCodec
from tests.conftest import FOUND
from tests.support.clusters import TestCluster
from tests.support.terminal import ROOT

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer

MAILS = ReliableKeys.of("mails")
SECRET = "geheim"


class Cli:
    """Runs the command line in this process, against one server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        self.error = ""

    def __call__(self, *arguments: str) -> tuple[int, list[Any]]:
        """Run a command with ``--json``.

        Returns its exit status and the JSON documents that it printed, one per line.
        """
        status, out = self.plain(*arguments, "--json")
        return status, [json.loads(line) for line in out.splitlines()]

    def plain(self, *arguments: str) -> tuple[int, str]:
        self._capsys.readouterr()
        status = run([*arguments, "--url", self.url])
        captured = self._capsys.readouterr()
        self.error = captured.err
        return status, captured.out


@pytest.fixture
def cli(
    server: PrivateServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    # With this variable set, lines would be wrapped as at a terminal of that width.
    monkeypatch.delenv("COLUMNS", raising=False)
    return Cli(server.url, capsys)


def seed(url: str) -> None:
    """Fill two whole queues and a partitioned one; between them, messages are in every state."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            mails = client.reliable_queue("mails")
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
    status, found = cli("queues")
    assert status == 0
    assert [(one["kind"], one["queue"], one.get("partitions")) for one in found] == [
        ("delayed", "closing", None),
        ("reliable", "mails", 1),
        ("reliable", "orders", 4),
    ]
    closing, mails, orders = found
    assert (closing["delayed"], closing["ready"], closing["leased"], closing["quarantined"]) == (
        2,
        0,
        0,
        0,
    )
    assert closing["next_due_at"].endswith("Z")
    assert (mails["delayed"], mails["ready"], mails["leased"], mails["dead"], mails["paused"]) == (
        3,
        1,
        1,
        1,
        False,
    )
    assert (orders["delayed"], orders["ready"]) == (40, 0)


def test_no_queue_at_all_is_a_one(cli: Cli) -> None:
    assert cli("queues") == (1, [])
    assert cli.plain("queues") == (1, "no queues\n")


def test_foreign_keys_are_no_queues(cli: Cli, server: PrivateServer) -> None:
    for key in (
        "delayq:{x}",
        "redisson_delay_queue_timeout:",
        "dela",
        "delayq:part:{1:01:x}:live",
        "delayq:{}:live",
    ):
        server.call("SET", key, "1")
    assert cli("queues") == (1, [])


def test_a_queue_whose_keys_hold_something_else_hides_no_other(
    cli: Cli, server: PrivateServer
) -> None:
    cli("offer", "1", "--queue", "good")
    server.call("SET", ReliableKeys.of("bad").dead, "x")
    status, (bad, good) = cli("queues")
    assert (status, good["queue"], good["ready"]) == (0, "good", 1)
    assert bad["queue"] == "bad"
    assert "a value of the wrong type" in bad["error"]
    assert cli.plain("queues")[1].splitlines()[1].split() == [
        "reliable",
        "bad",
        "-",
        "-",
        "-",
        "-",
        "see",
        "doctor",
    ]


def test_stats_of_both_kinds(cli: Cli) -> None:
    seed(cli.url)
    _, (mails,) = cli("stats", "--queue", "mails")
    assert {key: mails[key] for key in ("delayed", "ready", "leased", "dead")} == {
        "delayed": 3,
        "ready": 1,
        "leased": 1,
        "dead": 1,
    }
    _, (closing,) = cli("stats", "--delayed", "closing")
    assert (closing["kind"], closing["delayed"]) == ("delayed", 2)
    _, (orders,) = cli("stats", "--queue", "orders")
    assert orders["delayed"] == 40
    _, (nobody,) = cli("stats", "--queue", "nobody")
    assert nobody["ready"] == 0


def test_looking_moves_nothing(cli: Cli, server: PrivateServer) -> None:
    keys = DelayedKeys.of("closing")
    with redis.Redis.from_url(server.url) as raw:
        raw.zadd(keys.timeout, {pack(b"ABCDEFGH", b'"due"', 8): 1000.0})
        for command in (["stats"], ["peek"], ["list"], ["inspect"], ["get", b"ABCDEFGH".hex()]):
            status, found = cli(*command, "--delayed", "closing")
            assert (status, len(found)) == (0, 1)
        cli("queues")
        cli("doctor")
        assert raw.zcard(keys.timeout) == 1
        assert raw.llen(keys.ready) == 0


def test_pause_and_resume(cli: Cli) -> None:
    assert cli.plain("pause", "--queue", "mails")[0] == 0
    assert cli("stats", "--queue", "mails")[1][0]["paused"] is True
    assert cli.plain("resume", "--queue", "mails")[0] == 0
    assert cli.plain("resume", "--queue", "mails")[0] == 1
    assert cli.plain("pause", "--delayed", "closing") == (2, "")
    assert cli.error.count("\n") == 1


def test_configure(cli: Cli) -> None:
    for options in ((), ("--max-size", "2")):
        assert cli.plain("configure", "mails", *options) == (2, "")
        assert "no reliable queue 'mails'; to give a new queue" in cli.error
    assert cli("stats", "--queue", "mails")[1][0]["max_size"] is None
    assert cli.plain("configure", "mails", "--partitions", "1", "--create")[1].split() == (
        ["partitions:", "1", "max", "size:", "none", "expired:", "drop", "dedup", "window:", "none"]
    )
    status, (settings,) = cli("configure", "mails", "--max-size", "2", "--dedup-window", "1h")
    assert (status, settings) == (
        0,
        {
            "queue": "mails",
            "partitions": 1,
            "max_size": 2,
            "expired": "drop",
            "dedup_window": 3600.0,
        },
    )
    for n in range(3):
        assert cli("offer", str(n), "--queue", "mails")[0] == (2 if n == 2 else 0)
    assert "full" in cli.error
    assert cli("configure", "mails", "--max-size", "none", "--expired", "dead")[0] == 0
    assert cli("offer", "2", "--queue", "mails")[0] == 0
    _, (stats,) = cli("stats", "--queue", "mails")
    assert (stats["max_size"], stats["expired"], stats["dedup_window"]) == (None, "dead", 3600.0)
    shown = cli.plain("stats", "--queue", "mails")[1]
    shown_lines = [line.split() for line in shown.splitlines()]
    assert ["expired:", "dead"] in shown_lines
    assert ["partitions:", "1"] in shown_lines
    assert cli("configure", "mails", "--dedup-window", "none")[1][0]["dedup_window"] == 0.0
    for wrong in (
        ("--max-size", "0"),
        ("--max-size", "few"),
        ("--expired", "keep"),
        ("--dedup-window", "-1"),
        ("--dedup-window", "soon"),
    ):
        assert cli.plain("configure", "mails", *wrong) == (2, "")
        assert cli.error.count("\n") == 1


def test_purge(cli: Cli) -> None:
    seed(cli.url)
    assert cli("purge", "--queue", "mails", "--state", "delayed", "--yes") == (
        0,
        [{"queue": "mails", "state": "delayed", "dropped": 3}],
    )
    assert cli("purge", "--queue", "mails", "--yes")[1][0]["dropped"] == 2
    assert cli("purge", "--queue", "orders", "--yes")[1][0]["dropped"] == 40
    assert cli("purge", "--delayed", "closing", "--yes")[1][0]["dropped"] == 2
    assert [one["queue"] for one in cli("queues")[1]] == ["mails"]  # only its dead letter is left


async def test_a_purge_counts_what_is_offered_meanwhile(client: delayq.Client) -> None:
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


def test_a_purge_of_a_key_that_is_something_else_drops_nothing(
    cli: Cli, server: PrivateServer
) -> None:
    seed(cli.url)
    server.call("SET", DelayedKeys.of("closing").ready, "x")
    assert cli.plain("purge", "--delayed", "closing", "--yes") == (2, "")
    assert cli("stats", "--queue", "mails")[0] == 0
    assert server.call("ZCARD", DelayedKeys.of("closing").timeout) == b":2"


# Messages


def test_an_offer_is_listed_looked_at_moved_taken(cli: Cli) -> None:
    options = [
        "--delay",
        "1h30m",
        "--id",
        "a",
        "--header",
        "k=v=w",
        "--priority",
        "3",
        "--ttl",
        "2d",
    ]
    status, (offered,) = cli("offer", '{"to": 1}', "--queue", "mails", *options)
    assert (status, offered["queue"], offered["id"]) == (0, "mails", "a")
    status, (found,) = cli("list", "--queue", "mails")
    assert (
        found == cli("get", "a", "--queue", "mails")[1][0] == cli("peek", "--queue", "mails")[1][0]
    )
    assert (found["state"], found["value"], found["headers"], found["priority"]) == (
        "delayed",
        {"to": 1},
        {"k": "v=w"},
        3,
    )
    assert found["due_at"] == offered["due_at"]
    assert cli("take", "--queue", "mails") == (1, [])
    status, (moved,) = cli("reschedule", "a", "--queue", "mails", "--delay", "0")
    assert (status, moved["id"]) == (0, "a")
    status, (taken,) = cli("take", "--queue", "mails")
    assert (status, taken["id"], taken["value"], taken["attempt"]) == (0, "a", {"to": 1}, 1)
    assert cli("get", "a", "--queue", "mails") == (1, [])


def test_the_same_of_a_delayed_queue(cli: Cli) -> None:
    _, (offered,) = cli(
        "offer", "hello", "--text", "--delayed", "closing", "--at", "2030-01-31T12:00+01:00"
    )
    assert offered["due_at"].startswith("2030-01-31T11:00:00") or offered["due_at"].startswith(
        "2030-01-31T10:59:59"
    )
    name = offered["id"]
    _, (found,) = cli("list", "--delayed", "closing")
    assert (found["id"], found["due_at"], found["value"]) == (name, offered["due_at"], "hello")
    assert cli("get", name, "--delayed", "closing")[1] == [found]
    assert cli("take", "--delayed", "closing") == (1, [])
    assert cli("reschedule", name, "--delayed", "closing", "--delay", "0.01")[0] == 0
    assert cli("take", "--delayed", "closing", "--wait", "5s") == (
        0,
        [{"queue": "closing", "value": "hello"}],
    )
    assert cli("cancel", name, "--delayed", "closing") == (1, [])


@pytest.mark.parametrize(
    "queue",
    [("--queue", "mails"), ("--delayed", "closing")],
)
def test_cancel(cli: Cli, queue: tuple[str, ...]) -> None:
    _, (offered,) = cli("offer", "1", *queue, "--delay", "1h")
    assert cli("cancel", offered["id"], *queue)[0] == 0
    assert cli("cancel", offered["id"], *queue)[0] == 1
    assert cli("list", *queue) == (1, [])


def test_an_id_that_is_taken_is_a_one(cli: Cli) -> None:
    for _ in range(2):
        status, _ = cli("offer", "1", "--queue", "mails", "--id", "a")
    assert status == 1
    assert (
        cli.error
        == "delayq: the id 'a' is taken, and the message was not stored: see --on-duplicate\n"
    )
    assert cli("offer", "2", "--queue", "mails", "--id", "a", "--on-duplicate", "replace")[0] == 0
    assert cli("get", "a", "--queue", "mails")[1][0]["value"] == 2


def test_a_value_from_standard_input(server: PrivateServer) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "delayq",
            "offer",
            "-",
            "--queue",
            "mails",
            "--url",
            server.url,
            "--json",
        ],
        input='{"big": true}\n',
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert json.loads(result.stdout)["queue"] == "mails"


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
    for queue in (("--queue", "mails"), ("--delayed", "closing")):
        assert cli("offer", value, *queue, "--codec", codec, "--delay", "60")[0] == 0
        assert cli("list", *queue, "--codec", codec)[1][0]["value"] == shown


def test_what_cannot_be_decoded_is_shown_as_bytes_and_stays(cli: Cli) -> None:
    async def offer() -> None:
        async with delayq.connect(cli.url) as client:
            await client.delayed_queue("closing", codec=BytesCodec()).offer(b"\xff\x00", 60)
            await client.reliable_queue("mails", codec=BytesCodec()).offer(b"\xff\x00")

    asyncio.run(offer())
    for queue in (("--delayed", "closing"), ("--queue", "mails")):
        _, (found,) = cli("peek", *queue)
        assert (found["value"], found["hex"]) == (None, "ff00")
        assert "JsonCodec" in found["error"]
    status, (taken,) = cli("take", "--queue", "mails")
    assert (status, taken["hex"]) == (0, "ff00")


def test_a_ready_message_is_taken_without_a_loss_though_nobody_can_decode_it(
    cli: Cli, server: PrivateServer
) -> None:
    async def offer() -> None:
        async with delayq.connect(cli.url) as client:
            await client.delayed_queue("closing", codec=StringCodec()).offer("no json")

    asyncio.run(offer())
    status, (taken,) = cli("take", "--delayed", "closing", "--wait", "5")
    assert (status, taken["hex"]) == (0, b"no json".hex())
    assert server.call("LLEN", DelayedKeys.of("closing").quarantine) == b":0"


def test_leased_ones_are_listed_with_the_end_of_the_lease(cli: Cli) -> None:
    seed(cli.url)
    _, (busy,) = cli("list", "--queue", "mails", "--state", "leased")
    assert (busy["id"], busy["state"], busy["due_at"]) == ("busy", "leased", None)
    assert busy["lease_ends_at"].endswith("Z")
    assert (
        len(
            cli("list", "--queue", "mails", "--state", "delayed", "--limit", "2", "--offset", "1")[
                1
            ]
        )
        <= 2
    )
    assert len(cli("list", "--queue", "orders", "--limit", "7")[1]) == 7


# Dead letters


def bury(url: str, count: int) -> None:
    with redis.Redis.from_url(url) as raw:
        for first in range(0, count, 5000):
            ids = [f"dead-{number:06}" for number in range(first, min(count, first + 5000))]
            why = (
                '{"reason":"attempts","attempt":3,"priority":0,"error":"Traceback\\n '
                ' here\\nValueError: no"}'
            )
            raw.zadd(MAILS.dead, {name: 1.7e15 + first + place for place, name in enumerate(ids)})
            raw.hset(
                MAILS.dead_messages,
                mapping={name: f'{why}\n1700000000000000 \n"{name}"' for name in ids},
            )


def test_dead_letters_are_listed_redriven_and_purged(cli: Cli) -> None:
    bury(cli.url, 250)
    status, found = cli("dead", "list", "--queue", "mails", "--limit", "2", "--offset", "1")
    assert (status, [one["id"] for one in found]) == (0, ["dead-000001", "dead-000002"])
    first = found[0]
    assert (first["reason"], first["attempt"], first["error"], first["value"]) == (
        "attempts",
        3,
        "ValueError: no",
        first["id"],
    )
    assert cli("dead", "redrive", "dead-000003", "nobody", "--queue", "mails") == (
        0,
        [{"queue": "mails", "redriven": 1}],
    )
    assert cli("dead", "purge", "dead-000004", "--queue", "mails", "--yes") == (
        0,
        [{"queue": "mails", "purged": 1}],
    )
    assert cli("dead", "redrive", "--queue", "mails") == (0, [{"queue": "mails", "redriven": 248}])
    assert cli("stats", "--queue", "mails")[1][0]["ready"] == 249
    assert cli("dead", "purge", "--queue", "mails", "--yes") == (
        1,
        [{"queue": "mails", "purged": 0}],
    )
    assert cli("dead", "list", "--queue", "mails") == (1, [])


async def test_progress_is_told_of_purges_and_of_all_partitions(client: delayq.Client) -> None:
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


# Inspect, doctor, bench


@pytest.mark.every_server
def test_inspect_shows_each_byte(cli: Cli, server: PrivateServer) -> None:
    keys = DelayedKeys.of("closing")
    record = pack(b"ABCDEFGH", b'{"a":1}', 8)
    with redis.Redis.from_url(server.url) as raw:
        raw.zadd(keys.timeout, {record: 1.9e12, record[1:]: 1.91e12, b"noise": 1.92e12})
        raw.rpush(keys.quarantine, b"junk")
    _, (now, old, noise) = cli("inspect", "--delayed", "closing")
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
    assert (old["form"], old["id"], old["value"]) == ("old, 8-byte length", now["id"], {"a": 1})
    assert (noise["form"], noise["id"], noise["value"]) == ("malformed", None, None)
    _, (junk,) = cli("inspect", "--delayed", "closing", "--state", "quarantined")
    assert junk["raw"] == b"junk".hex()
    status, shown = cli.plain("inspect", "--delayed", "closing", "--limit", "1")
    assert status == 0
    assert (
        "  0000  08 41 42 43 44 45 46 47  48 07 00 00 00 00 00 00  .ABCDEFGH......."
        in shown.splitlines()
    )


@pytest.mark.every_server
def test_a_doctor_finds_nothing_wrong(cli: Cli) -> None:
    status, found = cli("doctor")
    assert status == 0, found
    checks = {one["check"]: one for one in found}
    assert {"version", "role", "persistence", "memory", "clock", "queues", "rights"} <= set(checks)
    assert checks["version"]["level"] == "ok"
    assert all({"level", "check", "text", "advice"} == set(one) for one in found)


@pytest.mark.every_server
def test_a_doctor_finds_what_is_stuck(cli: Cli, server: PrivateServer) -> None:
    cli("offer", "1", "--queue", "mails")
    cli("offer", "1", "--queue", "halted")
    cli.plain("pause", "--queue", "halted")
    with redis.Redis.from_url(server.url) as raw:
        raw.zadd(DelayedKeys.of("closing").timeout, {pack(b"ABCDEFGH", b"1", 8): 1000.0})
    status, found = cli("doctor", "--overdue", "0")
    wrong = {one["check"]: one for one in found if one["level"] == "wrong"}
    assert status == 1
    assert set(wrong) == {"reliable mails", "reliable halted", "delayed closing"}
    assert "delayq worker" in wrong["reliable mails"]["advice"]
    assert wrong["reliable halted"]["advice"] == "delayq resume --queue halted"
    status, found = cli("doctor", "--queue", "halted", "--overdue", "1h")
    assert status == 0
    assert [one["check"] for one in found if one["check"].startswith(("reliable", "delayed"))] == [
        "reliable halted"
    ]


def test_advice_can_be_copied_to_a_shell_whatever_a_queue_is_called(
    cli: Cli, server: PrivateServer
) -> None:
    name = "x; touch 'y' #"
    _, paused = cli.plain("pause", "--queue", name)
    _, found = cli("doctor")
    (halted,) = [one for one in found if one["check"] == f"reliable {name}"]
    for advice in (paused.partition("with: ")[2], halted["advice"]):
        assert shlex.split(advice) == ["delayq", "resume", "--queue", name]
    with redis.Redis.from_url(server.url) as raw:
        raw.rpush(DelayedKeys.of(name).quarantine, b"junk")
    _, (*_, broken) = cli("doctor", "--delayed", name)
    assert shlex.split(broken["advice"])[:4] == ["delayq", "inspect", "--delayed", name]


@pytest.mark.every_server
def test_a_doctor_finds_a_server_that_drops_messages(cli: Cli, server: PrivateServer) -> None:
    with redis.Redis.from_url(server.url) as raw:
        raw.config_set("maxmemory", "100mb")
        raw.config_set("maxmemory-policy", "allkeys-lru")
        try:
            status, found = cli("doctor")
        finally:
            raw.config_set("maxmemory-policy", "noeviction")
            raw.config_set("maxmemory", "0")
    assert status == 1
    (memory,) = [one for one in found if one["check"] == "memory"]
    assert memory["level"] == "wrong"
    assert "noeviction" in memory["advice"]


def test_a_doctor_knows_what_a_user_lacks(
    own_server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = delayq_acl("dashboard")
    own_server.call(
        "ACL",
        "SETUSER",
        "dash",
        "on",
        f">{SECRET}",
        *rules,
        "+acl|dryrun",
        "+acl|whoami",
        "+command",
    )
    try:
        url = own_server.url.replace("unix://", f"unix://dash:{SECRET}@")
        cli = Cli(url, capsys)
        status, found = cli("doctor", "--queue", "mails", "--role", "consumer")
        assert status == 1
        (rights,) = [one for one in found if one["check"] == "rights"]
        assert rights["level"] == "wrong"
        assert "'dash' cannot act as consumer: lacks +" in rights["text"]
        assert rights["advice"] == "see: delayq acl consumer --queue mails"
        assert next(one for one in found if one["check"] == "reliable mails")["level"] == "ok"
        status, found = cli("doctor", "--queue", "mails", "--role", "dashboard")
        assert status == 0
        assert SECRET not in json.dumps(found)
        # A user who may not even list keys is advised to name queues.
        status, found = cli("doctor")
        assert next(one for one in found if one["check"] == "queues")["level"] == "note"
        # A queue that this user has no rights to.
        status, found = cli("doctor", "--queue", "others")
        assert status == 1
        assert next(one for one in found if one["check"] == "reliable others")["level"] == "wrong"
    finally:
        own_server.call("ACL", "DELUSER", "dash")


def delayq_acl(role: Any) -> list[str]:
    from delayq.admin.acl import acl_rules

    return acl_rules(role, reliable=["mails"])


@pytest.mark.parametrize(
    ("kind", "partitions"),
    [(("--kind", "reliable"), 1), (("--kind", "delayed"), None), (("--partitions", "2"), 2)],
)
def test_a_bench_leaves_nothing_behind(
    cli: Cli, server: PrivateServer, kind: tuple[str, ...], partitions: int | None
) -> None:
    status, (figures,) = cli("bench", *kind, "--messages", "300", "--punctual", "10")
    assert (status, figures["partitions"]) == (0, partitions)
    assert figures["offers_per_s"] > 0
    assert figures["deliveries_per_s"] > 0
    assert -5 < figures["late_p50_ms"] <= figures["late_p99_ms"] <= figures["late_max_ms"]
    assert server.call("KEYS", "*bench*") in (b"*0", b"")


def test_a_bench_that_takes_too_long_is_a_one(cli: Cli, server: PrivateServer) -> None:
    assert cli.plain("bench", "--messages", "1000000", "--timeout", "0.3s")[0] == 1
    assert server.call("KEYS", "*bench*") in (b"*0", b"")


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stats",), "no queue given"),
        (("stats", "--queue", "a", "--delayed", "b"), "no queue given"),
        (("stats", "--queue", ""), "non-empty"),
        (("offer", "{", "--queue", "a"), "not JSON"),
        (("offer", "1", "--queue", "a", "--delay", "soon"), "--delay must be a duration"),
        (("offer", "1", "--queue", "a", "--delay", "-1"), "negative"),
        (("offer", "1", "--queue", "a", "--delay", "nan"), "finite"),
        (("offer", "1", "--queue", "a", "--at", "2030-01-01T00:00"), "timezone"),
        (("offer", "1", "--queue", "a", "--at", "noon"), "--at must be a time"),
        (("offer", "1", "--queue", "a", "--at", "2030-01-01T00:00Z", "--delay", "1"), "not both"),
        (("offer", "1", "--queue", "a", "--header", "x"), "NAME=VALUE"),
        (("offer", "1", "--queue", "a", "--on-duplicate", "x"), "--on-duplicate"),
        (("offer", "1", "--queue", "a", "--codec", "x"), "--codec must be one of"),
        (("offer", "1", "--delayed", "a", "--id", "x"), "need a reliable queue"),
        (("list", "--queue", "a", "--state", "dead"), "--state"),
        (("get", "zz", "--delayed", "a"), "16 hexadecimal digits"),
        (("reschedule", "x", "--queue", "a"), "no due time given"),
        (("purge", "--queue", "a"), "--yes"),
        (("dead", "list", "--queue", "a", "--limit", "0"), "--limit"),
        (("dead", "purge", "--queue", "a"), "--yes"),
        (("inspect", "--delayed", "a", "--state", "x"), "--state"),
        (("doctor", "--role", "king"), "--role"),
        (("bench", "--kind", "x"), "--kind"),
        (("nonsense",), "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_work_is_one_line(
    own_server: PrivateServer,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    cli = Cli(own_server.url, capsys)
    assert cli.plain(*arguments) == (2, "")
    assert cli.error.startswith("delayq: ")
    assert words.lower() in cli.error.lower()
    assert cli.error.count("\n") == 1


def test_no_secret_is_in_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.05)
    for command in (
        ["queues"],
        ["take", "--queue", "a"],
        ["doctor"],
        ["offer", "1", "--delayed", "a"],
        ["bench"],
    ):
        cli = Cli(f"redis://user:{SECRET}@127.0.0.1:1/0?x={SECRET}", capsys)
        assert cli.plain(*command) == (2, "")
        cli.url = f"redis://user:{SECRET}@127.0.0.1:1/0"
        assert cli.plain(*command) == (2, "")
        assert SECRET not in cli.error
        assert cli.error.count("\n") == 1


def test_half_of_a_password_is_not_taken_for_a_host_and_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.05)
    cli = Cli("redis://user:half@geheim.invalid?x@127.0.0.1:1/0", capsys)
    assert cli.plain("queues") == (2, "")
    assert SECRET not in cli.error
    assert cli.error.count("\n") == 1


def test_a_shell_is_told_how_to_complete() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "delayq"],
        env=os.environ
        | {"_DELAYQ_COMPLETE": "complete_bash", "COMP_WORDS": "delayq re", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.stdout.split() == ["reschedule", "resume"]


# A cluster


def test_a_cluster_has_its_queues_on_all_masters(capsys: pytest.CaptureFixture[str]) -> None:
    if not FOUND:
        pytest.skip("no server found on this machine")
    with TestCluster(next(iter(FOUND.values()))) as cluster:
        cli = Cli(cluster.url, capsys)
        seed(cluster.url)
        status, found = cli("queues")
        assert (status, [one["queue"] for one in found]) == (0, ["closing", "mails", "orders"])
        assert (found[2]["partitions"], found[2]["delayed"]) == (4, 40)
        status, found = cli("doctor")
        assert status == 0, found
        assert sum(one["check"] == "version" for one in found) == 3
        (state,) = [one for one in found if one["check"] == "cluster"]
        assert (state["level"], state["text"]) == (
            "ok",
            "ok, 16,384 of 16,384 slots served by 3 masters",
        )
        status, (figures,) = cli(
            "bench", "--partitions", "3", "--messages", "200", "--punctual", "5"
        )
        assert (status, figures["partitions"]) == (0, 3)
        assert [one["queue"] for one in cli("queues")[1]] == ["closing", "mails", "orders"]
        # A URL that names a single server of the cluster is pointed out.
        cli.url = cluster.nodes[0].url
        status, found = cli("doctor", "--queue", "nobody")
        assert status == 1
        (state,) = [one for one in found if one["check"] == "cluster"]
        assert (state["level"], state["advice"]) == ("wrong", "use redis+cluster://host:port")
