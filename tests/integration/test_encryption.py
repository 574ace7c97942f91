"""Encrypted queues: what the server, the command line and the dashboard see of them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy

import delayq
from delayq import Offer
from delayq.codecs import EncryptedCodec, codec_for
from delayq.outbox import Outbox
from delayq.testing import advance
from delayq.testing import tasks as testing
from tests.support.board import (
    TOKEN,
    _templates_are_compiled_once,
    browse,
    form,
    log_in,
    page,
    send,
    texts,
)
from tests.support.command_line import Cli, cli
from tests.support.reliable import claim_one

if TYPE_CHECKING:
    from pathlib import Path

    from delayq import Client

__all__ = ["_templates_are_compiled_once", "cli"]

KEYS = {"2027": bytes(range(32))}
KEYS_TEXT = f"2027={base64.b64encode(KEYS['2027']).decode()}"
SECRET = "geheim"
VALUE = {"card": SECRET}
LIST = "queue?kind=reliable&name=cards&state=ready"


async def dump(raw: Any) -> bytes:
    """Return all that the server stores."""
    parts = []
    async for key in raw.scan_iter():
        kind = await raw.type(key)
        if kind == b"hash":
            parts += [field + value for field, value in (await raw.hgetall(key)).items()]
        elif kind == b"zset":
            parts += [member for member, _ in await raw.zrange(key, 0, -1, withscores=True)]
        elif kind == b"list":
            parts += await raw.lrange(key, 0, -1)
        elif kind == b"string":
            parts.append(await raw.get(key))
    return b"".join(parts)


async def test_the_server_sees_no_values_results_and_states(client: Client, raw: Any) -> None:
    cards = client.reliable_queue("cards", codec=EncryptedCodec(KEYS), keep=60)
    await cards.offer_many(
        [Offer(VALUE, id="a", headers={"tenant": "7"}).then(Offer(VALUE, id="b"))]
    )
    message = await claim_one(cards)
    await message.save([SECRET])
    assert await message.step("charge", lambda: SECRET) == SECRET
    stored = await dump(raw)
    await message.ack(SECRET)
    await (await claim_one(cards)).bury("no")
    await cards.schedule("nightly", every=60, value=VALUE)
    batch = await cards.offer_batch([Offer(VALUE)], then=Offer(VALUE))
    stored += await dump(raw)
    assert SECRET.encode() not in stored
    assert b"tenant" in stored
    assert await cards.result("a") == SECRET
    assert [letter.value for letter in await cards.dead.list()] == [VALUE]
    message = await claim_one(cards)
    assert message.value == VALUE
    await message.ack(SECRET)
    assert SECRET in (await batch.results()).values()


async def test_a_payload_in_another_queue_is_a_dead_letter_there(client: Client, raw: Any) -> None:
    codec = EncryptedCodec(KEYS)
    worker = delayq.Worker(client)
    handled: list[Any] = []
    worker.listener("mails", codec=codec)(handled.append)
    worker.listener("cards", codec=codec)(handled.append)
    await client.reliable_queue("cards", codec=codec).offer(VALUE, id="a")
    mails = client.reliable_queue("mails", codec=codec)
    await mails.offer("mine", 60, id="a")
    stolen = await raw.hget("delayq:{cards}:bodies", "a")
    await raw.hset("delayq:{mails}:bodies", "a", stolen)
    await mails.reschedule("a", 0)
    await worker.run(burst=True)
    assert handled == [VALUE]
    (letter,) = await mails.dead.list()
    assert letter.reason == "undecodable"
    assert letter.error == (
        "EncryptedCodec cannot decode the payload: it does not decrypt with key '2027': it was"
        " changed, or is from another queue"
    )


async def test_a_schedule_that_is_declared_again_is_the_same(client: Client, raw: Any) -> None:
    cards = client.reliable_queue("cards", codec=EncryptedCodec(KEYS))

    async def declare(**options: Any) -> bytes:
        await cards.schedule("nightly", every=60, **options)
        record: bytes = await raw.hget("delayq:{cards}:schedules", "nightly")
        return record.partition(b"\n")[2]

    first = await declare(value=VALUE, headers={"tenant": "7"})
    assert await declare(value=VALUE, headers={"tenant": "7"}) == first
    assert await declare(value=VALUE, headers={"tenant": "8"}) != first
    assert await declare(value=SECRET, headers={"tenant": "7"}) != first


async def test_a_handler_that_saves_its_state_again_does_not_sleep_again(client: Client) -> None:
    cards = client.reliable_queue("cards", codec=EncryptedCodec(KEYS))
    await cards.offer(VALUE)
    steps: list[str] = []

    async def handle() -> None:
        async with await claim_one(cards) as message:
            await message.save("begun")
            await message.sleep(3600)
            steps.append("slept")

    await handle()
    await advance(client, 3600)
    await handle()
    assert steps == ["slept"]


async def test_tasks_and_their_results_are_encrypted(
    client: Client, raw: Any, tmp_path: Path
) -> None:
    tasks = delayq.Tasks("cards", codec=EncryptedCodec(KEYS), keep=60)

    @tasks.task
    async def charge(card: str) -> tuple[str, int]:
        return card, 7

    tasks.bind(client)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/db")
    outbox = Outbox(engine=engine, codecs={"mails": EncryptedCodec(KEYS)})
    outbox.table.metadata.create_all(engine)
    with engine.begin() as connection:
        name = outbox.offer(connection, charge.to_offer(SECRET))
        outbox.offer(connection, "mails", SECRET)
        assert SECRET not in str(connection.execute(sqlalchemy.select(outbox.table.c.body)).all())
    await outbox.relay().drain(client)
    worker = delayq.Worker(client)
    worker.include(tasks)
    await worker.run(burst=True)
    assert await charge.result(name) == (SECRET, 7)
    mails = client.reliable_queue("mails", codec=EncryptedCodec(KEYS))
    assert (await claim_one(mails)).value == SECRET
    assert SECRET.encode() not in await dump(raw)
    with testing.eager(tasks):
        assert await charge.result(await charge.offer(SECRET)) == (SECRET, 7)
    with pytest.raises(delayq.ConfigurationError, match="different codecs"):
        worker.include(delayq.Tasks("cards"))
    for wrong in (delayq.JsonCodec(), EncryptedCodec(KEYS, codec_for(int))):
        with pytest.raises(delayq.BadInput, match="no codec but EncryptedCodec"):
            delayq.Tasks("cards", codec=wrong)  # type: ignore[arg-type]


async def test_a_delayed_queue_finds_no_values(client: Client) -> None:
    cards = client.delayed_queue("cards", codec=EncryptedCodec(KEYS))
    receipt = await cards.offer(VALUE, 60)
    assert await cards.pending.read_all() == [VALUE]
    for find in (cards.pending.contains, cards.pending.remove):
        with pytest.raises(delayq.BadInput, match="keep the receipts"):
            await find(VALUE)
    with pytest.raises(delayq.BadInput, match="keep the receipts"):
        await cards.pending.retain_all([VALUE])
    assert await receipt.reschedule(0)
    assert await cards.take() == VALUE


async def test_a_codec_around_it_is_not_left_out(client: Client) -> None:
    class Around:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def encode(self, value: object) -> Any:
            return self.inner.encode(value)

        def decode(self, payload: bytes) -> Any:
            return self.inner.decode(payload)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    cards = client.reliable_queue("cards", codec=Around(EncryptedCodec(KEYS)))
    with pytest.raises(delayq.ConfigurationError, match=r"for_queue\(name\)"):
        await cards.offer(VALUE)


def test_the_command_line_shows_values_to_who_has_the_keys(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.assert_refused("offer cards 1 --encrypt", words="$DELAYQ_KEYS")
    monkeypatch.setenv("DELAYQ_KEYS", KEYS_TEXT)
    offered = f'offer cards \'{{"card":"{SECRET}"}}\' --id a --header tenant=7 --encrypt'
    assert cli(offered)[0] == 0
    assert cli("get cards a")[1][0]["value"] == VALUE
    assert cli(f"search cards --payload {SECRET}")[1][-1]["found"] == 1
    monkeypatch.delenv("DELAYQ_KEYS")
    (facts,) = cli("get cards a")[1]
    assert (facts["value"], facts["encrypted"]) == (None, "2027")
    assert "encrypted with key 2027" in cli.plain("list cards --state ready")[1]
    assert cli(f"search cards --payload {SECRET}")[1] == [
        {"searched": 1, "total": 1, "found": 0, "encrypted": 1, "next_offset": None}
    ]
    assert "1 of them cannot be searched" in cli.plain(f"search cards --payload {SECRET}")[1]
    assert cli("search cards --id a")[1][-1]["found"] == 1
    monkeypatch.setenv("DELAYQ_KEYS", "2027=short")
    cli.assert_refused("get cards a", words="$DELAYQ_KEYS: key '2027'")
    monkeypatch.delenv("DELAYQ_KEYS")
    # It is gone with this, so that all of it is shown.
    assert cli.plain("take cards")[1].startswith("0xf80432303237")


async def test_the_dashboard_shows_payloads_if_it_has_the_keys(client: Client) -> None:
    cards = client.reliable_queue("cards", codec=EncryptedCodec(KEYS))
    await cards.offer(VALUE, id="a")
    one = "message?kind=reliable&name=cards&at=//a"
    async with browse(delayq.dashboard(client)) as reader:
        assert "encrypted with key 2027" in texts(await page(reader, LIST))
        assert "It is encrypted with key '2027', and no keys are given." in texts(
            await page(reader, one)
        )
        for query in (f"q={SECRET}", f"q={SECRET}&id=a"):
            found = texts(await page(reader, f"search?{query}"))
            assert "The payloads of 1 message are encrypted" in found
        assert ">a</code>" in await page(reader, "search?id=a")
    async with browse(delayq.dashboard(client, keys=KEYS_TEXT, token=TOKEN)) as operator:
        await log_in(operator)
        for address in (LIST, one, f"search?q={SECRET}"):
            assert SECRET in texts(await page(operator, address))
        await client.reliable_queue("mails").offer(1)
        plain_queue = await page(operator, "enqueue?kind=reliable&name=mails")
        assert 'name="encrypt" value="1">' in plain_queue
        new = await page(operator, "enqueue?kind=reliable&name=cards")
        assert 'name="encrypt" value="1" checked>' in new
        fields = {"do": "enqueue", "payload": "5", "format": "JSON", "id": "b", "encrypt": "1"}
        await send(operator, form(new) | fields)
        await send(operator, form(new) | fields | {"id": "c", "encrypt": ""})
    message = await cards.get("b")
    assert message is not None
    assert message.value == 5
    plain = await cards.get("c")
    assert plain is not None
    with pytest.raises(delayq.DecodeError, match="it is not encrypted"):
        _ = plain.value
