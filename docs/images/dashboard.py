"""Take the pictures of docs/dashboard.md and docs/operations.md: ``make pictures``.

Every page is shown at three widths, light and dark, with the same queues. ``--all DIRECTORY`` keeps
the pictures of all pages there, to look at.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import FOUND
from tests.support.board import TOKEN
from tests.support.browser import PAGES, fill, remember, serving, trouble, visit, work
from tests.support.incident import broken, fix_in_the_dashboard
from tests.support.servers import PrivateServer
from tests.support.tasks import running

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.browser import Seen

HERE = Path(__file__).parent
WIDTHS = {"wide": 1440, "tablet": 768, "phone": 390}
# The pictures of the documentation: page, width, dark, and how tall at most.
SHOWN = {
    "overview-light": ("overview", "wide", False, 900),
    "queue-light": ("queue", "wide", False, 1000),
    "queue-dark": ("queue", "wide", True, 1000),
    "dead-light": ("dead", "wide", False, 900),
    "server-light": ("server", "wide", False, 900),
    "overview-phone": ("overview", "phone", False, 900),
    "message-phone": ("message", "phone", True, 900),
    **{
        f"{page}-light": (page, "wide", False, 900)
        for page in (
            *("message", "search", "letters", "causes", "groups", "batches"),
            *("all-dead", "retries", "handled", "all-schedules"),
            *("schedules", "workers", "settings", "enqueue", "purge"),
        )
    },
    "history-light": ("history", "wide", False, 1200),
}


def look_at(address: str, everything: Path | None, width: str, dark: bool, browser: Seen) -> None:
    for page, path in PAGES.items():
        wanted = {
            name: most
            for name, (shown, *how, most) in SHOWN.items()
            if (shown, *how) == (page, width, dark)
        }
        if everything is None and not wanted and page != "login":
            continue
        browser.go(address + path)
        if path.startswith("queue?") and page != "failed":
            browser.until("live")
        if page == "queue":
            browser.until(lambda: browser.points("gone-line") > 12)
        if page in ("overview", "history"):
            browser.until("live")
        for name, most in wanted.items():
            browser.picture(HERE / f"dashboard-{name}.png", most)
        if everything is not None:
            browser.picture(everything / f"{page}-{width}-{'dark' if dark else 'light'}.png", 4000)
        if page == "login":
            browser.log_in()
    # A page that was asked for and does not exist.
    browser.complaints()


async def incident() -> None:
    """Take the pictures of an incident, a minute after it has begun."""

    def look(address: str, mailer: Callable[[], object], browser: Seen) -> None:
        taken: list[str] = []

        def take(name: str) -> None:
            if name not in taken:
                taken.append(name)
                browser.picture(HERE / f"incident-{name}.png", 900)

        browser.go(address)
        browser.until("no consumers", 120)
        browser.until(lambda: "late" in browser.find("#live_queues").text, 120)
        fix_in_the_dashboard(address, mailer, browser, take)

    with PrivateServer(next(iter(FOUND.values()))) as server:
        async with broken(server) as mailer, serving(server, "--token", TOKEN) as (_, address):
            await visit(partial(look, address, mailer), WIDTHS["wide"], 900)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="DIRECTORY")
    everything = parser.parse_args().all
    if everything is not None:
        everything.mkdir(parents=True, exist_ok=True)
    with PrivateServer(next(iter(FOUND.values()))) as server:
        async with serving(server, "--token", TOKEN) as (client, address):
            await fill(client)
            await trouble(client, server)
            remember(server)
            async with running(work(client.reliable_queue("thumbs"))):
                for width, pixels in WIDTHS.items():
                    for dark in (False, True):
                        how = partial(look_at, address, everything, width, dark)
                        await visit(how, pixels, 900, dark=dark)
    await incident()


if __name__ == "__main__":
    asyncio.run(main())
