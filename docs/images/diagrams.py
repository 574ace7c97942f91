"""Draws the diagrams of docs/design.md: ``python docs/images/diagrams.py`` writes them beside this
file, or into a directory.

They are narrow, with large letters, so that you can read them on a phone, and have a background of
their own, which is light or dark as the reader prefers.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

WIDTH = 420
SANS = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, Menlo, Consolas, monospace"
INK, FAINT = "#1c2430", "#5c6675"
# Line and area.
BLUE = ("#2f6fb2", "#e3eefa")
GREEN = ("#2f7d4f", "#e0f2e7")
ORANGE = ("#b3590a", "#fdecd8")
RED = ("#b3261e", "#fbe1df")
GREY = ("#7a8494", "#eef0f4")
Colour = tuple[str, str]
# What becomes of each colour where the reader prefers dark pages.
DARK = {
    INK: "#e8ebf0",
    FAINT: "#a3adba",
    BLUE[0]: "#7ab4f0",
    BLUE[1]: "#17304a",
    GREEN[0]: "#6cc492",
    GREEN[1]: "#153524",
    ORANGE[0]: "#f0a35c",
    ORANGE[1]: "#412a12",
    RED[0]: "#f28b82",
    RED[1]: "#4a1c19",
    GREY[0]: "#8a94a3",
    GREY[1]: "#262d38",
    "#fcfcfe": "#161b22",
    "#ffffff": "#0f141a",
    "#fffaf3": "#221b12",
    "#f4f8fd": "#121d2a",
    "#f3f5f8": "#1f2630",
    "#e1e5ec": "#2f3742",
    "#ccd2dc": "#3a4350",
}


class Picture:
    """An SVG, built up element by element."""

    def __init__(self, title: str, height: int, *, card: bool = True) -> None:
        """Begin a picture, on a card of its own, or on the page that shows it."""
        self.height = height
        size = f'width="{WIDTH * 1.25:g}" height="{height * 1.25:g}" viewBox="0 0 {WIDTH} {height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{SANS}">',
            f"<title>{escape(title)}</title>",
            "<style>@media (prefers-color-scheme: dark) {",
            *(
                f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
                for light, dark in DARK.items()
            ),
            "}</style>",
            "<defs>",
        ]
        for line in dict.fromkeys(
            (FAINT, *(colour[0] for colour in (BLUE, GREEN, ORANGE, RED, GREY)))
        ):
            self._parts.append(
                f'<marker id="m{line[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
                ' markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"'
                f' fill="{line}"/></marker>'
            )
        self._parts.append("</defs>")
        if card:
            self._parts.append(
                f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"'
                ' fill="#fcfcfe" stroke="#ccd2dc"/>'
            )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        extra = ' font-weight="600"' if bold else ""
        if code:
            extra += f' font-family="{MONO}"'
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"'
            f' text-anchor="{anchor}"{extra}>{escape(words)}</text>'
        )

    def lines(
        self,
        x: float,
        y: float,
        *several: str,
        size: float = 12,
        colour: str = FAINT,
        anchor: str = "start",
    ) -> None:
        for number, words in enumerate(several):
            self.text(x, y + number * (size + 4), words, size=size, colour=colour, anchor=anchor)

    def area(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: Colour,
        *,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line, fill = colour
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}"'
            f' stroke="{line}"{dash}/>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        colour: Colour,
        head: str,
        *below: str,
        code: bool = False,
    ) -> None:
        """Draw a box with a bold line, and smaller lines below it, all centred."""
        self.area(x, y, width, 28 + 15 * len(below), colour)
        self.text(
            x + width / 2,
            y + 18,
            head,
            bold=True,
            anchor="middle",
            code=code,
            size=12.5 if code else 13,
        )
        for number, words in enumerate(below):
            self.text(
                x + width / 2, y + 34 + 15 * number, words, size=11, colour=FAINT, anchor="middle"
            )

    def arrow(
        self, *points: tuple[float, float], colour: str = FAINT, dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}'
            f' marker-end="url(#m{colour[1:]})"/>'
        )

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        *,
        colour: str = FAINT,
        width: float = 1.4,
        dash: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{colour}"'
            f' stroke-width="{width:g}"{dashed} fill="none"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"/>'
        )

    def dot(self, x: float, y: float, colour: str, radius: float = 4.5) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{colour}"/>')

    def cross(self, x: float, y: float, colour: str = RED[0], reach: float = 5) -> None:
        for slope in (1, -1):
            self.line(
                x - reach, y - reach * slope, x + reach, y + reach * slope, colour=colour, width=2.4
            )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def wheel() -> Picture:
    p = Picture("The timer wheel: three levels of buckets, and how a timer moves through them", 476)
    p.text(16, 28, "A timer that is due in ten minutes", size=15, bold=True)
    p.lines(16, 46, "A client's wheel: ticks of 0.025 ms, 2,048 of them in a wheel.")
    rows = (
        (70, ORANGE, "very far", "104.9 s to a bucket; everything later", 8, 7),
        (182, BLUE, "far", "51.2 ms to a bucket; the next 105 to 210 s", 16, 14),
        (294, GREEN, "near", "a tick to a bucket; the next 51 to 102 ms", 32, 29),
    )
    left, width = 20, 380
    for y, colour, name, reach, count, place in rows:
        p.text(left, y + 16, name, bold=True, colour=colour[0], size=14)
        p.text(left + 68, y + 16, reach, size=11.5, colour=FAINT)
        step = width / count
        for number in range(count):
            filled = number == place or number % (count // 4 + 2) == 1
            p.area(
                left + number * step + 1,
                y + 24,
                step - 2,
                26,
                colour if filled else ("#ccd2dc", "#ffffff"),
                dashed=not filled,
            )
        p.dot(left + (place + 0.5) * step, y + 37, colour[0])
    moves = (
        (120, ORANGE, 7.5 / 8, 14.5 / 16, "104.9 s before this bucket begins"),
        (232, BLUE, 14.5 / 16, 29.5 / 32, "51.2 ms before this bucket begins"),
    )
    for y, colour, start, end, when in moves:
        p.arrow((left + start * width, y + 4), (left + end * width, y + 82), colour=colour[0])
        p.text(left + 322, y + 24, when, size=11.5, colour=colour[0], anchor="end")
        p.text(
            left + 322, y + 39, "spread over the finer level", size=11.5, colour=FAINT, anchor="end"
        )
    p.arrow((left + 29.5 / 32 * width, 350), (left + 29.5 / 32 * width, 384), colour=GREEN[0])
    p.text(left + 322, 372, "when its tick is over", size=11.5, colour=GREEN[0], anchor="end")
    p.box(left + 165, 387, 215, GREEN, "callback(timeout)", "never early, a tick late at most")
    p.lines(
        16,
        405,
        "Dashed buckets do",
        "not exist: only those",
        "with a timer do.",
        "One alarm, for the",
        "first of them.",
        size=11.5,
    )
    return p


def message() -> Picture:
    p = Picture(
        "The path of a message through a delayed queue, from the producer through the server to the"
        " consumer",
        640,
    )
    lanes = ((10, BLUE, "producer"), (146, GREY, "Redis, Valkey"), (282, GREEN, "consumer"))
    for x, colour, name in lanes:
        p.area(x, 12, 128, 540, (colour[0], "#ffffff"))
        p.text(x + 64, 31, name, bold=True, anchor="middle", colour=colour[0], size=14)
    left, middle, right = 74, 210, 346
    p.box(20, 44, 108, BLUE, "offer(delay)", "encodes it")
    p.box(20, 106, 108, BLUE, "Offers", "waiting offers", "share a call")
    p.arrow((left, 87), (left, 104))
    p.box(292, 44, 108, GREEN, "take()", "waits, like loops")
    p.box(292, 106, 108, GREEN, "CallerQueue", "callers waiting,", "in order")
    p.arrow((right, 87), (right, 104))

    p.box(154, 150, 112, GREY, "offer.lua", "server's time", "+ delay = due", code=True)
    p.arrow((128, 140), (144, 140), (144, 170), (152, 170), colour=BLUE[0])
    p.box(154, 234, 112, ORANGE, "timeout", "ZSET, by due time")
    p.box(154, 296, 112, ORANGE, "ordered", "LIST, offer order")
    p.arrow((middle, 208), (middle, 232))
    p.text(middle, 290, "and", size=11, colour=FAINT, anchor="middle")

    p.box(292, 184, 108, GREEN, "Subscriber", "receives a new", "head's due time")
    p.arrow((266, 192), (290, 192), colour=ORANGE[0], dashed=True)
    p.box(292, 268, 108, GREEN, "WakeupLoop", "sets one timer,", "the earliest")
    p.arrow((right, 242), (right, 266))
    p.box(292, 352, 108, GREEN, "timer wheel", "waits")
    p.arrow((right, 326), (right, 350))
    p.box(292, 416, 108, GREEN, "TransferTask", "one call at", "a time")
    p.arrow((right, 395), (right, 414))
    p.text(right + 6, 409, "due!", size=11, colour=GREEN[0])

    p.box(
        154,
        402,
        112,
        GREY,
        "transfer.lua",
        "moves due",
        "messages from",
        "both to ready",
        code=True,
    )
    p.arrow((middle, 339), (middle, 400))
    p.text(middle + 6, 372, "due", size=11, colour=FAINT)
    p.arrow((290, 436), (268, 436), colour=GREEN[0])
    p.arrow((266, 452), (288, 452), colour=GREEN[0])
    p.box(154, 500, 112, ORANGE, "ready", "LIST: the queue")
    p.arrow((middle - 12, 475), (middle - 12, 498))
    p.arrow((middle + 12, 500), (middle + 12, 477), colour=GREEN[0])
    p.arrow((400, 440), (405, 440), (405, 289), (401, 289), colour=GREEN[0])
    p.arrow((405, 300), (405, 128), (401, 128), colour=GREEN[0])
    p.lines(
        346,
        494,
        "The answer:",
        "payloads for",
        "callers, and the",
        "next due time",
        size=11,
        colour=GREEN[0],
        anchor="middle",
    )

    p.lines(
        20,
        232,
        "A process that",
        "only offers also",
        "moves due ones:",
        "it has a timer,",
        "like consumers.",
        "",
        "So does Java, on",
        "the same keys.",
        "The first client",
        "does the work.",
        size=11.5,
    )
    p.text(16, 576, "Notifications are not enough", size=12, bold=True)
    p.lines(
        16,
        594,
        "Every 5 s, and after each subscription, recheck.lua looks",
        "at all queues. BLMOVE sees what Java pushes to ready.",
        size=11.5,
    )
    return p


def delayed() -> Picture:
    p = Picture("A delayed queue: its keys, and how a message moves between them", 500)
    p.text(16, 27, "A delayed queue: orders", size=15, bold=True)
    p.lines(16, 45, "Orange: Redisson's keys. Blue: delayq's own.")
    p.area(16, 58, 388, 110, (ORANGE[0], "#fffaf3"))
    p.text(28, 78, "pending", bold=True, colour=ORANGE[0], size=14)
    p.text(392, 78, "in both, unless ordered_list=False", size=11.5, colour=FAINT, anchor="end")
    p.area(28, 88, 364, 32, ORANGE)
    p.text(36, 108, "redisson_delay_queue_timeout:{orders}", code=True, size=11.5)
    p.text(386, 108, "ZSET", size=11, colour=FAINT, anchor="end")
    p.area(28, 126, 364, 32, ORANGE)
    p.text(36, 146, "redisson_delay_queue:{orders}", code=True, size=11.5)
    p.text(386, 146, "LIST, offer order", size=11, colour=FAINT, anchor="end")
    p.text(370, 50, "offer", size=12, colour=FAINT, anchor="end")
    p.arrow((380, 38), (380, 57))

    p.arrow((120, 168), (120, 222), colour=ORANGE[0])
    p.text(112, 190, "due:", size=12, colour=FAINT, anchor="end")
    p.text(112, 205, "transfer", size=12, colour=FAINT, anchor="end")
    p.area(16, 225, 208, 56, (ORANGE[0], "#fffaf3"))
    p.text(28, 245, "ready", bold=True, colour=ORANGE[0], size=14)
    p.text(28, 268, "orders", code=True, size=12.5)
    p.text(214, 268, "LIST", size=11, colour=FAINT, anchor="end")

    p.arrow((224, 168), (290, 222), colour=RED[0])
    p.text(274, 192, "unreadable", size=11.5, colour=RED[0])
    p.area(244, 225, 160, 56, BLUE)
    p.text(324, 245, "quarantine", bold=True, colour=BLUE[0], size=13, anchor="middle")
    p.text(324, 267, "delayq_quarantine:…", code=True, size=11, anchor="middle")

    p.arrow((70, 281), (70, 336), colour=FAINT)
    p.text(78, 305, "take, poll,", size=11.5, colour=FAINT)
    p.text(78, 320, "async for", size=11.5, colour=FAINT)
    p.box(16, 339, 118, GREY, "gone", "handed out:", "at most once")
    p.arrow((170, 281), (240, 336), colour=BLUE[0])
    p.text(218, 305, "deliveries()", size=11.5, colour=BLUE[0])
    p.area(160, 339, 244, 82, (BLUE[0], "#f4f8fd"))
    p.text(172, 359, "leased", bold=True, colour=BLUE[0], size=14)
    p.text(172, 382, "delayq_leases:{orders}", code=True, size=11)
    p.text(396, 382, "ZSET", size=11, colour=FAINT, anchor="end")
    p.text(172, 404, "delayq_leased:{orders}", code=True, size=11)
    p.text(396, 404, "HASH", size=11, colour=FAINT, anchor="end")
    p.arrow((180, 421), (180, 448), colour=GREEN[0])
    p.text(188, 440, "ack: gone", size=12, colour=GREEN[0])
    p.arrow((404, 380), (412, 380), (412, 110), (406, 110), colour=ORANGE[0])
    p.text(400, 330, "nack: offered again", size=11.5, colour=ORANGE[0], anchor="end")
    p.arrow((160, 395), (148, 395), (148, 300), (130, 284), colour=RED[0])
    p.lines(
        16,
        470,
        "Red, on the left: the lease has ended, and the next",
        "client to look puts it back at the head of ready.",
        size=11.5,
    )
    return p


def reliable() -> Picture:
    p = Picture("A reliable queue: its states, and what each key holds in them", 623)
    p.text(16, 27, "A reliable queue: states", size=15, bold=True)
    p.text(20, 62, "offer", size=12.5, colour=FAINT)
    p.arrow((54, 58), (86, 58))
    p.box(88, 42, 104, ORANGE, "delayed", "waits")
    p.box(286, 42, 104, GREEN, "ready", "is due")
    p.arrow((192, 63), (284, 63))
    p.text(238, 56, "time", size=11.5, colour=FAINT, anchor="middle")
    p.box(286, 150, 104, BLUE, "leased", "with a worker")
    p.arrow((356, 85), (356, 148), colour=BLUE[0])
    p.text(362, 112, "claim", size=11.5, colour=BLUE[0])
    p.arrow((316, 150), (316, 87), colour=RED[0])
    p.text(310, 112, "lease ends", size=11.5, colour=RED[0], anchor="end")
    p.arrow((286, 164), (140, 164), (140, 87), colour=ORANGE[0])
    p.text(150, 158, "nack, retry: later", size=11.5, colour=ORANGE[0])
    p.box(150, 226, 104, GREY, "gone", "handled")
    p.arrow((320, 193), (320, 250), (256, 250), colour=GREEN[0])
    p.text(314, 244, "ack", size=11.5, colour=GREEN[0], anchor="end")
    p.box(16, 226, 104, RED, "dead", "kept, with reason")
    p.arrow((286, 182), (68, 182), (68, 224), colour=RED[0])
    p.text(76, 200, "reject, or no attempts left", size=11.5, colour=RED[0])
    p.arrow((28, 226), (28, 100), (286, 100), (300, 87), colour=FAINT)
    p.text(34, 122, "redrive:", size=11.5, colour=FAINT)
    p.text(34, 137, "due now", size=11.5, colour=FAINT)

    p.text(16, 308, "Contents of the keys", size=15, bold=True)
    p.text(16, 327, "delayq:{jobs}:…", code=True, size=12, colour=FAINT)
    columns = (
        (206, "delayed", ORANGE),
        (262, "ready", GREEN),
        (318, "leased", BLUE),
        (376, "dead", RED),
    )
    for x, name, colour in columns:
        p.text(x, 327, name, size=12, anchor="middle", bold=True, colour=colour[0])
    rows = (
        ("waiting, waiting:1 … 9", ("due", "due", "", "")),
        ("leased", ("", "○", "end", "")),
        ("tokens", ("", "○", "○", "")),
        ("bodies", ("●", "●", "●", "")),
        ("attempts", ("○", "○", "○", "")),
        ("errors", ("○", "○", "○", "")),
        ("expiries", ("○", "○", "○", "")),
        ("priorities", ("○", "○", "○", "")),
        ("dead", ("", "", "", "●")),
        ("dead:messages", ("", "", "", "●")),
    )
    for number, (name, cells) in enumerate(rows):
        y = 338 + number * 23
        if number % 2 == 0:
            p.area(12, y, 396, 23, ("#f3f5f8", "#f3f5f8"))
        p.text(20, y + 16, name, code=True, size=12)
        for (x, _, colour), cell in zip(columns, cells, strict=True):
            if cell == "●":
                p.dot(x, y + 11.5, colour[0])
            elif cell:
                p.text(
                    x,
                    y + 16,
                    cell,
                    size=12 if cell != "○" else 13,
                    anchor="middle",
                    colour=colour[0],
                )
    p.lines(
        16,
        589,
        "waiting and leased: sorted sets, by due time and",
        "by the end of the lease. ○: if there is one.",
        size=11.5,
    )
    return p


def guarantees() -> Picture:
    p = Picture("Guarantees: at most once with take, at least once with a lease", 548)
    left, right = 84, 404

    def timeline(
        y: int, name: str, colour: Colour, start: float, end: float, *, dies: bool = False
    ) -> None:
        p.text(14, y + 4, name, size=12, bold=True, colour=colour[0])
        p.line(left, y, right, y, colour="#ccd2dc", dash="2 3")
        p.line(start, y, end, y, colour=colour[0], width=6)
        if dies:
            p.cross(end, y)

    p.text(14, 27, "take, poll, async for on a delayed queue", size=14.5, bold=True)
    p.lines(14, 46, "At most once: what is handed out is gone.", size=11.5)
    timeline(72, "server", GREY, left, 180)
    timeline(108, "worker 1", BLUE, 180, 270, dies=True)
    p.arrow((180, 74), (180, 103), colour=BLUE[0])
    p.text(188, 94, "taken", size=11.5, colour=BLUE[0])
    p.text(270, 128, "dies: the message is lost", size=11.5, colour=RED[0], anchor="middle")

    y = 162
    p.line(14, y - 18, 406, y - 18, colour="#e1e5ec")
    p.text(14, y + 6, "Leases: at least once", size=14.5, bold=True)
    p.lines(14, y + 24, "A reliable queue, and deliveries() on a delayed one.", size=11.5)
    timeline(y + 56, "server", GREY, left, 386)
    p.text(386, y + 48, "gone", size=11.5, colour=GREEN[0], anchor="middle")
    timeline(y + 104, "worker 1", BLUE, 108, 190, dies=True)
    p.arrow((108, y + 58), (108, y + 99), colour=BLUE[0])
    p.text(112, y + 82, "attempt 1", size=11.5, colour=BLUE[0])
    p.text(204, y + 98, "dies", size=11.5, colour=RED[0])
    for x in (130, 152, 174):
        p.line(x, y + 112, x, y + 122, colour=BLUE[0], width=2)
    p.text(108, y + 138, "renews its lease", size=11.5, colour=BLUE[0])
    p.text(108, y + 153, "three times per lease", size=11.5, colour=FAINT)
    p.line(174, y + 118, 290, y + 118, colour=BLUE[0], dash="5 4")
    p.line(290, y + 48, 290, y + 176, colour=RED[0], dash="4 3")
    p.text(296, y + 122, "the lease ends", size=11.5, colour=RED[0])
    timeline(y + 186, "worker 2", GREEN, 294, 386)
    p.arrow((294, y + 58), (294, y + 181), colour=GREEN[0])
    p.text(300, y + 172, "attempt 2", size=11.5, colour=GREEN[0])
    p.arrow((386, y + 184), (386, y + 61), colour=GREEN[0])
    p.text(380, y + 146, "ack", size=11.5, colour=GREEN[0], anchor="end")

    y = 400
    p.line(14, y - 18, 406, y - 18, colour="#e1e5ec")
    p.text(14, y + 6, "The first worker is alive, but too slow", size=14.5, bold=True)
    p.lines(14, y + 24, "Its event loop was blocked for longer than the lease, say.", size=11.5)
    timeline(y + 54, "worker 1", BLUE, 108, 340)
    timeline(y + 96, "worker 2", GREEN, 244, 386)
    p.line(240, y + 42, 240, y + 108, colour=RED[0], dash="4 3")
    p.text(234, y + 80, "the lease ends", size=11.5, colour=RED[0], anchor="end")
    p.cross(340, y + 54)
    p.text(348, y + 46, "ack:", size=11.5, colour=RED[0])
    p.text(404, y + 74, "LeaseLost", size=11.5, colour=RED[0], anchor="end")
    p.text(386, y + 118, "ack", size=11.5, colour=GREEN[0], anchor="middle")
    p.text(14, y + 126, "Handled twice, settled once: handlers must tolerate it.", size=12)
    return p


PICTURES = {
    "wheel": wheel,
    "message": message,
    "delayed-queue": delayed,
    "reliable-queue": reliable,
    "guarantees": guarantees,
}


def draw(directory: Path) -> None:
    """Write all diagrams to a directory."""
    for name, picture in PICTURES.items():
        (directory / f"{name}.svg").write_text(str(picture()), "utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
