"""The command ``top``: a live view of all queues, those in trouble first."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import termios
import time
import tty
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from delayq._reliable.replies import LIVE_STATES
from delayq.admin.catalog import list_queues
from delayq.admin.states import undeliverable
from delayq.cli.options import AsJson, Queues, Url
from delayq.cli.output import console, cut, moment_json, print_json, words, write
from delayq.cli.queues import cause_of, is_late, state_of, stats_or_error
from delayq.cli.running import clock, with_client
from delayq.errors import ServerError, ServerRefused
from delayq.stats import COUNTED_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from rich.console import RenderableType

    from delayq import Client, QueueDepth
    from delayq.admin.catalog import FoundQueue

# Listing queues reads the names of all keys, so it gets at most a twentieth of the time.
_SHARE = 20
# The rate is the change over this many seconds.
_WINDOW = 10.0
# How long the reason why a queue is late counts, seconds; and how many are looked for at a time.
_CAUSES_COUNT_FOR = 5.0
_MOST_EXPLAINED = 10
# The lines around the rows.
_OTHER_LINES = 5
# Of all states but that of a paused queue, which would leave less room for the reasons.
_STATE_WIDTH = len("dead letters")
# In the place of a key: there is something new to draw.
_UPDATED = ""
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
}


@dataclass(frozen=True)
class Line:
    """A queue as the view shows it.

    Attributes:
        queue: The queue.
        depth: Its figures; an error as text if it cannot be read.
        rate: The growth in messages per second; negative if it shrinks, None if unknown.
        cause: Why its messages are late, which errors they meet, or why it cannot be read; empty if
            nothing is wrong.
    """

    queue: FoundQueue
    depth: QueueDepth | str
    rate: float | None = None
    cause: str = ""

    def figure(self, name: str) -> float:
        """Return a figure to sort by."""
        if isinstance(self.depth, str):
            return 0
        if name == "dead":
            return undeliverable(self.depth)
        figure: float = getattr(self.depth, name)
        return figure

    @property
    def is_late(self) -> bool:
        """Whether messages have been due for a second or longer."""
        return not isinstance(self.depth, str) and is_late(self.depth)

    @property
    def state(self) -> tuple[str, str]:
        """Its state in words, and their style."""
        return state_of(self.queue, self.depth, self.cause)

    @property
    def trouble(self) -> int:
        """How urgently it needs attention: 0 if it does not."""
        if isinstance(self.depth, str):
            return 4
        if self.depth.paused:
            return 2
        if self.is_late or self.cause:
            return 3
        return 1 if undeliverable(self.depth) else 0


def _by_count(state: str, line: Line) -> tuple[object, ...]:
    return (-line.figure(state), line.queue.name)


_Order = tuple[str, "Callable[[Line], tuple[object, ...]]"]
ORDERS: tuple[_Order, ...] = (
    ("trouble", lambda line: (-line.trouble, -line.figure("oldest_due_age"), line.queue.name)),
    ("queue", lambda line: (line.queue.name, line.queue.kind)),
    *((state, partial(_by_count, state)) for state in COUNTED_STATES),
    ("change/s", lambda line: (-(line.rate or 0), line.queue.name)),
)
"""The orders that the arrow keys choose, by the titles of their columns."""


@dataclass
class View:
    """The view that the user has chosen, and how to draw it."""

    server: str
    lines: Sequence[Line] = ()
    at: datetime | None = None
    problem: str = ""
    order: int = 0
    first: int = 0

    def on_key(self, key: str) -> bool:
        """React to a key. Returns whether to go on."""
        if key in ("left", "right"):
            self.order = (self.order + (1 if key == "right" else -1)) % len(ORDERS)
        elif key in ("up", "down"):
            self.first += 1 if key == "down" else -1
        return key not in ("q", "Q")

    def picture(self, height: int) -> RenderableType:
        """Return the screen, with as many queues as fit."""
        room = max(1, height - _OTHER_LINES)
        self.first = max(0, min(self.first, len(self.lines) - room))
        title, by = ORDERS[self.order]
        visible = sorted(self.lines, key=by)[self.first : self.first + room]
        return Group(
            self._heading(), "", self._table(visible, title), "", self._footer(len(visible))
        )

    def _heading(self) -> RenderableType:
        totals = "  ".join(
            f"{name} {sum(line.figure(name) for line in self.lines):,.0f}"
            for name in COUNTED_STATES
        )
        at = f"{self.at.astimezone():%H:%M:%S}" if self.at is not None else ""
        heading = words("") + words("delayq top", "bold")
        return cut(heading + words(f"  {at}  {totals}  {self.server}"))

    def _table(self, lines: Sequence[Line], order: str) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("state", *(name for name, _ in ORDERS[1:])):
            is_sort_column = title == order or (title, order) == ("state", "trouble")
            table.add_column(
                words(title, "bold reverse" if is_sort_column else "bold"),
                justify="left" if title in ("state", "queue") else "right",
                # Only names become narrower.
                no_wrap=title != "queue",
                # Columns must not jump when a word in them changes.
                min_width=_STATE_WIDTH if title == "state" else len(title),
            )
        table.add_column(words("why" if any(line.cause for line in lines) else ""), ratio=1)
        for line in lines:
            state, style = line.state
            name = line.queue.argument
            figures = (
                ["-"] * len(COUNTED_STATES)
                if isinstance(line.depth, str)
                else [f"{line.figure(column):,.0f}" for column in COUNTED_STATES]
            )
            rate = "-" if line.rate is None else f"{line.rate:+,.1f}" if line.rate else "0"
            table.add_row(
                words(state, style), cut(words(name)), *figures, rate, cut(words(line.cause, "dim"))
            )
        return table

    def _footer(self, count: int) -> RenderableType:
        if self.problem:
            return cut(words(self.problem, "bold red"))
        if not self.lines:
            return words("no queues")
        last = self.first + count
        return cut(
            words(
                f"{self.first + 1}-{last} of {len(self.lines)} queues   left/right sort   up/down"
                " scroll   q quit",
                "dim",
            )
        )


@dataclass(frozen=True)
class _Cause:
    """Why a queue was late, or failed, and when that was found out on the monotonic clock."""

    late: bool = False
    text: str = ""
    found_at: float = -math.inf

    def of(self, *, late: bool) -> _Cause:
        """Return this cause, or none if the queue has become late, or is late no longer."""
        return self if late == self.late else _Cause(late)


@dataclass
class Monitor:
    """Reads the figures of the queues at intervals."""

    client: Client
    named: Sequence[FoundQueue]
    _queues: Sequence[FoundQueue] = ()
    _search_at: float = 0.0
    _past: dict[FoundQueue, deque[tuple[float, int]]] = field(default_factory=dict)
    _causes: dict[FoundQueue, _Cause] = field(default_factory=dict)

    async def read(self) -> list[Line]:
        """Return every queue with its figures."""
        if not self.named and time.monotonic() >= self._search_at:
            began = time.monotonic()
            self._queues = await list_queues(self.client)
            took = time.monotonic() - began
            self._search_at = began + took + max(1.0, took * _SHARE)
        queues = self.named or self._queues
        current = {*queues}
        self._past = {queue: past for queue, past in self._past.items() if queue in current}
        lines = [await self._line(queue) for queue in queues]
        readable = [line for line in lines if not isinstance(line.depth, str)]
        explained = {line.queue: line for line in await self._explained(readable)}
        return [explained.get(line.queue, line) for line in lines]

    async def _line(self, queue: FoundQueue) -> Line:
        stats = await stats_or_error(self.client, queue)
        if isinstance(stats, str):
            return Line(queue, stats, cause=stats)
        depth, _ = stats
        now, count = time.monotonic(), sum(getattr(depth, state) for state in LIVE_STATES)
        past = self._past.setdefault(queue, deque())
        past.append((now, count))
        while len(past) > 2 and now - past[0][0] > _WINDOW:
            past.popleft()
        (began, before), rate = past[0], None
        if now > began:
            rate = (count - before) / (now - began)
        return Line(queue, depth, rate)

    async def _explained(self, lines: Sequence[Line]) -> list[Line]:
        """Return the lines with the reasons why queues are late, or fail.

        It takes some calls to find one, so it counts a while, and only some are looked for at a
        time: those that are the oldest, half of them of late queues.
        """
        now = time.monotonic()
        self._causes = {
            line.queue: self._causes.get(line.queue, _Cause()).of(late=line.is_late)
            for line in lines
        }
        outdated = [
            line for line in lines if now - self._causes[line.queue].found_at > _CAUSES_COUNT_FOR
        ]
        outdated.sort(key=lambda line: self._causes[line.queue].found_at)
        late = [line for line in outdated if line.is_late]
        others = [line for line in outdated if not line.is_late]
        # Each half may also have the turns that the other one leaves.
        half = _MOST_EXPLAINED // 2
        turns_of_late = max(half, _MOST_EXPLAINED - len(others))
        for line in late[:turns_of_late] + others[: max(half, _MOST_EXPLAINED - len(late))]:
            assert not isinstance(line.depth, str)
            try:
                text = await cause_of(self.client, line.queue, line.depth)
            except ServerRefused as error:
                text = str(error)
            self._causes[line.queue] = _Cause(line.is_late, text, now)
        return [replace(line, cause=self._causes[line.queue].text) for line in lines]


def top(
    queues: Queues = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two updates.")
    ] = 1.0,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Watch all queues, or those that you name, with those in trouble first.

    Left and right choose the column to sort by, up and down scroll, and q quits. Without a
    terminal, or with --json, prints a line for each queue at each update until Ctrl-C.

    Exit status: 0 after q, or 130 after Ctrl-C.

    Example: `delayq top`
    """
    named = list(queues or ())

    async def act(client: Client) -> None:
        monitor = Monitor(client, named)
        if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            await _print(monitor, interval, as_json=as_json)
        else:
            await _live(monitor, interval)

    with_client(url, act)


async def _print(monitor: Monitor, interval: float, *, as_json: bool) -> None:
    while True:
        lines = sorted(await monitor.read(), key=ORDERS[0][1])
        at = moment_json(await clock(monitor.client))
        for line in lines:
            state, _ = line.state
            counts = {
                name: None if isinstance(line.depth, str) else int(line.figure(name))
                for name in COUNTED_STATES
            }
            facts = {
                "at": at,
                "kind": line.queue.kind,
                "queue": line.queue.name,
                "state": state,
                **counts,
                "oldest_due_age": round(line.figure("oldest_due_age"), 3),
                "change_per_s": None if line.rate is None else round(line.rate, 3),
                **({"cause": line.cause} if line.cause else {}),
            }
            if as_json:
                print_json(facts)
            else:
                write(" ".join(f"{name}={value}" for name, value in facts.items()))
        await asyncio.sleep(interval)


async def _live(monitor: Monitor, interval: float) -> None:
    view = View(monitor.client.label)
    view.lines, view.at = await monitor.read(), await clock(monitor.client)
    screen = console()
    with _keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as live:
        # Apart from the keys, which must work while the server does not answer.
        updates = asyncio.ensure_future(_update(monitor, view, interval, keys))
        updates.add_done_callback(lambda _: keys.put_nowait(_UPDATED))
        try:
            while not updates.done():
                live.update(view.picture(screen.height), refresh=True)
                if not view.on_key(await keys.get()):
                    return
            await updates
        finally:
            updates.cancel()
            await asyncio.wait([updates])


async def _update(
    monitor: Monitor, view: View, interval: float, keys: asyncio.Queue[str]
) -> NoReturn:
    """Read the figures at intervals."""
    while True:
        await asyncio.sleep(interval)
        try:
            view.lines, view.at = await monitor.read(), await clock(monitor.client)
            view.problem = ""
        except ServerError as error:
            # The figures stay, and the next update tries again.
            view.problem = str(error)
        keys.put_nowait(_UPDATED)


@contextmanager
def _keys() -> Iterator[asyncio.Queue[str]]:
    """Yield the keys that are typed, without waiting for whole lines. Ctrl-C remains a signal."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 1024).decode(errors="replace")
        if not typed:  # the terminal is gone
            keys.put_nowait("q")
        while typed:
            name = _KEYS.get(typed[:3])
            keys.put_nowait(name or typed[0])
            typed = typed[3 if name else 1 :]

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
