"""Lets a worker that a command runs serve metrics, and answer probes and autoscalers."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypedDict

from delayq.errors import ConfigurationError
from delayq.worker import HealthServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from delayq.worker import Worker


class Exposure(TypedDict):
    """Arguments of :meth:`Worker.run`."""

    lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None
    health: HealthServer | None


def exposure(*, metrics: tuple[str, int] | None, health: str | None) -> Exposure:
    """Return the arguments of :meth:`Worker.run` with which it serves metrics and answers probes.

    Args:
        metrics: Host and port of the metrics, if they are served on a port of their own.
        health: ``HOST:PORT`` of the answers to probes, and of metrics where the extra is installed.

    Raises:
        BadInput: ``health`` is not of that form.
    """
    lifespan: Callable[[Worker], AbstractAsyncContextManager[object]] | None = None
    page: Callable[[str], tuple[bytes, str]] | None = None
    if health is not None and find_spec("prometheus_client") is not None:
        from delayq.integrations.prometheus import exposition  # noqa: PLC0415 - an extra

        lifespan, page = _collect, exposition
    if metrics is not None:
        lifespan = partial(_serve, *metrics)
    server = None if health is None else HealthServer(health, metrics=page)
    return {"lifespan": lifespan, "health": server}


def _collect(worker: Worker) -> AbstractAsyncContextManager[object]:
    """Collect the metrics that the health server shows."""
    from delayq.integrations.prometheus import Metrics  # noqa: PLC0415 - an extra

    return Metrics(worker.client)


@asynccontextmanager
async def _serve(host: str, port: int, worker: Worker) -> AsyncIterator[None]:
    from delayq.integrations.prometheus import serve  # noqa: PLC0415 - an extra

    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(serve(worker.client, port, host=host))
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}"
            ) from None
        yield
