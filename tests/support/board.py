"""Helpers for the dashboard tests: browsers that need neither a window nor a network."""

from __future__ import annotations

import html
import re
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from delayq._dashboard import rendering
from delayq._reliable.keys import ReliableKeys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayq import Client, ReliableQueue

TOKEN = "sesame-sesame-sesame"
HOST = "http://board.test"
JOBS = "queue?kind=reliable&name=jobs"
ORDERS = "queue?kind=delayed&name=orders"
ONE = "message?kind=reliable&name=jobs&at=//one"
SETTINGS = "settings?kind=reliable&name=jobs"

_templates = cache(rendering.environment)


@pytest.fixture(autouse=True)
def _templates_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the test the time in which each dashboard compiles its templates."""
    monkeypatch.setattr("delayq._dashboard.board.environment", _templates)


@pytest.fixture
async def one(client: Client) -> ReliableQueue[Any]:
    """Return a queue with one message, which is due in an hour."""
    jobs = client.reliable_queue("jobs")
    await jobs.offer("a payload", 3600, id="one")
    return jobs


@asynccontextmanager
async def browse(app: Any, base: str = f"{HOST}/") -> AsyncIterator[httpx.AsyncClient]:
    """Open a client that calls the application directly and, like a browser, states its origin."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(
        transport=transport, base_url=base, headers={"Origin": HOST}
    ) as browser:
        yield browser


async def log_in(browser: httpx.AsyncClient, token: str = TOKEN) -> None:
    answer = await browser.post("login", data={"token": token})
    assert answer.status_code == 303, answer.text


def form_token(page: str) -> str:
    """Return the login's form token from a page."""
    return field(page, "form_token")


def links(page: str, to: str) -> list[str]:
    addresses = re.findall(r'href="([^"]+)"', page)
    return [html.unescape(address) for address in addresses if address.startswith(to)]


def field(page: str, name: str) -> str:
    match = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert match is not None, page
    return html.unescape(match[1])


def form(page: str, *field_names: str) -> dict[str, str]:
    """Return the hidden fields with which every action is sent, and further ones."""
    return {name: field(page, name) for name in ("form_token", "kind", "name", *field_names)}


def texts(page: str) -> str:
    """Return the readable text of a page on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


async def page(browser: httpx.AsyncClient, address: str, status: int = 200) -> str:
    answer = await browser.get(address)
    assert answer.status_code == status, answer.text
    return answer.text


async def act(browser: httpx.AsyncClient, address: str, do: str, **more: Any) -> str:
    """Submit the form of a page, and return the page to which it redirects."""
    fields = form(await page(browser, address), *["at"] * address.startswith("message"))
    return await send(browser, fields | {"do": do} | more)


async def send(browser: httpx.AsyncClient, fields: dict[str, Any], status: int = 303) -> str:
    """Submit a form, and return the page that answers it."""
    answer = await browser.post("act", data=fields)
    assert answer.status_code == status, answer.text
    return answer.text if status != 303 else await page(browser, answer.headers["location"])


async def on_all_pages(browser: httpx.AsyncClient, address: str, wanted: str) -> list[str]:
    """Return what matches on a page and on all that follow it."""
    matches: list[str] = []
    while address:
        shown_page = await page(browser, address)
        matches += re.findall(wanted, shown_page)
        following = re.search(r'rel="next" href="([^"]+)"', shown_page)
        address = html.unescape(following[1]) if following else ""
    return matches


async def fill_with_letters(
    raw: Any, numbers: range, partitions: int = 1, queue: str = "jobs"
) -> None:
    """Store dead letters, in turns in each partition, which died one after the other."""
    for partition in range(partitions):
        keys = ReliableKeys.of(queue, partition=partition)
        bodies = {
            f"d{n}": f'{{"reason":"in {partition}"}}\n1 \n{n}'
            for n in numbers[partition::partitions]
        }
        await raw.zadd(keys.dead, {letter: 1e15 + int(letter[1:]) for letter in bodies})
        await raw.hset(keys.dead_messages, mapping=bodies)
