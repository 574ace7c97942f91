"""What a worker answers to probes and autoscalers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import urlopen

import httpx
import pytest

import delayq
from delayq import Offer, Worker
from delayq.admin.acl import acl_rules
from delayq.integrations.prometheus import exposition
from delayq.worker import HealthServer
from tests.integration.test_acl import granted
from tests.support.board import TOKEN, browse
from tests.support.links import Links
from tests.support.servers import free_port
from tests.support.waiting import be_impatient, until
from tests.support.workers import Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client
    from tests.support.servers import PrivateServer

STARTING, STOPPING = "the worker is starting", "the worker is stopping"


class Health:
    """A worker whose health is asked for."""

    def __init__(self, worker: Worker, **options: Any) -> None:
        self.base = f"http://127.0.0.1:{free_port()}"
        self.server = HealthServer(self.base.removeprefix("http://"), **options)
        self.worker = worker

    async def get(self, path: str) -> tuple[int, Any]:
        async with httpx.AsyncClient(base_url=self.base, timeout=60) as browser:
            answer = await browser.get(path)
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json() if is_json else answer.text.strip()

    async def probes(self) -> tuple[Any, Any]:
        """Return what ``/livez`` and ``/readyz`` say."""
        return (await self.get("/livez"))[1], (await self.get("/readyz"))[1]

    async def answers(self) -> bool:
        try:
            return (await self.get("/livez"))[0] == 200
        except httpx.TransportError:
            return False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        run = asyncio.create_task(self.worker.run(health=self.server))
        try:
            await until(self.answers)
            yield
        finally:
            self.worker.stop()
            await run


async def test_probes_tell_how_a_worker_starts_waits_for_its_server_and_stops(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_impatient(monkeypatch)
    monkeypatch.setattr("delayq.worker._health._MOVES_WITHIN", 1.0)
    monkeypatch.setattr("delayq.worker._health._BEAT_INTERVAL", 0.05)
    monkeypatch.setattr("delayq._redis.connection.GIVE_UP_AFTER", 0.2)
    monkeypatch.setattr("delayq.worker._run._SERVER_ANSWERS_WITHIN", 0.2)
    may_start, gate = asyncio.Event(), Gate()

    @asynccontextmanager
    async def lifespan(_: Worker) -> AsyncIterator[None]:
        await may_start.wait()
        yield

    client = delayq.connect(own_server.url, resync_interval=0.05)
    worker = Worker(client, lifespan=lifespan)
    worker.listener("jobs")(gate)
    health = Health(worker, metrics=exposition)
    async with health.running():
        assert await health.probes() == ("ok", STARTING)
        assert "python_info{" in (await health.get("/metrics"))[1]
        assert await health.get("/scale/jobs") == (503, {"error": STARTING})
        may_start.set()
        await until(health.probes, equals=("ok", "ok"))
        with own_server.paused():
            await until(health.probes, equals=("ok", "the server does not answer"))
            error = {"error": "the server does not answer: no reply within 0.2 s"}
            assert await health.get("/scale/jobs") == (503, error)
            # Longer than anything may stand still.
            for _ in range(25):
                await asyncio.sleep(0.05)
                assert await health.get("/livez") == (200, "ok")
        await until(health.probes, equals=("ok", "ok"))
        await client.reliable_queue("jobs").offer("a")
        await until(lambda: gate.inside == ["a"])
        worker.stop()
        assert await health.probes() == ("ok", STOPPING)
        assert await health.get("/scale/jobs") == (503, {"error": STOPPING})
        gate.open()
    with pytest.raises(httpx.ConnectError):
        await health.probes()


async def test_a_server_that_refuses_claims_keeps_a_worker_from_being_ready(
    own_server: PrivateServer,
) -> None:
    own_server.call("ACL", "SETUSER", "worker", "on", "nopass", "~*", "&*", "+@all")
    url = own_server.url.replace("://", "://worker:any@")
    worker = Worker(delayq.connect(url, resync_interval=0.05))
    worker.listener("jobs")(Gate())
    health = Health(worker)

    async def says_so() -> bool:
        alive, ready = await health.probes()
        return alive == "ok" and "messages of queue 'jobs' cannot be claimed: " in ready

    async with delayq.connect(own_server.url) as client, health.running():
        await until(health.probes, equals=("ok", "ok"))
        own_server.call("ACL", "SETUSER", "worker", "-eval", "-evalsha")
        jobs: delayq.ReliableQueue[int] = client.reliable_queue("jobs")
        await jobs.cancel(await jobs.offer(1))
        await until(says_so)
        own_server.call("ACL", "SETUSER", "worker", "+eval", "+evalsha")
        # No message has to come for that.
        await until(health.probes, equals=("ok", "ok"))


async def test_what_stands_still_is_not_alive_and_a_thread_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.worker._health._MOVES_WITHIN", 0.5)
    monkeypatch.setattr("delayq.worker._health._BEAT_INTERVAL", 0.05)
    monkeypatch.setattr("delayq.worker._health._ANSWERS_WITHIN", 0.05)
    worker, answers = Worker(client), list[tuple[int, bytes]]()
    health = Health(worker)

    def ask(path: str) -> int:
        try:
            with urlopen(f"{health.base}{path}") as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                answers.append((error.code, error.read()))
            return error.code

    @worker.listener("jobs")
    async def block(_: object) -> None:
        # Nothing runs in the process, as while it is stopped.
        ctypes.PyDLL(None).usleep(1_100_000)
        assert ask("/livez") == 200
        while ask("/livez") == 200:
            pass
        ask("/readyz")
        ask("/scale/jobs")

    def cancel(name: str) -> None:
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == name)
        task.cancel()

    async def says(words: str) -> bool:
        return words in str(await health.get("/livez"))

    async with health.running():
        await client.reliable_queue("jobs").offer(1)
        await until(lambda: len(answers) == 3)
        words = (b"the event loop has not moved for", b"does not answer", b"does not answer")
        assert all(code == 503 for code, _ in answers)
        assert all(word in text for (_, text), word in zip(answers, words, strict=True))
        await until(health.answers)
        cancel("delayq feed jobs")
        await until(lambda: says("messages of queue 'jobs' are no longer claimed"))
    async with health.running():
        await until(health.answers)
        cancel("delayq recheck")
        client.session.scheduler._pace.recheck_at -= 60
        await until(lambda: says("queues have not been re-checked for"))


@pytest.mark.parametrize("step", ["store.ReliableStore.claim", "recurrence.Recurrence.advance"])
async def test_a_claim_that_hangs_is_not_alive(
    client: Client, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr("delayq.worker._health._MOVES_WITHIN", 0.5)
    monkeypatch.setattr("delayq.worker._health._BEAT_INTERVAL", 0.05)
    worker, gate = Worker(client, concurrency=1), Gate()
    worker.listener("jobs")(gate)
    health, jobs = Health(worker), client.reliable_queue("jobs")

    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def says_so() -> bool:
        return "a claim of messages of queue 'jobs' has not moved" in str(
            await health.get("/livez")
        )

    async with health.running():
        # Waiting for messages, and for a handler, longer than anything may stand still.
        for count in range(2):
            for _ in range(15):
                await asyncio.sleep(0.05)
                assert not await says_so()
            await jobs.offer(count)
            await until(lambda: len(gate.inside) == 1)
        monkeypatch.setattr(f"delayq._reliable.{step}", hang)
        await jobs.schedule("soon", value=2, every=0.05)
        gate.open()
        await until(says_so)


async def test_a_claim_whose_reply_takes_long_to_arrive_is_alive(
    own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.worker._health._MOVES_WITHIN", 1.0)
    monkeypatch.setattr("delayq.worker._health._BEAT_INTERVAL", 0.05)
    monkeypatch.setattr("delayq._redis.pool.GIVE_UP_AFTER", 0.1)
    handled: list[str] = []
    async with delayq.connect(own_server.unix_url) as producer:
        await producer.reliable_queue("jobs").offer("x" * 300_000)
    async with Links(own_server, tcp=True, round_trip=2, mbit=1) as links:
        worker = Worker(links.url)
        worker.listener("jobs")(handled.append)
        health = Health(worker)
        async with health.running():
            while not handled:
                assert await health.get("/livez") == (200, "ok")
                await asyncio.sleep(0.05)


@pytest.mark.every_server
async def test_the_figures_for_autoscalers_count_what_is_due_and_what_soon_will_be(
    client: Client,
) -> None:
    jobs = client.reliable_queue("jobs/eu", partitions=2)
    orders = client.delayed_queue("orders")
    delays = [0, 0, 0, 50, 3600]
    await jobs.offer_many([Offer(str(delay), delay=delay) for delay in delays])
    await orders.offer_many([(str(delay), delay) for delay in delays])
    await orders.take()
    worker, gate = Worker(client, concurrency=1), Gate()
    worker.listener("jobs/eu")(gate)
    health = Health(worker)
    async with health.running(), browse(delayq.dashboard(client)) as browser:

        async def of_worker(query: str = "") -> tuple[int, Any]:
            return await health.get(f"/scale/jobs%2Feu{query}")

        async def of_dashboard(queue: str) -> tuple[int, Any]:
            answer = await browser.get(f"scale/{queue}")
            return answer.status_code, answer.json()

        await until(lambda: len(gate.inside) == 1)
        figures = {"due": 2, "due_within": 2, "running": 1, "waiting": 4}

        async def is_counted() -> bool:
            return bool(figures.items() <= (await of_worker())[1].items())

        # What it claims ahead goes back.
        await until(is_counted)
        assert (await of_worker())[1]["late_seconds"] > 0
        for status, said in (
            await of_worker("?within=60"),
            await of_dashboard("jobs/eu?within=60"),
            await of_dashboard("reliable:jobs%2Feu?within=60"),
        ):
            assert (status, said | {"late_seconds": 0}) == (
                200,
                {**figures, "due_within": 3, "late_seconds": 0},
            )
        _, said = await of_dashboard("delayed:orders?within=3601")
        assert (said["due"], said["due_within"], said["waiting"]) == (2, 4, 4)
        # More workers would not get what is paused.
        await jobs.pause()
        _, said = await of_worker("?within=60")
        assert (said["due"], said["due_within"], said["waiting"]) == (0, 0, 4)
        assert said["late_seconds"] == 0
        gate.open()
        # Mistakes.
        for wrong, words in (
            ("?within=soon", "within must be a number of seconds from 0 to 31622400, such as 60"),
            ("?within=-1", "not '-1'"),
            ("?within=nan", "not 'nan'"),
            ("?whithin=60", "there is no parameter 'whithin', only within: ?within=60"),
        ):
            for status, said in (await of_worker(wrong), await of_dashboard(f"jobs/eu{wrong}")):
                assert (status, words in said["error"]) == (400, True)
        error = {"error": "this worker does not handle queue 'nobodys', only 'jobs/eu'"}
        assert await health.get("/scale/nobodys") == (404, error)
        for name in ("nobodys", "delayed:jobs/eu"):
            status, said = await of_dashboard(name)
            assert (status, "there is no" in said["error"]) == (404, True)
        assert (await health.get("/metrics"))[0] == 404


async def test_a_worker_whose_user_may_not_count_says_what_is_missing(
    server: PrivateServer,
) -> None:
    async with granted(server, acl_rules("consumer", reliable=["jobs"])) as url:
        worker = Worker(url)
        worker.listener("jobs")(Gate())
        health = Health(worker)
        async with health.running():
            await until(health.probes, equals=("ok", "ok"))
            status, said = await health.get("/scale/jobs")
    assert status == 502
    assert "needs the rights of `delayq acl dashboard` as well" in said["error"]


async def test_a_scaler_sends_the_dashboard_a_token(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq._dashboard.scale.LATE", 0)
    await client.reliable_queue("jobs").offer(1)
    app = delayq.dashboard(client, read_token=TOKEN)
    async with browse(app) as browser:

        async def status(authorization: str) -> int:
            headers = {"Authorization": authorization} if authorization else {}
            return (await browser.get("scale/jobs", headers=headers)).status_code

        assert await status(f"Bearer {TOKEN}") == 200
        for wrong in ("", "Bearer wrong-wrong-wrong", f"Basic {TOKEN}"):
            assert await status(wrong) == 401
        # The header opens no other page.
        shown = await browser.get("", headers={"Authorization": f"Bearer {TOKEN}"})
        assert shown.headers["location"].startswith("login")
        # Guesses count as they do on the login.
        assert [await status("Bearer wrong-wrong-wrong") for _ in range(11)] == [401] * 11
        assert await status(f"Bearer {TOKEN}") == 200


async def test_connections_that_ask_nothing_do_not_keep_probes_out(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayq.worker._http._MOST_REQUESTS", 1)
    worker = Worker(client)
    worker.listener("jobs")(Gate())
    pages = [(b"all is well", "text/plain")]
    health = Health(worker, metrics=lambda accept: pages.pop())
    async with health.running():
        address = ("127.0.0.1", health.server.port)
        with socket.create_connection(address) as idle:
            idle.sendall(b"GET /livez")
            # The oldest makes room.
            assert await health.get("/livez") == (200, "ok")
            assert idle.recv(1) == b""
        monkeypatch.setattr("delayq.worker._http._REQUEST_WITHIN", 0.1)
        with socket.create_connection(address) as idle:
            idle.sendall(b"GET /livez")
            assert await asyncio.to_thread(idle.recv, 1) == b""
        with socket.create_connection(address) as mistaken:
            mistaken.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
            assert mistaken.recv(64).startswith(b"HTTP/1.0 400 ")
        assert await health.get("/metrics") == (200, "all is well")
        # A page that fails, because there is no other, is logged.
        assert await health.get("/metrics") == (
            500,
            "this failed; the log of the worker says why",
        )


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
async def test_a_forked_child_keeps_neither_the_port_nor_a_connection(client: Client) -> None:
    worker = Worker(client)
    worker.listener("jobs")(Gate())
    health = Health(worker)
    theirs, ours = os.pipe()
    async with health.running():
        address = ("127.0.0.1", health.server.port)
        with socket.create_connection(address) as asking:
            asking.sendall(b"GET /livez HTTP/1.0\r\n")
            child = os.fork()
            if child == 0:
                os.close(ours)
                os.read(theirs, 1)
                os._exit(0)
            asking.sendall(b"\r\n")
            answer = await asyncio.to_thread(asking.makefile("rb").read)
            assert answer.endswith(b"ok\n")
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    finally:
        os.close(ours)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "address",
    ["8080", ":8080", "0.0.0.0", "0.0.0.0:0", "0.0.0.0:65536", "::1:8080", "a\0b:80", None],
)
def test_an_address_that_cannot_be_is_refused(address: Any) -> None:
    with pytest.raises(delayq.BadInput, match=r"must be HOST:PORT, such as 0\.0\.0\.0:8080"):
        HealthServer(address)
