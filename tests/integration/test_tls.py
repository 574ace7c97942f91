"""TLS and passwords by URL. Debian's Redis 7 supports TLS, the servers from wheels do not."""

from __future__ import annotations

import asyncio
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import delayq
from delayq._redis.pool import ConnectionPool
from tests.support.servers import Kind, PrivateServer, free_port
from tests.support.tls import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def authority(tls_kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("tls") / "ours")


@contextmanager
def tls_server(kind: Kind, authority: Authority, host: str) -> Iterator[tuple[PrivateServer, int]]:
    """Start a server with a plain port and a TLS port, whose certificate is for ``host``."""
    port = free_port()
    with PrivateServer(kind, tcp=True, options=authority.server_options(host, port)) as server:
        yield server, port


@pytest.fixture(scope="module")
def usual(tls_kind: Kind, authority: Authority) -> Iterator[tuple[PrivateServer, int]]:
    with tls_server(tls_kind, authority, "IP:127.0.0.1") as usual:
        yield usual


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets an entry for each attempt to open a connection."""
    made: list[Any] = []
    opened_anew: Any = ConnectionPool._open_new

    async def counted(connections: ConnectionPool) -> Any:
        made.append(connections)
        return await opened_anew(connections)

    monkeypatch.setattr(ConnectionPool, "_open_new", counted)
    return made


async def test_a_queue_works_over_tls(
    usual: tuple[PrivateServer, int], authority: Authority
) -> None:
    async with delayq.connect(
        f"rediss://127.0.0.1:{usual[1]}/0?ssl_ca_certs={authority.certificate}"
    ) as client:
        queue = client.delayed_queue("orders")
        taking = asyncio.create_task(queue.take())
        await queue.offer("hello", 0.02)
        assert await asyncio.wait_for(taking, 60) == "hello"
        jobs = client.reliable_queue("jobs")
        await jobs.offer("x" * 300_000)
        (message,) = await jobs.claim()
        assert message.value == "x" * 300_000


async def test_a_certificate_that_is_not_trusted_is_refused_at_once(
    usual: tuple[PrivateServer, int],
    tls_kind: Kind,
    authority: Authority,
    tmp_path: Path,
    tries: list[Any],
) -> None:
    other = Authority.new(tmp_path / "other")
    with tls_server(tls_kind, authority, "DNS:example.test") as (_, of_another_host):
        for port, options, reason in (
            (usual[1], "", "certificate"),
            (usual[1], f"?ssl_ca_certs={other.certificate}", "certificate"),
            (of_another_host, f"?ssl_ca_certs={authority.certificate}", "mismatch"),
        ):
            tries.clear()
            why = f"certificate that is not trusted: .*{reason}"
            with pytest.raises(delayq.ServerRefused, match=why):
                await delayq.connect(f"rediss://127.0.0.1:{port}/0{options}").__aenter__()
            # A handshake that takes half a second is tried again beside it.
            assert len(tries) <= 2


async def test_a_client_at_the_wrong_port_is_told_at_once_what_is_wrong(
    usual: tuple[PrivateServer, int], tries: list[Any]
) -> None:
    server, port = usual
    for url, meant in (
        (f"redis://127.0.0.1:{port}/0", "rediss://"),
        (f"rediss://127.0.0.1:{server.port}/0", "redis://"),
    ):
        tries.clear()
        with pytest.raises(delayq.ServerRefused, match=f"did you mean {meant}") as caught:
            await delayq.connect(url).__aenter__()
        assert len(tries) == 1
        # The traceback fits on a screen.
        assert len(traceback.format_exception(caught.value)) < 12


@pytest.mark.every_server
async def test_user_and_password_come_from_the_url(server_kind: Kind, tries: list[Any]) -> None:
    with PrivateServer(server_kind, tcp=True) as server:
        place, user = f"127.0.0.1:{server.port}/0", "me:p%40ss%3Aw%2Frd%3F"
        server.call("ACL", "SETUSER", "me", "on", ">p@ss:w/rd?", "allkeys", "allchannels", "+@all")
        # A password alone is the default user's.
        server.call("CONFIG", "SET", "requirepass", "hunter2")
        right = (f"valkey://{user}@{place}", f"redis://{user}@{place}")
        for url in (*right, f"redis://:hunter2@{place}", f"redis://{place}?password=hunter2"):
            async with delayq.connect(url) as client:
                await client.reliable_queue("jobs").offer(1)
        for url in (f"redis://:wrong@{place}", f"redis://{place}"):
            tries.clear()
            with pytest.raises(delayq.ServerRefused) as caught:
                await delayq.connect(url).__aenter__()
            assert len(tries) == 1
            assert "wrong@" not in str(caught.value)
