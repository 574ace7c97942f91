"""Helpers for the dashboard tests: browsers that need neither a window nor a network."""

from __future__ import annotations

import html
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOKEN = "sesame-sesame-sesame"
HOST = "http://board.test"


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


def word(page: str) -> str:
    """Return the login's form token from a page."""
    found = re.search(r'name="word" value="([^"]+)"', page)
    assert found is not None, page
    return found[1]


def links(page: str, to: str) -> list[str]:
    return [
        html.unescape(each) for each in re.findall(r'href="([^"]+)"', page) if each.startswith(to)
    ]


def field(page: str, name: str) -> str:
    found = re.search(rf'name="{name}" value="([^"]*)"', page)
    assert found is not None, page
    return html.unescape(found[1])


def form(page: str, *more: str) -> dict[str, str]:
    """Return the hidden fields with which every action is sent, and further ones."""
    return {name: field(page, name) for name in ("word", "kind", "name", *more)}


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
    answer = await browser.post("act", data=fields | {"do": do} | more)
    assert answer.status_code == 303, answer.text
    return await page(browser, answer.headers["location"])


async def on_all_pages(browser: httpx.AsyncClient, address: str, wanted: str) -> list[str]:
    """Return what matches on a page and on all that follow it."""
    seen: list[str] = []
    while address:
        shown = await page(browser, address)
        seen += re.findall(wanted, shown)
        following = re.search(r'rel="next" href="([^"]+)"', shown)
        address = html.unescape(following[1]) if following else ""
    return seen
