"""Integration with web frameworks, and the error messages when a library is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI

import delayq
from delayq.integrations.asgi import WithClient, opened
from delayq.integrations.fastapi import DelayqClient, lifespan

if TYPE_CHECKING:
    from tests.support.servers import PrivateServer


@pytest.mark.parametrize(
    ("module", "library", "remedy"),
    [
        ("prometheus", "prometheus_client", "delayq[prometheus]"),
        ("opentelemetry", "opentelemetry", "delayq[otel]"),
        ("starlette", "starlette", "pip install starlette"),
        ("fastapi", "fastapi", "pip install fastapi"),
    ],
)
def test_what_is_missing_is_named(module: str, library: str, remedy: str) -> None:
    program = (
        f"import sys; import delayq; sys.modules[{library!r}] = None; import"
        f" delayq.integrations.{module}"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert remedy in result.stderr.splitlines()[-1]


def test_asgi_needs_nothing() -> None:
    program = (
        "import sys, delayq.integrations.asgi; print({'starlette', 'fastapi', 'prometheus_client'}"
        " & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def fastapi_app(address: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan(address))

    @app.post("/offer")
    async def offer(client: DelayqClient, number: int) -> str:
        return await client.reliable_queue("jobs").offer(number)

    return app


async def test_a_dependency_is_the_client_of_the_application(server: PrivateServer) -> None:
    app = fastapi_app(server.url)
    # Twice, because an application may be started again, for example by its tests.
    for number in range(2):
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test"
            ) as browser,
        ):
            assert (await browser.post("/offer", params={"number": number})).status_code == 200
    async with delayq.connect(server.url) as client:
        assert [message.value for message in await client.reliable_queue("jobs").claim(5)] == [0, 1]


async def test_a_client_that_is_open_stays_open(client: delayq.Client) -> None:
    app = fastapi_app(client)
    async with app.router.lifespan_context(app):
        pass
    assert await client.server_time()


async def test_an_application_that_does_not_run_has_no_client(server: PrivateServer) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(fastapi_app(server.url)), base_url="http://test"
    ) as browser:
        with pytest.raises(delayq.Closed, match="lifespan"):
            await browser.post("/offer", params={"number": 1})


async def test_a_worker_runs_as_long_as_the_block(client: delayq.Client) -> None:
    worker, handled = delayq.Worker(client), []

    @worker.listener("jobs")
    async def handle(value: int) -> None:
        handled.append(value)
        worker.stop()

    async with opened(client, worker=worker) as same:
        assert same is client
        await client.reliable_queue("jobs").offer(1)
        with pytest.raises(delayq.ConfigurationError, match="already running"):
            await worker.run()
    with pytest.raises(delayq.Closed):
        _ = worker.client
    assert await client.reliable_queue("jobs").offer(2)
    assert handled in ([], [1])


async def test_a_server_that_is_not_there_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayq._redis.client.RETRY_FOR", 0.1)
    sent: list[str] = []

    async def app(*_: object) -> None:
        raise AssertionError

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await WithClient(app, "redis://127.0.0.1:1")({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.failed"]
