"""A real browser for the dashboard, and queues for it to show."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
import shutil
import sys
import time
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

import delayq
from delayq import Offer
from delayq._reliable.keys import ReliableKeys
from delayq._reliable.report_format import packed
from delayq.stats import bucket_of
from tests.support.board import TOKEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from delayq import Client
    from tests.support.servers import PrivateServer

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
WITHIN = 120.0
_GONE = "Node with given id does not belong to the document"
MAILS = "kind=reliable&name=mails"
PAGES = {
    "login": "login",
    "overview": "",
    "queue": "queue?kind=reliable&name=thumbs",
    "ready": f"queue?{MAILS}&state=leased",
    "delayed": "queue?kind=delayed&name=orders:unpaid",
    "dead": f"dead?{MAILS}",
    "letter": f"message?{MAILS}&at=//bounce-0&dead=1",
    "message": f"message?{MAILS}&at=//welcome-ada",
    "settings": f"settings?{MAILS}",
    "history": f"history?{MAILS}&span=hour",
    "workers": "workers",
    "search": "search?q=customer",
    "letters": f"letters?{MAILS}&error=mailbox",
    "causes": f"letters?{MAILS}&by=type",
    "groups": "groups?kind=reliable&name=reports",
    "group": f"groups?{MAILS}&q=tenant-7",
    "all-dead": "all-dead",
    "retries": f"retries?{MAILS}",
    "all-retries": "all-retries?by=error",
    "handled": f"queue?{MAILS}&state=handled",
    "done": f"message?{MAILS}&at=//done-edsger",
    "all-schedules": "all-schedules",
    "batches": "batches?kind=reliable&name=reports",
    "schedules": "schedules?kind=reliable&name=reports",
    "enqueue": f"enqueue?{MAILS}",
    "purge": f"purge?{MAILS}",
    "server": "server",
    "nothing": "?q=nothing",
    "empty": "dead?kind=reliable&name=thumbs",
    "failed": "queue?kind=reliable&name=no-such-queue",
}
"""Every page, with the queues of :func:`fill` and :func:`trouble`; the login comes first."""


@asynccontextmanager
async def serving(server: PrivateServer, *options: str) -> AsyncIterator[tuple[Client, str]]:
    """Run ``delayq dashboard`` in a process of its own. Yields a client, and its address."""
    command = ("-m", "delayq", "dashboard", "--url", server.url, "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
    assert process.stdout is not None
    try:
        first_line = (await asyncio.wait_for(process.stdout.readline(), WITHIN)).decode()
        address_match = re.match(r"http://\S+/", first_line)
        assert address_match is not None, first_line
        async with delayq.connect(server.url) as client:
            yield client, address_match[0]
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), WITHIN)


async def visit(look: Callable[[Seen], None], *args: Any, **options: Any) -> None:
    """Look at pages with a :func:`chromium` that has nothing to complain about."""

    def with_browser() -> None:
        with chromium(*args, **options) as browser:
            look(browser)
            assert not browser.complaints()

    await asyncio.to_thread(with_browser)


@contextmanager
def chromium(
    width: int = 1200, height: int = 900, *, dark: bool = False, script: bool = True
) -> Iterator[Any]:
    """Start a browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ["headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"]:
        options.add_argument(f"--{argument}")
    options.add_argument("--no-proxy-server")
    if not script:
        no_script = {"profile.managed_default_content_settings.javascript": 2}
        options.add_experimental_option("prefs", no_script)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser = Seen(driver)
        browser.prefer("dark" if dark else "light")
        yield browser
    finally:
        driver.quit()


class Seen:
    """Drives a browser in the words of a person sitting in front of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.clicked: set[str] = set()

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def go(self, address: str) -> None:
        self.driver.get(address)

    def text(self) -> str:
        return " ".join(self.driver.find_element("tag name", "body").text.split())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def click(self, text: str) -> None:
        """Click the link or button with this text, once it is there: live pages change."""
        path = f'//a[normalize-space()="{text}"] | //button[normalize-space()="{text}"]'

        def click_first() -> bool:
            elements = self.driver.find_elements("xpath", path)
            for element in elements[:1]:
                element.click()
            return bool(elements)

        self.until(click_first)
        self.clicked.add(text)

    def follow(self, *steps: tuple[str, str | None]) -> None:
        """Click one link or button after the other, and wait for what each leads to.

        A step may also fill in a field (``#error``), go to a page (``/search``), or click what has
        no text: a selector, and None.
        """
        for what, said in steps:
            if said is None:
                self.find(what).click()
            elif what[0] in "#[":
                self.type(what, said)
            else:
                if what[0] == "/":
                    self.go(urljoin(self.driver.current_url, what))
                else:
                    self.click(what)
                self.until(said)

    def put_off(self) -> None:
        """Give the message of a page another time."""
        self.follow(("#delay", "5"), ("#unit", "days"), ("Reschedule", "Due in 4 d 23 h"))

    def points(self, line: str) -> int:
        """Return how many points a line of a live view has, less one."""
        return int(self.find(f"#{line} polyline").get_attribute("points").count(","))

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        if field.tag_name != "select":
            field.clear()
        field.send_keys(text)

    def until(self, said: str | Callable[[], Any], within: float = WITHIN) -> None:
        from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
        from selenium.webdriver.support.wait import WebDriverWait

        def is_there(_: object) -> Any:
            try:
                return said() if callable(said) else said in self.text()
            except WebDriverException as error:
                # The page changed while it was being read. Chromium has two names for that.
                if isinstance(error, StaleElementReferenceException) or _GONE in str(error):
                    return False
                raise

        WebDriverWait(self.driver, within, 0.1).until(is_there)

    def reload_until_gone(self, text: str) -> None:
        def has_gone() -> bool:
            self.driver.refresh()
            return text not in self.text()

        self.until(has_gone)

    def log_in(self, token: str = TOKEN, said: str = "logged in as an operator") -> None:
        self.type("#token", token)
        self.find("main button").click()
        self.until(said)

    def complaints(self) -> list[str]:
        """Return the browser's complaints: violated policies, missing files, failed scripts.

        That a form was refused is none.
        """
        log = self.driver.get_log("browser")
        messages = [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]
        return [entry for entry in messages if not re.search(r"with a status of 40[03]\b", entry)]

    def picture(self, path: Path, most: int) -> None:
        """Take a picture of the page, as tall as its content up to a height."""
        height = self.driver.execute_script(
            "return Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)"
        )
        width = self.driver.execute_script("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, most), "scale": 1}
        options = {"clip": clip, "captureBeyondViewport": True}
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.write_bytes(base64.b64decode(picture["data"]))


def mail(to: str, template: str = "welcome", **options: Any) -> Offer[dict[str, str]]:
    return Offer({"to": f"{to}@example.org", "template": template}, **options)


async def fill(client: Client) -> None:
    mails = client.reliable_queue("mails", lease=600, keep=86_400)
    await mails.offer({"to": "edsger@example.org"}, id="done-edsger")
    for message in await mails.claim(1):
        await message.ack(result={"accepted": True})
    delays = {"ada": 600, "grace": 3000, "edsger": 7000, "barbara": 40_000, "donald": 300_000}
    await mails.offer_many(
        mail(name, delay=delay, id=f"welcome-{name}") for name, delay in delays.items()
    )
    await mails.offer_many(mail(f"customer-{i}", "invoice", delay=700 + 37 * i) for i in range(60))
    await mails.offer_many(mail("nobody", id=f"bounce-{i}", priority=9) for i in range(4))
    error = "Traceback (most recent call last):\nLookupError: no mailbox of this name"
    await bury(mails, 4, error)
    await mails.offer_many(mail("nobody", id=f"retry-{i}", max_attempts=5) for i in range(6))
    errors = ("TimeoutError: no answer within 30 s", "ConnectionError: refused")
    for at, message in enumerate(await mails.claim(6)):
        await message.nack(60 + 40 * at, error=errors[at % 4 == 3])
    await mails.offer_many(mail("now", headers={"trace": "4bf92f35"}) for _ in range(12))
    await mails.claim(3)
    orders = client.delayed_queue("orders:unpaid")
    await orders.offer_many([({"order": 1000 + i}, 600.0 * (i + 1)) for i in range(40)])
    parts = client.reliable_queue("thumbnails", partitions=8)
    await parts.offer_many([Offer({"image": i}, delay=300 + i) for i in range(200)])
    reports = client.reliable_queue("reports")
    await reports.offer({"report": "monthly"}, delay=86_400)
    await reports.schedule("monthly", cron="0 3 1 * *", value={}, timezone="Europe/Berlin")
    for customers, failed in ((2, 0), (4, 1), (40, 2)):
        month = [Offer({"customer": i}, priority=9 if i < 9 else 0) for i in range(customers)]
        await reports.offer_batch(month, then=Offer({"report": "all"}, delay=86_400))
        messages = await reports.claim(9)
        for message in messages[failed : len(messages) - failed]:
            await message.ack()
        for message in messages[:failed]:
            await message.bury("no such customer")
    await reports.pause()
    await mails.groups.set_limit("tenant-7", delayq.Limit(5, 100, 60))
    await reports.groups.set_limit("ada", delayq.Limit(2))
    await reports.groups.pause("bob")
    visits = [Offer({"visit": i}, group=("ada", "bob", "eve")[i % 3]) for i in range(30)]
    await reports.offer_many([*visits, Offer({"visit": 30}, delay=600, group="ada")])


async def bury(queue: delayq.ReliableQueue[Any], count: int, error: str | None = None) -> None:
    for message in await queue.claim(count):
        await message.bury("rejected", error)


async def work(jobs: delayq.ReliableQueue[Any]) -> None:
    """Keep a queue busy."""
    at = 0
    while True:
        at += 1
        count = 8 + at * 7 % 13 + at % 5
        await jobs.offer_many(
            [Offer({"image": f"photos/{i}.jpeg"}, delay=2 + i / 10) for i in range(count)]
        )
        await asyncio.sleep(0.4)
        for message in await jobs.claim(count - at % 7):
            await message.ack()


AGE = """local waiting = KEYS[1]
for _, message in ipairs(redis.call('ZRANGE', waiting, 0, -1)) do
  redis.call('ZINCRBY', waiting, -tonumber(ARGV[1]), message)
end"""


async def trouble(client: Client, server: PrivateServer) -> None:
    """Add queues that are late, one without consumers, and one whose attempts fail."""
    for name, count in (("invoices", 0), ("webhooks", 30)):
        queue = client.reliable_queue(name, lease=600)
        await queue.offer_many([Offer({"n": i}) for i in range(70)])
        for message in await queue.claim(count) if count else ():
            if message.value["n"] >= 6:
                await message.nack(1800, error="ConnectionError: connection refused")
        minutes = 14 * 60_000_000
        server.call("EVAL", AGE, "1", ReliableKeys.of(name).waiting[0], str(minutes))


# Of each queue: messages a minute, the share of attempts that fails, how late messages are (s), how
# long handlers take (s); and how many minutes ago which of these figures changed, and by how much.
PASTS: dict[str, Any] = {
    "mails": (900, 0.01, 0.02, 0.18, (26, 14, (0.6, 8, 900, 3))),
    "webhooks": (1600, 0.004, 0.03, 0.4, (9, 0, (0.7, 130, 60, 8))),
    "invoices": (12, 0.0, 0.01, 1.2, (15, 0, (0.0, 1, 1, 1))),
    "thumbs": (300, 0.001, 0.005, 0.06, (40, 36, (2.5, 1, 40, 1))),
    "reports": (3, 0.1, 0.2, 40.0, (18, 0, (0.0, 1, 1, 1))),
}


def remember(server: PrivateServer) -> None:
    """Give queues a past: 30 days with busy afternoons, quiet nights and a change lately."""
    now, chance = time.time(), random.Random(1)
    for name, (rate, share, late, took, (since, until, change)) in PASTS.items():
        key = ReliableKeys.of(name).history
        for unit, seconds, kept in (("m", 60, 1440), ("h", 3600, 720)):
            fields = []
            for number in range(int(now) // seconds - kept + 1, int(now) // seconds + 1):
                ago = (now - number * seconds) / 60
                is_changed = unit == "m" and until <= ago < since
                of_rate, of_share, of_late, of_took = change if is_changed else (1, 1, 1, 1)
                day = 0.55 + 0.45 * math.sin(2 * math.pi * (number * seconds / 86_400 - 0.3))
                noise = 0.8 + 0.4 * chance.random()
                part = min(1.0, ago * 60 / seconds)
                count = round(rate * seconds / 60 * day * noise * of_rate * part)
                failed = round(count * min(0.8, share * of_share))
                dead = failed // 12
                counts = {
                    "o": round(count * (2 - noise)),
                    "h": count - failed,
                    "f": failed,
                    "d": dead,
                }
                spreads = [
                    {
                        bucket_of(median * noise**3 * 1.6**step): count // (1 + step * step)
                        for step in range(-2, 7)
                    }
                    for median in (late * of_late, took * of_took)
                ]
                if text := packed(counts, *spreads):
                    fields += [f"{unit}{number % kept}", f"{number} {text}"]
            server.call("HSET", key, *fields)
