"""The incidents of ``examples/incident.py`` and ``overload.py``, and the way through the first one
in the dashboard, as ``docs/operations.md`` tells it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.browser import WITHIN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.support.browser import Seen
    from tests.support.servers import PrivateServer

EXAMPLES = Path(__file__).parents[2] / "examples"


@asynccontextmanager
async def broken(server: PrivateServer) -> AsyncIterator[Callable[[], object]]:
    """Break everything on a server. Yields a function that runs the missing worker."""
    mailer = (sys.executable, "-m", "delayq", "worker", "incident:mailer", "--burst")
    environment = _environment(server)
    async with _running("incident.py", environment, "everything is broken now"):
        yield partial(
            subprocess.run, mailer, env=environment, check=True, timeout=WITHIN, capture_output=True
        )


def overloaded(server: PrivateServer) -> AbstractAsyncContextManager[None]:
    """Overload a server in three ways that more workers would not mend."""
    return _running("overload.py", _environment(server), "everything goes wrong now")


def _environment(server: PrivateServer) -> dict[str, str]:
    return os.environ | {"DELAYQ_URL": server.url, "PYTHONPATH": str(EXAMPLES)}


@asynccontextmanager
async def _running(name: str, environment: dict[str, str], says: str) -> AsyncIterator[None]:
    """Run an example, from the moment at which it has said something."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLES / name, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        while (
            says not in (line := await asyncio.wait_for(process.stdout.readline(), WITHIN)).decode()
        ):
            assert line, f"{name} has ended"
        yield
    finally:
        process.terminate()
        await asyncio.wait_for(process.communicate(), WITHIN)


def fix_in_the_dashboard(
    address: str,
    start_mailer: Callable[[], object],
    browser: Seen,
    look: Callable[[str], None] = lambda _: None,
) -> None:
    """Click through the dashboard until nothing is wrong. ``look`` is called at each picture."""
    browser.go(address + "login")
    browser.log_in()
    browser.until("no consumers")
    look("overview")

    browser.follow(("Workers", "exports"))
    assert "mails" not in browser.text()
    start_mailer()
    browser.click("Queues")
    browser.until(lambda: "no consumers" not in browser.text())

    browser.follow(("exports", "Due times"), ("Groups", "Own limit"))
    look("groups")
    browser.follow(
        *(("acme", "New limit"), ("#limit", "2"), ("Set", "Limit set.")),
        *(("Messages", "Due times"), ("Leased", "acme-0")),
        *((f'[aria-label="Select {message}"]', None) for message in ("acme-0", "acme-1")),
        *(("Cancel running", "2 messages cancelled."), ("Groups", "Own limit")),
    )
    browser.reload_until_gone("bob")

    browser.follow(("Retries", "ValueError"), ("invoices", "invoice-2"), ("invoice-2", "Timeline"))
    look("message")
    browser.follow(("Cancel message", "Message cancelled."), ("Dead letters", "KeyError"))
    look("causes")
    browser.follow(
        *(('[aria-label="Redrive ConnectionError"]', None), ("Dead letters", "All 12 ")),
        *(("summary", None), ("Drop them", "12 dead letters dropped.")),
    )
    browser.click("Queues")
    browser.until(lambda: "dead letters" not in browser.text())
