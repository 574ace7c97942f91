"""Two minutes of load and faults leave nothing behind. ``make soak`` takes an hour."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.faults import report
from tests.faults.checker import summary
from tests.faults.consumers import shorten_deadlines
from tests.faults.soak import GROWTH, soak

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

pytestmark = pytest.mark.storm

SECONDS = 120.0


@pytest.mark.skipif(sys.platform != "linux", reason="memory and files are read from /proc")
async def test_two_minutes_of_load_and_faults_leave_nothing_behind(
    own_server: PrivateServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_deadlines(monkeypatch.setattr)
    result = await soak(own_server, tmp_path, SECONDS, rate=300)
    print(*result.lines(), sep="\n")
    assert not result.violations, summary(result.violations)
    assert result.growth <= GROWTH
    first, last = result.settled[0], result.settled[-1]
    # A connection may be in the middle of being replaced.
    assert last.files <= first.files + 4
    assert last.keys <= first.keys + 4
    assert last.server_kb <= first.server_kb * 1.1 + 1024
    report.tell(result.messages, result.deliveries, result.faults)
