"""Every example runs as its first lines say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from anyio import to_thread

import delayq
import delayq.testing
from tests.support.incident import broken
from tests.support.servers import free_port
from tests.support.terminal import ROOT, at_terminal, screen
from tests.support.waiting import until
from tests.support.walkthrough import Terminal, masked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.servers import PrivateServer

EXAMPLES = ROOT / "examples"
PATIENCE = 60.0


class Program:
    """A running example, and its output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    async def line_with(self, text: str) -> str:
        """Wait for a line that contains the text."""
        assert self._process.stdout is not None
        with anyio.fail_after(PATIENCE):
            while line := (await self._process.stdout.readline()).decode():
                self.lines.append(line.rstrip())
                if text in line:
                    return line
        raise AssertionError(f"it ended without {text!r}:\n" + "\n".join(self.lines))

    async def stop(self) -> str:
        """Ask the program to end. uvicorn then ends by the signal it received."""
        self._process.terminate()
        return await self.end(0, -signal.SIGTERM)

    async def end(self, *statuses: int) -> str:
        """Wait until the program has ended well, and return all of its output."""
        assert self._process.stdout is not None
        with anyio.fail_after(PATIENCE):
            self.lines += (await self._process.stdout.read()).decode().splitlines()
            status = await self._process.wait()
        printed = "\n".join(self.lines)
        assert status in (statuses or (0,)), printed
        return printed


@asynccontextmanager
async def program(
    server: PrivateServer, *arguments: str | Path, **variables: str
) -> AsyncIterator[Program]:
    """Run Python with these arguments against this server, and kill it afterwards."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=os.environ | {"DELAYQ_URL": server.url, "PYTHONPATH": str(ROOT)} | variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_producer_and_consumer_meet_in_due_order(own_server: PrivateServer) -> None:
    async with program(own_server, EXAMPLES / "consumer.py", "--count", "4") as consumer:
        async with program(own_server, EXAMPLES / "producer.py") as producer:
            offered = await producer.end()
        arrived = await consumer.end()
    words = ["hello", "hallo", "bonjour", "hola"]
    assert [line.split()[0] for line in offered.splitlines()] == words
    assert [line.split(",")[0] for line in arrived.splitlines()] == words
    assert all(float(line.split()[1]) >= 0 for line in arrived.splitlines())


@pytest.mark.gate
async def test_an_order_is_closed_if_not_paid(own_server: PrivateServer, tmp_path: Path) -> None:
    folder = EXAMPLES / "fastapi_orders"
    shared = {"ORDERS_DB": str(tmp_path / "orders.db"), "ORDER_TIMEOUT_SECONDS": "3600"}
    async with (
        program(own_server, folder / "close_orders.py", **shared) as closer,
        serving(own_server, folder, "app:app", **shared) as (_, browser),
        delayq.connect(own_server.url) as client,
    ):
        await closer.line_with("waiting")
        unpaid = (await browser.post("/orders", json={"item": "book"})).json()
        paid = (await browser.post("/orders", json={"item": "pen"})).json()
        assert unpaid["state"] == paid["state"] == "unpaid"

        reply = await browser.post(f"/orders/{paid['id']}/pay")
        assert (reply.status_code, reply.json()["state"]) == (200, "paid")
        closing = client.delayed_queue("close-orders")
        assert await closing.pending.read_all() == [unpaid["id"]]

        await delayq.testing.advance(closing, 3600)
        await closer.line_with(f"order {unpaid['id']}: closed")
        assert (await browser.get(f"/orders/{unpaid['id']}")).json() == unpaid | {"state": "closed"}
        assert (await browser.get(f"/orders/{paid['id']}")).json() == paid | {"state": "paid"}
        assert (await browser.post(f"/orders/{unpaid['id']}/pay")).status_code == 409
        assert (await browser.get("/orders/none")).status_code == 404
        assert not any(paid["id"] in line for line in closer.lines)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lock_conflict", "alice is locked; booked 20 for alice; booked 100 in all"),
        ("worker", "order 1 is closed; order 2 is closed; order 3 is closed"),
        ("tasks", "a call of 'welcome', failed in attempt 1; thumbnail of user 7, 200 wide"),
    ],
)
async def test_an_example_does_what_it_says(
    own_server: PrivateServer, name: str, words: str
) -> None:
    async with program(own_server, EXAMPLES / f"{name}.py") as example:
        printed = await example.end()
    for part in words.split("; "):
        assert part in printed
    assert printed.count("booked 20 for alice") <= 1


@asynccontextmanager
async def serving(
    server: PrivateServer, folder: Path, app: str, **variables: str
) -> AsyncIterator[tuple[Program, httpx.AsyncClient]]:
    """Serve an application with uvicorn. Yields the program, and a browser to visit it with."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    uvicorn = ("-m", "uvicorn", app, "--app-dir", folder, "--host", "127.0.0.1")
    async with (
        program(server, *uvicorn, "--port", str(port), **variables) as running,
        httpx.AsyncClient(base_url=address, timeout=PATIENCE, trust_env=False) as browser,
    ):
        await running.line_with("Uvicorn running on")
        yield running, browser


@pytest.mark.gate
@pytest.mark.parametrize("name", ["starlette", "litestar", "asgi", "django"])
async def test_every_framework_does_its_work(own_server: PrivateServer, name: str) -> None:
    async with serving(own_server, EXAMPLES / "web", f"{name}_app:app") as (app, browser):
        reply = await browser.post("/mails", params={"to": "ada"})
        assert reply.status_code == 202, reply.text
        await app.line_with("sent to ada")
        printed = await app.stop()
    assert "Traceback" not in printed


@pytest.mark.gate
async def test_views_that_are_not_asynchronous_offer(own_server: PrivateServer) -> None:
    folder, port = EXAMPLES / "web", str(free_port())
    command = ("-m", "delayq", "worker", "wsgi_django:worker")
    async with (
        program(own_server, folder / "wsgi_django.py", PORT=port) as app,
        program(own_server, *command, PYTHONPATH=f"{ROOT}:{folder}") as worker,
        httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as browser,
    ):
        await app.line_with("serving on")
        reply = await browser.post(f"http://127.0.0.1:{port}/mails", params={"to": "ada"})
        assert reply.status_code == 202, reply.text
        await worker.line_with("sent to ada")
        await worker.stop()


@pytest.mark.gate
async def test_metrics_are_scraped(own_server: PrivateServer) -> None:
    async with serving(own_server, EXAMPLES / "monitoring", "monitored:app") as (app, browser):
        await browser.post("/mails", params={"to": "ada"})
        await browser.post("/mails", params={"to": "bob", "delay": "3600"})
        await app.line_with("mail to ada")
        text = (await browser.get("/metrics")).text
        assert 'delayq_offered_total{kind="reliable",queue="mails"} 2.0' in text
        assert 'delayq_queue_messages{kind="reliable",queue="mails",state="delayed"} 1.0' in text
        assert 'delayq_lateness_seconds_count{queue="mails"} 1.0' in text
        await app.stop()


@pytest.mark.nightly
async def test_an_incident_is_found_and_fixed_as_the_page_tells(
    own_server: PrivateServer, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    story = page.partition("## An incident, from the command line\n")[2].partition("\n## ")[0]
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = Terminal(tmp_path, path=path)
    url = f"embedded:{tmp_path}/example-data"
    async with program(own_server, EXAMPLES / "incident.py", DELAYQ_URL=url) as incident:
        await incident.line_with("everything is broken now")
        (shown,) = re.findall(r"^```text\n(.*?)^```", story, re.DOTALL | re.MULTILINE)
        seen = await to_thread.run_sync(top, url)
        assert [masked(line) for line in shown.splitlines()] == seen
        typed = await to_thread.run_sync(here.follow, story, lambda _: None)
        await incident.stop()
    assert {*re.findall(r"delayq (\w+)", "\n".join(typed))} == {
        *("stats", "worker", "groups", "list", "cancel", "search", "get", "dead", "queues")
    }


# The causes that a doctor names, each with the commands that it advises and the figures of a queue
# that they lead to.
INCIDENT = [
    ("no consumers", ["delayq worker MODULE:ATTRIBUTE"], ("mails", "ready", 0)),
    (
        "group 'acme' uses all 4 slots of workers, while other groups wait",
        [
            "delayq groups limit exports acme 2",
            "delayq list exports --state leased",
            "delayq cancel exports ID --running",
        ],
        # Of 200, of which 4 ran, none begins; the other tenant's export ran.
        ("exports", "ready", 196),
    ),
    (
        "retries a minute: ValueError",
        ["delayq search invoices --error ValueError", "delayq bury invoices --error ValueError"],
        ("invoices", "dead", 1),
    ),
    (
        "dead letters a minute: ConnectionError",
        ["delayq dead redrive webhooks --error ConnectionError"],
        ("webhooks", "dead", 12),
    ),
]


@pytest.mark.nightly
async def test_a_doctor_names_the_causes_of_an_incident_and_commands_that_mend_it(
    own_server: PrivateServer,
) -> None:
    async def run(command: str) -> str:
        arguments = [sys.executable, "-m", *shlex.split(command), "--url", own_server.url]
        return (await anyio.run_process(arguments, check="doctor" not in command)).stdout.decode()

    async def finds(cause: str, commands: list[str]) -> bool:
        findings = map(json.loads, (await run("delayq doctor --overdue 1 --json")).splitlines())
        return any(
            cause in finding["text"] and all(command in finding["advice"] for command in commands)
            for finding in findings
        )

    async with broken(own_server) as start_mailer, delayq.connect(own_server.url) as client:

        async def figure(queue: str, state: str) -> int:
            return int(getattr(await client.reliable_queue(queue).stats(), state))

        for cause, commands, (queue, state, count) in INCIDENT:
            await until(partial(finds, cause, commands), within=PATIENCE)
            for command in commands:
                if "MODULE" in command:
                    await to_thread.run_sync(start_mailer)
                else:
                    await run(command.replace("ID", "acme-0"))
            await until(partial(figure, queue, state), within=PATIENCE, equals=count)


def top(url: str) -> list[str]:
    """Return the table of ``delayq top``, without times."""
    first: list[str] = []

    def act(_: object, written: str, type_: Callable[[str], None]) -> None:
        if "q quit" in written and not first:
            first.append(written)
            type_("q")

    at_terminal("top", columns=140, rows=12, act=act, DELAYQ_URL=url)
    lines = [masked(line) for line in screen(first[0], 140)]
    return [line for line in lines if line][1:-1]


def test_the_readme_lists_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.py")):
        entry = path.name if path.parent == Path() else f"{path.parent}/"
        assert f"`{entry}`" in listed
