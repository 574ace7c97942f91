"""The commands that inspect queues and messages and change them, on every server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import shlex
import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

import delayq
from delayq._redisson.keys import DelayedKeys
from delayq._redisson.records import pack
from delayq._reliable import checkpoints
from delayq._reliable.keys import ReliableKeys
from delayq.admin.acl import acl_rules
from delayq.admin.catalog import FoundQueue
from delayq.admin.delayed import DelayedInspector
from delayq.cli.app import run
from delayq.cli.options import Target
from delayq.cli.output import CommandFailed
from delayq.cli.worker.child import find
from delayq.codecs import BytesCodec, StringCodec
from tests.support.command_line import CLOSING, MAILS, SECRET, Cli, cli, ctrl_c_at, seed
from tests.support.fields import fields
from tests.support.programs import run_python
from tests.support.reliable import lists_work
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from delayq import Client
    from tests.support.clusters import TestCluster
    from tests.support.servers import PrivateServer

    # Returns the completions of the last word, as bash asks for them.
    Shell = Callable[..., list[str]]


BOTH_KINDS = ("mails", "delayed:closing")
__all__ = ["cli"]


@pytest.fixture
def sync_raw(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url, socket_timeout=60) as raw:
        yield raw


# Queues


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    version_line = f"{metadata.version('delayq')}\n"
    assert capsys.readouterr().out == version_line
    # As a program, it does not even load the command line.
    program = "import sys; sys.argv[1:] = ['--version']; import delayq.__main__ as command"
    loaded = "assert not {'typer', 'rich', 'redis'} & sys.modules.keys()"
    result = run_python("-c", f"{program}; command.main(); {loaded}")
    assert (result.returncode, result.stdout) == (0, version_line)


# Every command that names a reliable queue, but does not make one.
ON_A_QUEUE = (
    *("stats x", "peek x", "list x", "get x y", "history x", "history x --id y", "search x --id y"),
    *("schedules x", "workers x", "result x y", "cancel x y", "reschedule x y --delay 1"),
    *("take x", "dead list x", "dead list x --group-by error", "dead redrive x"),
    *("dead purge x --yes", "groups list x", "groups limit x y 1", "groups limit x y --unset"),
    *("groups pause x y", "groups resume x y", "configure x", "configure x --max-size 1"),
    *("repartition x --to 2", "batch x", "batch x 1", "batch x 1 --cancel", "follow x y"),
    *("bury x y", "bury x --error y", "bury x --error y --dry-run"),
    *("pause x", "pause x --schedule y", "resume x", "unschedule x y", "purge x --yes"),
)


def test_a_wrong_name_makes_no_queue(cli: Cli, server: PrivateServer) -> None:
    for line in ON_A_QUEUE:
        assert cli.plain(line) == (1, ""), line
        assert cli.error.startswith("delayq: there is no reliable queue 'x': "), line
    assert server.call("KEYS", "*") in (b"*0", b"")
    cli("offer delayed:x 1 --delay 1h")
    assert cli("stats x")[0] == 1
    assert cli.error.endswith("to name the delayed queue of that name, write delayed:x\n")
    # Those who wait may come before the first message, and a doctor reports.
    assert cli.plain("take x --wait 0.01s") == (1, "")
    assert "no message is due" in cli.error
    assert cli.check("reliable y", "doctor y")["text"] == "there is no such queue"


def test_an_address_may_come_first(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("offer mails 1")
    monkeypatch.setenv("DELAYQ_URL", "redis://127.0.0.1:1")
    for words in (["queues"], ["dead", "list", "mails"], ["offer", "mails", "2"]):
        assert run(["--url", cli.url, *words]) == int("dead" in words)
    assert run(["--url", "redis://127.0.0.1:1", "groups", "--url", cli.url, "list", "mails"]) == 1
    # The one after the command is the last word.
    assert run(["--url", "redis://127.0.0.1:1", "stats", "mails", "--url", cli.url]) == 0


def test_queues_are_found_with_their_counts(cli: Cli, server: PrivateServer) -> None:
    for foreign in ("delayq:{x}", "delayq:part:{1:01:x}:waiting", "delayq:{}:waiting", "dela"):
        server.call("SET", foreign, "1")
    assert cli("queues") == (1, [])
    assert cli.plain("queues") == (1, "no queues\n")
    seed(cli.url)
    status, rows = cli("queues")
    figures = [fields(row, "kind queue delayed ready") for row in rows]
    assert (status, figures) == (
        0,
        [("delayed", "closing", 2, 0), ("reliable", "mails", 3, 1), ("reliable", "orders", 40, 0)],
    )
    closing, mails, orders = rows
    assert closing["next_due_at"].endswith("Z")
    assert closing["quarantined"] == 0
    assert fields(mails, "partitions leased dead paused") == (1, 1, 1, False)
    assert mails["oldest_due_age"] >= 0
    assert orders["partitions"] == 4


def test_a_queue_with_foreign_keys_hides_no_other(
    cli: Cli, server: PrivateServer, sync_raw: Any
) -> None:
    cli("offer good 1")
    server.call("SET", ReliableKeys.of("bad").dead, "x")
    status, (bad, good) = cli("queues")
    assert (status, good["queue"], good["ready"]) == (0, "good", 1)
    assert bad["queue"] == "bad"
    assert "a value of the wrong type" in bad["error"]
    _, line, _ = cli.plain("queues")[1].splitlines()
    assert line.split()[:8] == ["reliable", "bad", "-", "-", "-", "-", "unreadable:", "one"]
    # A purge of it drops nothing.
    cli("offer delayed:closing 1 --delay 1h")
    server.call("SET", CLOSING.ready, "x")
    cli.assert_refused("purge delayed:closing --yes")
    assert server.call("ZCARD", CLOSING.timeout) == b":1"
    # Nor does a damaged letter hide another one.
    letter = '{"reason":"rejected","attempt":1,"priority":0,"error":""}\n1 \n5'
    sync_raw.zadd(MAILS.dead, {"fine": 1, "damaged": 2})
    sync_raw.hset(MAILS.dead_messages, mapping={"fine": letter, "damaged": "garbage"})
    for more in ("", " --long", " --json"):
        status, shown = cli.plain(f"dead list mails{more}")
        assert (status, "fine" in shown, "damaged" in shown) == (0, True, True)


def test_stats_and_lists_of_both_kinds(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the ready message would be late by the end.
    monkeypatch.setattr("delayq.cli.queues._LATE", 3600)
    seed(cli.url)
    for queue, names, figures in (
        ("mails", "delayed ready leased dead", (3, 1, 1, 1)),
        ("delayed:closing", "kind delayed", ("delayed", 2)),
        ("reliable:orders", "delayed", (40,)),
    ):
        assert fields(cli(f"stats {queue}")[1][0], names) == figures
    # Lists are of one state, and have pages.
    _, (busy,) = cli("list mails --state leased")
    assert fields(busy, "id state due_at") == ("busy", "leased", None)
    assert busy["lease_ends_at"].endswith("Z")
    _, some = cli("list mails --state delayed --limit 2 --offset 1")
    assert [one["id"] for one in some] == ["welcome-2", "welcome-1"]
    assert len(cli("list orders --limit 7")[1]) == 7
    # Where nothing is listed, it says where the messages are.
    hint = "no ready messages; 40 are delayed: --state delayed\n"
    assert cli.plain("list orders --state ready") == (1, hint)
    assert "--offset is 9, and 3 are delayed" in cli.plain("list mails --offset 9")[1]
    assert [line.split()[-1] for line in cli.plain("queues")[1].splitlines()[2:]] == [
        "letters",
        "waiting",
    ]


def test_reading_a_queue_moves_nothing(cli: Cli, sync_raw: Any) -> None:
    sync_raw.zadd(CLOSING.timeout, {pack(b"ABCDEFGH", b'"due"', 8): 1000.0})
    name = b"ABCDEFGH".hex()
    for command in ("stats {}", "peek {}", "list {}", "inspect {}", f"get {{}} {name}"):
        status, rows = cli(command.format("delayed:closing"))
        assert (status, len(rows)) == (0, 1)
    cli("queues")
    cli("doctor")
    assert sync_raw.zcard(CLOSING.timeout) == 1
    assert sync_raw.llen(CLOSING.ready) == 0


def test_settings_are_taken_from_an_application(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "declaring.py").write_text(
        "import delayq\n"
        "worker = delayq.Worker()\n"
        "worker.listener('mails', limit=delayq.Limit(2, 100), max_size=100)(print)\n"
        "tasks = delayq.Tasks('reports', keep=60, partitions=2)\n"
        "worker.include(tasks)\n"
        f"client = delayq.Worker(delayq.connect('{cli.url}'))\n"
        "client.listener('bills', max_size=5)(print)\n"
        f"address = delayq.Worker('{cli.url}')\n"
        "address.listener('bills', max_size=6)(print)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # A worker's own server is changed, and no other.
    monkeypatch.setenv("DELAYQ_URL", "redis://127.0.0.1:1")
    for name, size in ("client", 5), ("address", 6):
        cli.assert_refused(f"configure --from declaring:{name}", words="names its server itself")
        assert run(["configure", "--from", f"declaring:{name}"]) == 0
        assert cli("configure bills")[1][0]["max_size"] == size
    cli("configure mails --limit 4 --create")
    for dry in (" --dry-run", ""):
        status, changes = cli(f"configure --from declaring:worker{dry}")
        assert (status, {each["changed"] for each in changes}) == (0, {not dry})
        assert [
            (each["queue"], each["setting"], each["server"], each["code"]) for each in changes
        ] == [
            ("mails", "max_size", None, "100"),
            ("mails", "limit", "4", "2,100/1s"),
            ("reports", "partitions", None, "2"),
            ("reports", "keep", None, "60"),
        ]
    assert cli.plain("configure --from declaring:worker")[1].startswith("the server has what")
    assert cli.error == f"delayq: the server is {cli.url}\n"
    cli("configure reports --partitions 3 --keep 90")
    cli("offer reports 1")
    # Everything else is changed all the same.
    assert cli.plain("configure reports --from declaring:worker")[0] == 1
    assert "delayq repartition reports --to 2" in cli.error
    (settings,) = cli("configure reports")[1]
    assert (settings["partitions"], settings["keep"]) == (3, 60.0)
    for wrong in ("", "--from declaring:worker --max-size 5", "other --from declaring:worker"):
        assert cli.plain(f"configure {wrong}")[0] == 2, wrong


def test_settings_are_changed_and_shown(cli: Cli) -> None:
    for options in ("", " --max-size 2"):
        assert cli.plain(f"configure mails{options}") == (1, "")
        assert "no reliable queue 'mails': to give a new queue" in cli.error
    assert "max size: none" in " ".join(
        cli.plain("configure mails --partitions 1 --create")[1].split()
    )
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
    for options, names, figures in (
        ("max-size none --expired dead", "max_size expired dedup_window", (None, "dead", 3600.0)),
        ("dedup-window none", "dedup_window", (0.0,)),
        ("keep-dead 30d --max-dead 1000", "keep_dead max_dead", (30 * 86400.0, 1000)),
        ("keep 7d --max-kept 5", "keep max_kept", (7 * 86400.0, 5)),
        ("limit 50,100/s", "group_limit", (None,)),
        ("group-limit ordered", "expired", ("dead",)),
    ):
        assert cli(f"configure mails --{options}")[0] == 0
        assert fields(cli("stats mails")[1][0], names) == figures, options
    shown = " ".join(cli.plain("stats mails")[1].split())
    for words in ("max dead: 1,000", "max kept: 5", "50 at a time, 100 in 1.0 s", "in order"):
        assert words in shown
    none = "keep-dead none --max-dead none --keep none --limit none --group-limit 1"
    _, (changed,) = cli(f"configure mails --{none}")
    assert fields(changed, "keep_dead max_dead keep limit") == (None, None, 0.0, None)
    assert changed["group_limit"]["concurrency"] == 1
    for option in (
        *("keep soon", "max-kept 0", "keep-dead 0", "max-dead 0", "max-size 0", "max-size few"),
        *("expired keep", "dedup-window -1", "limit few", "limit ordered", "group-limit 0"),
    ):
        cli.assert_refused(f"configure mails --{option}")


def test_batches_are_listed_shown_and_cancelled(cli: Cli) -> None:
    assert cli("configure mails --create")[0] == 0
    assert cli("batch mails") == (1, [])
    with delayq.sync.connect(cli.url) as client:
        jobs = client.reliable_queue("mails")
        ids = [jobs.offer_batch([delayq.Offer(number)] * 3).id for number in range(2)]
    status, listed = cli("batch mails")
    assert (status, [row["batch"] for row in listed]) == (0, ids[::-1])
    assert fields(listed[0], "total waiting state") == (3, 3, "in progress")
    assert cli.plain("batch mails --limit 1")[1].endswith("there are more: use --limit\n")
    (cancelled,) = cli(f"batch mails {ids[0]} --cancel --running")[1]
    assert fields(cancelled, "waiting cancelled state") == (0, 3, "ended")
    first_line, _, shown = cli.plain(f"batch mails {ids[1]} --cancel")[1].partition("\n")
    assert (first_line, shown.split()[1]) == ("3 messages were cancelled", ids[1])
    assert cli.plain("batch mails 5")[0] == 1
    assert "there is no batch '5'" in cli.error
    cli.assert_refused("batch mails --cancel", words="pass the BATCH to cancel")
    cli.assert_refused(f"batch mails {ids[0]} --running", words="--running belongs to --cancel")


def test_a_message_is_followed_to_its_end(cli: Cli) -> None:
    with delayq.sync.connect(cli.url) as client:
        client.reliable_queue("videos", keep=3600).offer("film", id="v")

        async def handle(client: delayq.Client) -> None:
            (message,) = await client.reliable_queue("videos").claim()
            await message.progress(3, total=10, text="rendering")

        client.run(handle)
        assert "progress:   3/10 rendering" in cli.plain("get videos v")[1]
        assert cli("get videos v")[1][0]["progress"]["done"] == 3
        status, (event,) = cli("follow videos v --timeout 0.2")
        assert (status, event["state"], event["text"]) == (1, "leased", "rendering")
        assert "was not finished within 0.2 s" in cli.error
        client.reliable_queue("videos").cancel("v", running=True)
    assert cli("follow videos v")[0] == 1
    status, shown = cli.plain("follow videos nobody")
    assert status == 1
    assert "nobody is unknown: there is no such message, or it has ended, and the" in shown


@pytest.mark.every_server
def test_groups_are_listed_limited_and_paused(cli: Cli) -> None:
    assert cli("configure mails --create")[0] == 0
    assert cli("configure mails --max-size 99")[0] == 0
    assert cli("groups list mails") == (1, [])
    with delayq.sync.connect(cli.url) as client:
        client.reliable_queue("mails").offer_many(
            [delayq.Offer(number, group=name) for name in ("ada", "bob") for number in range(3)]
        )
    status, (ada, bob) = cli("groups list mails")
    assert (status, ada["group"], bob["group"]) == (0, "ada", "bob")
    assert fields(ada, "waiting ready running limit paused") == (3, 3, 0, None, False)
    assert ada["next_at"].endswith("Z")
    assert cli("groups list mails --after ada")[1] == [bob]
    assert "continue with --after 'ada'" in cli.plain("groups list mails --limit 1")[1]
    assert cli("configure mails --group-limit 7")[0] == 0
    lifted = "warning: nothing limits ada now, whatever the group limit of the queue is"
    for limit, concurrency, explanation, warning in (
        ("1,10/m", 1, "1 at a time, 10 in 1 min: its own, instead of", ""),
        ("none", None, "none: its own, instead of the queue's group limit, 7 at a time", lifted),
        ("--unset", 7, "7 at a time: the group limit of the queue", ""),
        ("1", 1, "1 at a time: its own", ""),
    ):
        assert explanation in cli.plain(f"groups limit mails ada {limit}")[1]
        assert cli.error.startswith(f"delayq: {warning}") if warning else not cli.error
        status, (limited,) = cli(f"groups limit mails ada {limit}")
        assert (status, limited["queue"], limited["group"]) == (0, "mails", "ada")
        assert (limited["limit"] or {}).get("concurrency") == concurrency
        assert limited["has_own_limit"] == (limit != "--unset")
    for words in ("", "1 --unset"):
        cli.assert_refused(f"groups limit mails ada {words}", words="or --unset")
    assert cli("groups pause mails ada")[1] == [{"queue": "mails", "group": "ada", "paused": True}]
    assert [row["paused"] for row in cli("groups list mails")[1]] == [True, False]
    assert [cli.plain("groups resume mails ada")[0] for _ in range(2)] == [0, 1]
    assert cli("offer mails 7 --group eve --id m7")[0] == 0
    assert cli("get mails m7")[1][0]["group"] == "eve"
    # A group says what becomes of its messages, whatever their priority.
    assert cli("configure mails --group-limit 7 --max-size none")[0] == 0
    assert cli("offer mails 8 --group eve --priority 3")[0] == 0
    assert cli("offer mails 9 --group eve --delay 1h")[0] == 0
    with delayq.sync.connect(cli.url) as client:
        assert client.run(claim_five) == {"ada", "bob", "eve"}
        states = [fields(row, "group ready running state") for row in cli("groups list mails")[1]]
        assert states == [
            ("ada", 2, 1, "at its limit"),
            ("bob", 1, 2, "due"),
            ("eve", 0, 2, "ok"),
        ]
        assert cli("groups pause mails bob")[0] == 0
        explanation = (
            "group 'ada', with 2 ready, is at its limit of 1 at a time; group 'bob', with 1 ready,"
            " is paused"
        )
        assert explanation in cli.check("reliable mails", "doctor mails --overdue 0")["text"]
        assert cli("configure mails --limit 5")[0] == 0
        at_limit = cli.check("reliable mails", "doctor mails --overdue 0")
        assert "at its limit of 5 at a time" in at_limit["text"]
        assert at_limit["advice"] == "to raise it: delayq configure mails --limit N"


async def claim_five(client: delayq.Client) -> set[str | None]:
    return {message.group for message in await client.reliable_queue("mails").claim(5)}


def test_queues_are_purged(cli: Cli) -> None:
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
        for number in range(300):
            await orders.offer(number, 3600)

    offering = asyncio.create_task(offer())
    dropped = 0
    while not offering.done():
        dropped += await DelayedInspector.of(client, "closing").purge()
    assert dropped + await DelayedInspector.of(client, "closing").purge("delayed") == 301


# Messages


def test_an_offer_is_listed_looked_at_moved_taken(cli: Cli) -> None:
    options = "--delay 1h30m --id a --header k=v=w --priority 3 --ttl 2d"
    status, (offered,) = cli(f"offer mails '{{\"to\": 1}}' {options}")
    assert (status, offered["queue"], offered["id"]) == (0, "mails", "a")
    _, (row,) = cli("list mails")
    assert [row] == cli("get mails a")[1] == cli("peek mails")[1]
    seen = ("delayed", {"to": 1}, {"k": "v=w"}, 3, offered["due_at"])
    assert fields(row, "state value headers priority due_at") == seen
    assert cli("take mails") == (1, [])
    assert cli("reschedule mails a --delay 0")[1][0]["id"] == "a"
    status, (taken,) = cli("take mails")
    assert (status, *fields(taken, "id value attempt")) == (0, "a", {"to": 1}, 1)
    assert cli("get mails a") == (1, [])


def test_what_a_handler_has_saved_is_shown(cli: Cli, sync_raw: Any) -> None:
    cli("offer mails 1 --id a")
    assert "checkpoint" not in cli("get mails a")[1][0]
    saved = checkpoints.Saved(3, b'{"row":7}', {"charge": b'"paid"'}, {"": (1795346643813468,)})
    sync_raw.hset(MAILS.named("checkpoints"), "a", checkpoints.pack(saved))
    assert cli("get mails a")[1][0]["checkpoint"] == {
        "state": {"value": {"row": 7}},
        "steps": {"charge": {"value": "paid"}},
        "sleep_ends_at": "2026-11-22T11:24:03.813Z",
    }
    _, shown = cli.plain("get mails a")
    assert re.search(r'saved: +{"row": 7}\nstep charge: +"paid"\nsleep ends: +2026', shown)
    sync_raw.hset(MAILS.named("checkpoints"), "a", "damaged")
    assert "the checkpoint has no head" in cli.plain("get mails a")[1]


def test_lists_and_counts_of_a_delayed_queue_are_shown(cli: Cli) -> None:
    began = datetime.now(UTC)
    _, (offered,) = cli("offer delayed:closing hello --text --at 2030-01-31T12:00+01:00")
    # Only the distance from now counts, from when the server gets it.
    off_by = datetime.fromisoformat(offered["due_at"]) - datetime(2030, 1, 31, 11, tzinfo=UTC)
    assert abs(off_by) <= datetime.now(UTC) - began
    name = offered["id"]
    _, (row,) = cli("list delayed:closing")
    assert fields(row, "id due_at value") == (name, offered["due_at"], "hello")
    assert cli(f"get delayed:closing {name}")[1] == [row]
    assert cli("take delayed:closing") == (1, [])
    assert cli(f"reschedule delayed:closing {name} --delay 0.01")[0] == 0
    taken = cli("take delayed:closing --wait 1m")
    assert taken == (0, [{"queue": "closing", "value": "hello"}])
    for queue in BOTH_KINDS:
        _, (offered,) = cli(f"offer {queue} 1 --delay 1h")
        status, (document,) = cli(f"cancel {queue} {offered['id']}")
        assert (status, *fields(document, "id cancelled")) == (0, offered["id"], True)
        assert cli(f"cancel {queue} {offered['id']}") == (1, [])
        assert cli(f"list {queue}") == (1, [])
    assert cli.plain("pause mails")[0] == 0
    paused, paused_for = fields(cli("stats mails")[1][0], "paused paused_for")
    assert (paused, paused_for > 0) == (True, True)
    for command in ("queues", "stats mails", "doctor"):
        assert re.search(r"(yes,|paused) for [0-9.]+ s", cli.plain(command)[1])
    assert [cli.plain("resume mails")[0] for _ in range(2)] == [0, 1]


def test_an_offer_may_have_an_id_and_limits_of_its_own(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("offer mails 1 --id a --max-attempts 1 --timeout 5 --unique-for 1h")[0] == 0
    assert cli("offer mails 1 --id a")[0] == 1
    refusal = "delayq: the id 'a' is taken, and the message was not stored: see --on-duplicate\n"
    assert cli.error == refusal
    assert cli("offer mails 2 --id a --on-duplicate replace")[0] == 0
    assert cli("get mails a")[1][0]["value"] == 2
    assert cli("cancel mails a")[0] == 0
    assert cli("offer mails 1 --id a")[0] == 1
    # From standard input.
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"big": true}\n')))
    assert cli("offer mails -")[0] == 0
    assert cli("peek mails")[1][0]["value"] == {"big": True}


def test_the_result_of_a_message_is_shown(cli: Cli) -> None:
    def has_none(words: str, of: str = "a") -> None:
        assert cli(f"result mails {of}") == (1, [])
        assert words in cli.error

    cli("offer mails 5 --id a")
    has_none("keeps none; give it keep=")
    assert cli("configure mails --keep 1h")[0] == 0
    has_none("never offered", "b")
    has_none("was not finished within 0 s")
    assert cli("take mails")[0] == 0
    status, (document,) = cli("result mails a --timeout 1m")
    assert (status, *fields(document, "queue id value")) == (0, "mails", "a", None)
    cli("offer mails 5 --id b")
    with delayq.sync.connect(cli.url) as client:
        client.run(handle_with_a_result)
    assert cli("result mails b")[1][0]["value"] == {"pages": 12}
    assert cli.plain("result mails b") == (0, '{"pages": 12}\n')
    assert cli("get mails b") == (1, [])
    assert "for its result: delayq result mails b" in cli.error


async def handle_with_a_result(client: delayq.Client) -> None:
    (message,) = await client.reliable_queue("mails").claim(wait=20)
    await message.ack({"pages": 12})


def test_payloads_of_every_codec_are_shown(cli: Cli) -> None:
    for codec, value, shown in (
        ("string", "hello", "hello"),
        ("bytes", "hello", "68656c6c6f"),
        ("long", "42", 42),
        ("integer", "42", 42),
        ("typed-json", '{"a": 1}', {"a": 1}),
        ("json-jackson", '{"a": [1]}', {"a": [1]}),
        ("kryo5", '"text"', "text"),
    ):
        for queue in (codec, f"delayed:{codec}"):
            assert cli(f"offer {queue} --codec {codec} --delay 60", value)[0] == 0
            assert cli(f"list {queue} --codec {codec}")[1][0]["value"] == shown, queue


def test_a_payload_that_cannot_be_decoded_is_shown_as_bytes(
    cli: Cli, server: PrivateServer
) -> None:
    with delayq.sync.connect(cli.url) as client:
        client.delayed_queue("closing", codec=BytesCodec()).offer(b"\xff\x00", 60)
        client.reliable_queue("mails", codec=BytesCodec()).offer(b"\xff\x00")
        client.delayed_queue("due", codec=StringCodec()).offer("no json")
    for queue in BOTH_KINDS:
        _, (row,) = cli(f"peek {queue}")
        assert fields(row, "value hex") == (None, "ff00")
        assert "JsonCodec" in row["error"]
    for queue, payload in (("mails", b"\xff\x00"), ("delayed:due", b"no json")):
        status, (taken,) = cli(f"take {queue} --wait 60")
        assert (status, taken["hex"]) == (0, payload.hex())
    assert server.call("LLEN", DelayedKeys.of("due").quarantine) == b":0"


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


def bury_some(url: str, partitions: int) -> None:
    """Bury 150 messages one after the other: each tenth for want of money, others for an error."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            queue = client.reliable_queue("mails", partitions=partitions, max_attempts=1)
            await queue.offer_many(delayq.Offer(n, id=f"m{n:03}") for n in range(150))
            while messages := await queue.claim(100):
                for message in messages:
                    if message.value % 10 == 0:
                        await message.bury("No money")
                    else:
                        await message.nack(error=ValueError(f"user {message.value % 3}"))

    asyncio.run(main())


@pytest.mark.parametrize("partitions", [1, 3])
def test_dead_letters_are_grouped_and_chosen_by_cause_and_age(cli: Cli, partitions: int) -> None:
    def act(*cases: tuple[str, int, dict[str, Any]]) -> None:
        for command, status, counts in cases:
            assert cli(f"dead {command}") == (status, [{"queue": "mails"} | counts])

    bury(cli.url, 152)  # in 2023
    status, rows = cli("dead list mails --limit 2 --offset 1")
    assert (status, [one["id"] for one in rows]) == (0, ["dead-000001", "dead-000002"])
    letter = ("attempts", 3, "ValueError: no", "dead-000001")
    assert fields(rows[0], "reason attempt error value") == letter
    assert "ValueError: no" in cli.plain("dead list mails --limit 1")[1]
    bury_some(cli.url, partitions)
    act(
        ("redrive mails dead-000003 nobody", 0, {"redriven": 1}),
        ("purge mails dead-000004 --yes", 0, {"purged": 1}),
        ("purge mails --older-than 1d --dry-run", 0, {"matched": 150, "dry_run": True}),
        ("redrive mails --older-than 365d", 0, {"redriven": 150}),
    )
    _, rows = cli("dead list mails --group-by reason")
    assert [fields(one, "reason count") for one in rows] == [("attempts", 135), ("No money", 15)]
    assert rows[0]["first_at"] <= rows[0]["last_at"]
    _, rows = cli("dead list mails --group-by error --reason ATTEMPTS")
    assert sum(one["count"] for one in rows) == 135
    assert {one["error"] for one in rows} == {f"ValueError: user {n}" for n in range(3)}
    _, rows = cli("dead list mails --group-by type --limit 1 --offset 1")
    assert [fields(one, "type count") for one in rows] == [("No money", 15)]
    _, rows = cli("dead list mails --error 'user 2' --limit 3 --offset 2")
    numbers = [n for n in range(150) if n % 10 and n % 3 == 2]
    if partitions == 1:
        assert [one["value"] for one in rows] == numbers[2:5]
    assert {one["error"] for one in rows} == {"ValueError: user 2"}
    assert "1 to 3 of more" in cli.plain("dead list mails --error 'user 2' --limit 3")[1]
    matched = {"matched": len(numbers), "dry_run": True}
    act(
        ("redrive mails --error 'USER 2' --dry-run", 0, matched),
        ("purge mails --error 'USER 2' --dry-run", 0, matched),
        ("redrive mails --error 'user 2'", 0, {"redriven": len(numbers)}),
        ("purge mails --error 'user 2' --yes", 1, {"purged": 0}),
        ("purge mails --reason money --yes", 0, {"purged": 15}),
        ("purge mails --older-than 0 --yes", 0, {"purged": 150 - 15 - len(numbers)}),
        ("purge mails --yes", 1, {"purged": 0}),
    )
    assert cli("stats mails")[1][0]["ready"] == 151 + len(numbers)


def fail_some(url: str) -> None:
    """Let 250 messages wait for another attempt, each tenth of them for another error."""

    async def main() -> None:
        async with delayq.connect(url) as client:
            queue = client.reliable_queue("mails", partitions=2)
            await queue.offer_many(delayq.Offer(n, id=f"m{n:03}") for n in range(250))
            while messages := await queue.claim(100):
                for message in messages:
                    error = "OSError: full" if message.value % 10 == 0 else "KeyError: 'to'"
                    await message.nack(3600, error=error)

    asyncio.run(main())


def test_failed_messages_are_buried_by_id_or_by_their_error(cli: Cli) -> None:
    fail_some(cli.url)
    for command, status, counts in (
        ("m001 m001 nobody", 0, {"matched": 2, "buried": 1}),
        ("nobody", 1, {"matched": 1, "buried": 0}),
        ("--error keyerror --dry-run", 0, {"matched": 224, "buried": 0, "dry_run": True}),
        ("--error keyerror --reason never", 0, {"matched": 224, "buried": 224}),
        ("--error keyerror", 1, {"matched": 0, "buried": 0}),
    ):
        assert cli(f"bury mails {command}") == (status, [{"queue": "mails"} | counts])
    assert cli("dead redrive mails --reason never")[1] == [{"queue": "mails", "redriven": 224}]
    assert cli.plain("bury mails m000 nobody")[1] == (
        "buried: 1; not there, or with a worker: 1; bring them back with:"
        " delayq dead redrive mails --reason 'buried by an operator'\n"
    )
    # The command names what is stored: the end, in UTF-8.
    told = cli.plain("bury", "mails", "--error", "full", "--reason", "x" * 9000 + "\udcff")[1]
    assert told.endswith(f" --reason '{'x' * 7999}?'\n")
    redrive = shlex.split(told.partition("delayq ")[2])
    assert cli.plain(*redrive) == (0, "redriven: 24\n")


# Search, schedules


def test_messages_are_found_by_what_they_contain(cli: Cli) -> None:
    seed(cli.url)
    assert cli("offer mails 1 --id grouped --group tenant-9")[0] == 0
    welcome = [f"welcome-{place}" for place in range(4)]
    for criteria, names in (
        ("mails --payload ADA@example", welcome),
        ("mails --id come-2", ["welcome-2"]),
        ("mails --header tenant=ac --payload subject", welcome),
        ("mails --header tenant=other", []),
        ("mails --header nothing=", []),
        ("mails --error REJECT", ["bad"]),
        ("mails --id b --state dead", ["bad"]),
        ("mails --id b --state leased", ["busy"]),
        ("mails --group NANT-9", ["grouped"]),
    ):
        status, (*rows, figures) = cli(f"search {criteria}")
        assert sorted(one["id"] for one in rows) == names, criteria
        assert (status, figures["found"]) == (0 if names else 1, len(names))
        assert figures["next_offset"] is None
    assert len(cli("search delayed:closing --payload lovelace")[1]) == 3
    assert cli.plain("search mails --id welcome-2")[1].splitlines()[-1] == (
        "1 found; 7 of 7 messages were searched"
    )


def found_page_by_page(cli: Cli, line: str, scan: int) -> tuple[list[int], int]:
    """Return the sorted values that a search finds, and the number of its pages."""
    values: list[int] = []
    offset: int | None = 0
    pages = 0
    while offset is not None:
        _, (*rows, figures) = cli(f"search {line} --offset {offset}")
        values += [one["value"] for one in rows]
        assert figures["searched"] <= scan
        offset, pages = figures["next_offset"], pages + 1
    return sorted(values), pages


def test_a_search_has_bounds_and_pages(cli: Cli) -> None:
    seed(cli.url)
    with_a_one = [number for number in range(40) if "1" in str(number)]
    assert found_page_by_page(cli, "orders --payload 1 --scan 15", 15) == (with_a_one, 3)
    _, shown = cli.plain("search orders --payload 1 --limit 1 --state delayed")
    assert "1 found; " in shown
    assert " of 40 messages were searched; continue with --offset " in shown


def test_schedules_are_listed_and_deleted(cli: Cli) -> None:
    with delayq.sync.connect(cli.url) as client:
        mails = client.reliable_queue("mails")
        mails.schedule("nightly", cron="0 3 * * *", value=1, timezone="Europe/Berlin")
        mails.schedule("often", every=90, value=2, priority=3, version=7)
    status, (nightly, often) = cli("schedules mails")
    assert status == 0
    cron = ("nightly", "0 3 * * *", "Europe/Berlin", None, None)
    assert fields(nightly, "name cron timezone every last_at") == cron
    assert nightly["next_at"].endswith(":00:00.000Z")
    assert fields(often, "name every priority version") == ("often", 90, 3, 7)
    named = {"queue": "mails", "name": "nightly"}
    for command, done in (("pause", "paused"), ("resume", "resumed")):
        assert cli(f"{command} mails --schedule nightly")[1] == [named | {done: True}]
        status, (nightly, _) = cli("schedules mails")
        assert (nightly["paused"], nightly["next_at"] is None) == ((done == "paused"),) * 2
        assert cli(f"{command} mails --schedule none") == (1, [])
    assert cli("unschedule mails nightly")[1] == [named | {"unscheduled": True}]
    assert cli("unschedule mails nightly") == (1, [])
    assert [one["name"] for one in cli("schedules mails")[1]] == ["often"]
    cli("offer others 1")
    assert cli("schedules others") == (1, [])
    assert [fields(one, "queue name") for one in cli("schedules")[1]] == [("mails", "often")]
    assert cli.plain("schedules")[1].split()[0] == "queue"


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
def test_a_doctor_finds_what_is_stuck_and_nothing_else(cli: Cli, sync_raw: Any) -> None:
    status, found = cli("doctor")
    assert status == 0, found
    levels = {one["check"]: one["level"] for one in found}
    checks = {"version", "role", "persistence", "memory", "clock", "queues", "rights"}
    assert checks <= levels.keys()
    assert levels["version"] == "ok"
    cli("offer mails 1")
    # Nothing is late yet, but no process is there.
    assert fields(cli.check("reliable mails"), "level advice") == (
        "note",
        "start a worker: delayq worker MODULE:ATTRIBUTE",
    )
    cli("offer halted 1")
    cli.plain("pause halted")
    sync_raw.zadd(CLOSING.timeout, {pack(b"ABCDEFGH", b"1", 8): 1000.0})
    status, found = cli("doctor --overdue 0")
    wrong = {one["check"]: one["advice"] for one in found if one["level"] == "wrong"}
    assert (status, set(wrong)) == (1, {"reliable mails", "reliable halted", "delayed closing"})
    assert "delayq worker" in wrong["reliable mails"]
    assert wrong["reliable halted"] == "delayq resume halted"
    status, found = cli("doctor halted --overdue 1h")
    queues = [one["check"] for one in found if one["check"].startswith(("reliable", "delayed"))]
    assert (status, queues) == (0, ["reliable halted"])


def test_advice_can_be_copied_to_a_shell_for_any_name(cli: Cli, sync_raw: Any) -> None:
    name = "x; touch 'y' #"
    assert cli.plain("offer", name, "1")[0] == 0
    _, paused = cli.plain("pause", name)
    for advice in (paused.partition("with: ")[2], cli.check(f"reliable {name}")["advice"]):
        assert shlex.split(advice) == ["delayq", "resume", name]
    sync_raw.rpush(DelayedKeys.of(name).quarantine, b"junk")
    _, (*_, broken) = cli("doctor", f"delayed:{name}")
    assert shlex.split(broken["advice"])[:3] == ["delayq", "inspect", f"delayed:{name}"]


def test_a_doctor_knows_what_a_user_lacks(
    own_server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = [*acl_rules("dashboard", reliable=["mails"]), "+acl|dryrun", "+acl|whoami", "+command"]
    own_server.call("ACL", "SETUSER", "dash", "on", f">{SECRET}", *rules)
    cli = Cli(own_server.url.replace("unix://", f"unix://dash:{SECRET}@"), capsys)
    assert cli.check("reliable mails", "doctor mails --role consumer")["level"] == "note"
    rights = cli.check("rights", "doctor mails --role consumer")
    assert rights["level"] == "wrong"
    assert "'dash' cannot act as consumer: lacks +" in rights["text"]
    assert rights["advice"] == "see: delayq acl consumer mails"
    status, checks = cli("doctor mails --role dashboard")
    assert status == 0
    assert SECRET not in json.dumps(checks)
    unchecked = cli.check("server", "doctor mails")["text"]
    assert unchecked.startswith("version, role, persistence and memory are not checked: ")
    assert "info" in unchecked
    # A user who may not even list keys is advised to name queues.
    assert cli.check("queues")["level"] == "note"
    # A queue that this user has no rights to.
    assert cli.check("reliable others", "doctor others")["level"] == "wrong"


def test_the_bench_command_leaves_nothing_on_the_server(cli: Cli, server: PrivateServer) -> None:
    for options, partitions in (
        ("--kind reliable", 1),
        ("--kind delayed", None),
        ("--partitions 2", 2),
    ):
        status, (figures,) = cli(f"bench {options} --messages 300 --punctual 10")
        assert (status, figures["messages"], figures["partitions"]) == (0, 300, partitions)
        assert figures["offers_per_s"] > 0 < figures["deliveries_per_s"]
        assert -5 < figures["late_p50_ms"] <= figures["late_p99_ms"] <= figures["late_max_ms"]
    # One that takes too long.
    assert cli.plain("bench --messages 1000000 --timeout 0.3s")[0] == 1
    # One that is interrupted.
    status, shown = cli.at_terminal("bench --messages 1000000", act=ctrl_c_at("offers"))
    assert (status, "Traceback" in shown) == (130, False)
    assert server.call("KEYS", "*bench*") in (b"*0", b"")


REFUSED = (
    ("stats", "missing argument 'QUEUE'. (see delayq stats --help)"),
    ("offer a", "missing argument 'VALUE'"),
    ("dead list delayed:a", "a delayed queue cannot have dead letters"),
    (f"configure a --limit {'9' * 5000}", "--limit is too large"),
    ("inspect reliable:a", "for delayed queues"),
    ("offer a {", "not JSON"),
    ("offer a 1 --delay -1", "negative"),
    ("offer a 1 --at 2030-01-01T00:00Z --delay 1", "not both"),
    ("offer a 1 --header x", "NAME=VALUE"),
    ("offer delayed:a 1 --id x", "need a reliable queue"),
    ("get delayed:a zz", "16 hexadecimal digits"),
    ("reschedule a x", "no due time given"),
    ("bury a", "nothing to bury"),
    ("bury a --error ''", "nothing to bury"),
    ("bury a x --error y", "pass no ids"),
    ("bury a x --reason ''", "--reason must not be empty"),
    ("purge a", "--yes"),
    ("dead purge a", "--yes"),
    ("dead purge a --error x", "--yes"),
    ("dead purge a --error '' --yes", "--error must not be empty"),
    ("dead redrive a x --error x", "not both"),
    ("dead redrive a --older-than -1", "from 0 to 100 years"),
    ("search a", "nothing to search for"),
    ("pause delayed:closing", "a delayed queue cannot be paused"),
    ("groups limit a ada few", "LIMIT"),
)


def test_a_command_that_cannot_work_prints_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for line, words in REFUSED:
        cli.assert_refused(line, words=words)


def test_no_secret_is_in_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    # A wrong password.
    cli.url = cli.url.replace("unix://", f"unix://user:{SECRET}@")
    for line in ("queues", "doctor --json"):
        cli.assert_refused(line, words="invalid username-password pair")
        assert SECRET not in cli.error
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.02)
    for url in (
        f"redis://user:{SECRET}@127.0.0.1:1/0?x={SECRET}",
        f"redis://user:{SECRET}@127.0.0.1:1/0",
        f"redis://user:half@{SECRET}.invalid?x@127.0.0.1:1/0",
    ):
        cli.url = url
        for line in ("queues", "take a", "doctor", "offer delayed:a 1", "bench"):
            cli.assert_refused(line)
            assert SECRET not in cli.error
    status, shown = cli.screen("queues")
    assert (status, SECRET in shown) == (2, False)


@pytest.fixture
def _logged() -> Iterator[None]:
    """Turn logging on again, which a completion turns off in its process."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, _logged: None
) -> Shell:
    monkeypatch.setattr("delayq.cli._typer._TIMEOUT", 60)

    def completed(*words: str, url: str = "", of: str = "bash") -> list[str]:
        for name, value in {
            "_DELAYQ_COMPLETE": f"complete_{of}",
            "COMP_WORDS": "\n".join(("delayq", *words)),
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": " ".join(("delayq", *words)),
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
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


def test_a_shell_completes_commands_states_and_the_names_of_queues(cli: Cli, shell: Shell) -> None:
    assert shell("re") == ["result", "reschedule", "repartition", "resume", "relay"]
    assert shell("list", "x", "--state", "") == ["delayed", "ready", "leased"]
    seed(cli.url)
    for words, names in (
        (("stats", ""), ["delayed:closing", "mails", "orders"]),
        (("stats", "m"), ["mails"]),
        (("dead", "list", ""), ["mails", "orders"]),
        (("migrate", ""), ["delayed:closing"]),
        # For bash, each colon is a word of its own, and only what comes after it is replaced.
        (("stats", "delayed", ":"), ["closing"]),
        (("stats", "delayed", ":", "clo"), ["closing"]),
    ):
        assert shell(*words, url=cli.url) == names
    assert shell("stats", "--url", cli.url, "o") == ["orders"]
    assert shell("stats", "") == []


def test_a_shell_is_given_no_name_that_it_could_carry_out(cli: Cli, shell: Shell) -> None:
    hostile = (r"z\$(touch PWNED)", "z$(x)", "z`x`", 'z"x', "z'x", "z;x", "z x", "z\nx", "z\x1bx")
    for name in (*hostile, "z-plain"):
        assert cli.plain("offer", name, "1")[0] == 0, cli.error
    for of in ("bash", "zsh", "fish"):
        shown = " ".join(shell("stats", "", url=cli.url, of=of))
        assert re.findall(r"\bz[^\"]*", shown) == ["z-plain"], of


def test_completion_is_empty_and_silent_while_the_server_is_away(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.cli._typer._TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for url in (f"redis://127.0.0.1:{port}", "redis://127.0.0.1:1", "nonsense"):
            assert shell("stats", "", url=url) == []


def test_a_cluster_has_its_queues_on_all_masters(cluster: TestCluster, cli: Cli) -> None:
    cli.url = cluster.url
    seed(cluster.url)
    status, rows = cli("queues")
    assert (status, [one["queue"] for one in rows]) == (0, ["closing", "mails", "orders"])
    assert fields(rows[2], "partitions delayed") == (4, 40)
    status, rows = cli("doctor")
    assert (status, sum(one["check"] == "version" for one in rows)) == (0, 3), rows
    served = ("ok", "ok, 16,384 of 16,384 slots served by 3 masters")
    assert fields(cli.check("cluster"), "level text") == served
    assert cli("bench --partitions 3 --messages 200 --punctual 5")[0] == 0
    assert len(cli("queues")[1]) == 3
    # A URL that names a single server of the cluster is pointed out.
    cli.url = cluster.nodes[0].url
    alone = cli.check("cluster", "doctor nobody")
    assert fields(alone, "level advice") == ("wrong", "use redis+cluster://host:port")


# As new users meet it


def test_a_command_needs_a_server_and_a_port(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cli.assert_refused(f"dashboard --port {port}", words=f"cannot listen on 127.0.0.1:{port}")
    cli.url = ""
    cli.assert_refused("offer jobs 1", words="--url or set $DELAYQ_URL")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needy.py").write_text(
        "import delayq\none = delayq.Worker()\nother = delayq.Worker(None, concurrency=3)\n"
    )
    for where in ("needy:one", "needy:other"):
        with pytest.raises(CommandFailed, match=r"no server given: set \$DELAYQ_URL"):
            find(where)


def test_the_argument_of_each_queue_names_it() -> None:
    for name in ("mails", "delayed:mails", "reliable:x", "-x", "a b", "x:y"):
        for queue in (FoundQueue("reliable", name), FoundQueue("delayed", name)):
            (argument,) = shlex.split(queue.argument)
            assert not argument.startswith("-")
            parsed = Target.parse(argument)
            assert (parsed.kind, parsed.name) == (queue.kind, name)
        parsed = Target.parse_delayed(argument)
        assert (parsed.kind, parsed.name) == ("delayed", name)


# History and workers


COUNTS = ("offered", "handled", "failed", "dead", "expired")


async def work(url: str) -> None:
    """Offer five messages, handle four, and let one fail once."""
    async with delayq.connect(url) as client:
        queue = client.reliable_queue("jobs", backoff=delayq.Backoff.fixed(60), keep=60)
        await queue.offer_many([delayq.Offer(i, id=f"job-{i}") for i in range(5)])
        first, *others = await queue.claim(5)
        for message in others:
            async with message:
                pass
        await first.nack(error="no such customer")


@pytest.mark.usefixtures("_last_reports_arrive")
def test_history_has_lines_bars_and_attempts(cli: Cli) -> None:
    assert cli.plain("configure jobs --max-size 99 --create")[0] == 0
    assert cli.plain("history jobs --hours 5") == (1, "nothing happened in the last 5 h 0 min\n")
    asyncio.run(work(cli.url))
    status, lines = cli("history jobs --minutes 10")
    assert (status, len(lines)) == (0, 10)
    assert [sum(line[name] for line in lines) for name in COUNTS] == [5, 4, 1, 0, 0]
    assert {line["seconds"] for line in lines} == {60}
    (busy, *_) = [line for line in lines if line["handled"]]
    assert 0 < busy["handling_p50"] <= busy["handling_p99"]
    assert 0 < busy["lateness_p50"] <= busy["lateness_p99"]
    status, shown = cli.plain("history jobs --hours 48")
    assert status == 0
    rows = shown.splitlines()
    assert [row.split(":")[0] for row in rows[:3]] == ["offered", "handled", "failed"]
    assert "█" in rows[0]
    assert rows[3].split()[:6] == ["from", *COUNTS]
    assert len(rows) == 4 + 12
    # Of single messages.
    status, (facts,) = cli("history jobs --id job-0")
    assert (status, facts["id"], facts["state"]) == (0, "job-0", "delayed")
    assert [attempt["error"] for attempt in facts["attempts"]] == ["no such customer"]
    status, shown = cli.plain("history jobs --id job-1")
    assert (status, "done" in shown) == (0, True)
    assert cli.plain("history jobs --id none") == (1, "nothing is known about message 'none'\n")


@contextmanager
def handling(url: str, id: str) -> Iterator[None]:  # noqa: A002
    """Have a client in another thread handle a message during the block."""
    listed, over = threading.Event(), threading.Event()

    async def handle() -> None:
        async with delayq.connect(url, resync_interval=0.05) as client:
            queue = client.reliable_queue("jobs")
            await queue.offer("a payload", id=id)
            (message,) = await queue.claim()
            async with message:
                await until(partial(lists_work, client, "jobs"))
                listed.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(handle(),))
    thread.start()
    try:
        assert listed.wait(60)
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures("_last_reports_arrive", "_workers_stay_listed")
def test_workers_are_listed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with handling(cli.url, "long"):
        for line in ("workers", "workers jobs"):
            status, (worker,) = cli(line)
            assert (status, worker["queue"], worker["pid"]) == (0, "jobs", os.getpid())
            assert [each["id"] for each in worker["messages"]] == ["long"]
        status, shown = cli.plain("workers")
        assert status == 0
        assert socket.gethostname() in shown
        assert "long" in shown
        assert "a payload" not in shown
        assert "silent" not in shown
        assert worker["silent_for"] is None
        monkeypatch.setattr("delayq.stats._SILENT_AFTER", 0)
        assert "silent for 0." in cli.plain("workers")[1]
        assert cli("workers")[1][0]["silent_for"] > 0
    assert cli.plain("workers") == (1, "no workers\n")
