"""The output of the demo, on a terminal and elsewhere."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from delayq._durations import moment_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from delayq.cli.demo.figures import Ledger, Result, Row
    from delayq.cli.demo.run import Plan

_ROWS = 12
# The lines around the rows, with the summary and the next prompt, so that nothing scrolls off.
_OTHER_LINES = 14
_WIDTH = 78
# The columns left of the bars.
_TEXT_WIDTH = 54
# The length of the bar in cells, and the microseconds that each stands for.
_CELLS = 24
_CELL_US = 250
_SCALE = "0 ms    2 ms    4 ms"


@contextmanager
def live(console: Console, plan: Plan) -> Iterator[Callable[[Ledger], None]]:
    """Draw counts, a progress bar and the last deliveries; yield a function that redraws them."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as frame:

        def show(ledger: Ledger) -> None:
            rows = max(3, min(_ROWS, console.height - _OTHER_LINES))
            cells = max(0, min(_CELLS, console.width - _TEXT_WIDTH))
            frame.update(picture(ledger, plan, rows, cells), refresh=True)

        yield show


def headline(plan: Plan) -> str:
    """Describe the plan in a few words."""
    server = "an embedded server" if plan.server == "embedded" else plan.server
    return f"{plan.messages} messages with delays of 0 to {plan.max_delay:g} s on {server}"


def counts(ledger: Ledger) -> str:
    """Return the progress as one line."""
    return f"offered {ledger.offered}, delivered {ledger.delivered}, waiting {ledger.waiting}"


def picture(ledger: Ledger, plan: Plan, rows: int, cells: int) -> RenderableType:
    """Return the live view with the last ``rows`` deliveries, and bars of ``cells`` characters."""
    title = Text.assemble(
        ("delayq demo", "bold"), f"  {headline(plan)}", no_wrap=True, overflow="ellipsis"
    )
    numbers = Text("   ").join(
        Text.assemble(f"{name} ", (f"{count:>{len(str(plan.messages))}}", f"bold {colour}"))
        for name, count, colour in (
            ("offered", ledger.offered, "blue"),
            ("delivered", ledger.delivered, "green"),
            ("waiting", ledger.waiting, "magenta"),
        )
    )
    bar = ProgressBar(
        total=plan.messages,
        completed=ledger.delivered,
        width=_WIDTH,
        style="bright_black",
        complete_style="green",
        finished_style="green",
    )
    return Group(
        title, Text(), numbers, Padding(bar, (0, 0, 1, 0)), _table(ledger.recent(rows), rows, cells)
    )


def _table(deliveries: list[Row], rows: int, cells: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("message", justify="right", width=7)
    table.add_column("delay s", justify="right", width=8)
    table.add_column("due", justify="right", width=12)
    table.add_column("late ms", justify="right", width=8)
    table.add_column(_SCALE[:cells], width=cells, no_wrap=True)
    for row in deliveries:
        due = moment_us(row.due_us).astimezone()
        colour = colour_of(row.late_us)
        table.add_row(
            str(row.number),
            f"{row.delay_us / 1e6:.3f}",
            f"{due:%H:%M:%S}.{due.microsecond // 1000:03}",
            Text(f"{row.late_us / 1000:.2f}", style=colour),
            Text(bar_of(row.late_us, cells), style=colour),
        )
    # The height stays the same, so that the lines below do not jump.
    for _ in range(rows - len(deliveries)):
        table.add_row()
    return table


def colour_of(late_us: int) -> str:
    """Return green for up to 2 ms, yellow for up to 10 ms, and red for more or for being early."""
    if late_us < 0:
        return "bold red"
    return "green" if late_us <= 2000 else "yellow" if late_us <= 10_000 else "red"


def bar_of(late_us: int, cells: int) -> str:
    """Return a bar as long as the message was late, of at most ``cells`` characters."""
    halves = min(max(0, late_us) * 2 // _CELL_US, 2 * cells)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def print_summary(console: Console, result: Result) -> None:
    """Print the results, one per line."""
    console.print()
    for name, value, good in result.fields():
        # Each line has one style, so that programs that read a terminal find its text in one piece.
        console.print(Text(f"{name}: {value}", style="" if good else "bold red"), soft_wrap=True)
