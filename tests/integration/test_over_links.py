"""Tests from other modules, run again over links as slow as a real network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import FOUND
from tests.integration import (
    test_cancellation,
    test_deliveries,
    test_faults,
    test_fetching_ahead,
    test_reliable_cancellation,
    test_reliable_leases,
    test_unattended_acks,
)
from tests.integration.test_fetching_ahead import _quick, early, way
from tests.integration.test_reliable_leases import _eager
from tests.support.links import Links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import ModuleType

    from tests.support.servers import PrivateServer

__all__ = ["_eager", "_quick", "early", "way"]

pytestmark = pytest.mark.gate

ROUND_TRIP, MBIT = 20, 40
"""Milliseconds, and megabits per second."""

# Each of these tests takes only a few round trips.
CHOSEN: dict[ModuleType, tuple[str, ...]] = {
    test_cancellation: (
        "test_closing_ends_each_waiting_call",
        "test_a_cancelled_drain_puts_back_what_it_had",
    ),
    test_fetching_ahead: ("test_closing_the_client_leaves_the_rest",),
    test_deliveries: ("test_a_nack_wakes_whoever_waits",),
    test_faults: ("test_a_transfer_that_fails_loses_and_doubles_nothing",),
    test_reliable_cancellation: (
        "test_an_ack_whose_caller_is_cancelled_is_carried_out",
        "test_nothing_is_left_behind_by_a_client",
    ),
    test_reliable_leases: (
        "test_a_handler_may_take_longer_than_the_lease",
        "test_closing_with_handlers_at_work",
    ),
    test_unattended_acks: ("test_closing_sends_acks",),
}

for _module, _names in CHOSEN.items():
    globals().update({_name: getattr(_module, _name) for _name in _names})


class Distant:
    """A server behind links: it has their address, and otherwise behaves as the server itself."""

    def __init__(self, server: PrivateServer, links: Links) -> None:
        self._server = server
        self.url = links.url

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@pytest.fixture
async def server(_session_server: Callable[[str], PrivateServer]) -> AsyncIterator[Distant]:
    if not FOUND:
        pytest.skip("no server found on this machine")
    server = _session_server(next(iter(FOUND)))
    server.start()
    server.flush()
    async with Links(server, tcp=True, round_trip=ROUND_TRIP, mbit=MBIT) as links:
        yield Distant(server, links)
