"""Integration with web frameworks, and the error messages when a library is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI

import delayq
from delayq.integrations.asgi import WithClient, opened
from delayq.integrations.fastapi import DelayqClient, lifespan
from tests.support.programs import run_python

if TYPE_CHECKING:
    from delayq import Client
    from tests.support.servers import PrivateServer


REMEDIES = {
    "prometheus_client": ("prometheus", "delayq[prometheus]"),
    "opentelemetry": ("opentelemetry", "delayq[otel]"),
    "starlette": ("starlette", "pip install starlette"),
    "fastapi": ("fastapi", "pip install fastapi"),
    "django": ("django", "delayq[django]"),
}


def test_an_integration_names_its_missing_library_and_asgi_needs_none() -> None:
    program = f"""
import importlib, sys, delayq.integrations.asgi
optional = {REMEDIES!r}
assert not set(optional) & set(sys.modules)
for library, (module, remedy) in optional.items():
    sys.modules[library] = None
    try:
        importlib.import_module("delayq.integrations." + module)
    except ImportError as error:
        assert remedy in str(error), error
        print(library)
    del sys.modules[library]
"""
    assert run_python("-c", program).stdout.split() == [*REMEDIES]


def fastapi_app(address: Any) -> FastAPI:
    app = FastAPI(lifespan=lifespan(address))

    @app.post("/offer")
    async def offer(client: DelayqClient, number: int) -> str:
        return await client.reliable_queue("jobs").offer(number)

    return app


async def post(app: FastAPI, number: int) -> int:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as browser:
        return (await browser.post("/offer", params={"number": number})).status_code


async def test_a_dependency_is_the_apps_client(server: PrivateServer, client: Client) -> None:
    app = fastapi_app(server.url)
    with pytest.raises(delayq.Closed, match="lifespan"):
        await post(app, 1)
    # Twice, because an application may be started again, for example by its tests.
    for number in range(2):
        async with app.router.lifespan_context(app):
            assert await post(app, number) == 200
    assert [message.value for message in await client.reliable_queue("jobs").claim(5)] == [0, 1]
    # A client that is open stays open.
    app = fastapi_app(client)
    async with app.router.lifespan_context(app):
        pass
    assert await client.server_time()


async def test_a_worker_runs_as_long_as_the_block(client: Client) -> None:
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


@pytest.mark.usefixtures("_impatient")
async def test_a_server_that_is_not_there_fails_the_start() -> None:
    receive = AsyncMock(return_value={"type": "lifespan.startup"})
    app, send = AsyncMock(), AsyncMock()
    await WithClient(app, "redis://127.0.0.1:1")({"type": "lifespan"}, receive, send)
    assert [call.args[0]["type"] for call in send.await_args_list] == ["lifespan.startup.failed"]
    app.assert_not_called()
