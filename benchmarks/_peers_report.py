"""Tables and plot of ``benchmarks.peers``, and the lines that say where others are ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks._report import BLUE, SKY, Table, save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Row = dict[str, Any]
OWN = "delayq "
"""How the names of delayq's own rows begin."""

LIBRARY = "library                    "
OFFERS = (
    LIBRARY,
    " one at a time",
    " 10 in flight",
    " 100 in flight",
    "  in bulk",
    " bytes each",
    "bulk call",
)
HANDLING = (
    LIBRARY,
    " handled/s",
    "     best",
    " ms late, median / p99",
    "              best",
    " idle commands/s",
    "  best",
    "best settings",
)

# Figures of offers are measured once, with default settings.
FIGURES = {
    "one": "offers one at a time, a second",
    "ten": "offers with 10 in flight, a second",
    "hundred": "offers with 100 in flight, a second",
    "bulk": "offers in bulk, a second",
    "memory": "bytes for each pending message",
    "delivered": "messages handled a second",
    "p50": "ms late, median",
    "p99": "ms late, p99",
    "idle": "commands a second when idle",
}
LESS_IS_BETTER = ("memory", "p50", "p99", "idle")


def shown(row: Row, setting: str, name: str, digits: int = 0) -> str:
    value = row.get(setting, {}).get(name)
    return "-" if value is None else f"{value:,.{digits}f}"


def lateness_shown(row: Row, setting: str) -> str:
    if row.get(setting, {}).get("p50") is None:
        return "-"
    return " / ".join(shown(row, setting, name, 1) for name in ("p50", "p99"))


def rounded(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def best_of(row: Row, name: str) -> float | None:
    """Return the better figure of the two settings; None if there is none."""
    values: list[float] = [
        value
        for setting in ("default", "best")
        if (value := row.get(setting, {}).get(name)) is not None
    ]
    if not values:
        return None
    return min(values) if name in LESS_IS_BETTER else max(values)


def comparisons(
    rows: Sequence[Row], words: Mapping[str, str], value_of: Callable[[Row, str], float | None]
) -> list[str]:
    """Return a line for each figure in which another library is ahead of a row of delayq."""
    lines = []
    own = [row for row in rows if row["peer"].startswith(OWN)]
    for name, text in words.items():
        for row in rows:
            value = value_of(row, name)
            if row in own or value is None:
                continue
            behind = [
                f"{of_ours['peer']} {rounded(ours)}"
                for of_ours in own
                if (ours := value_of(of_ours, name)) is not None
                and (value < ours if name in LESS_IS_BETTER else value > ours)
            ]
            if behind:
                against = ", ".join(behind)
                lines.append(f"ahead of delayq: {row['peer']}, {text}: {rounded(value)}; {against}")
    return lines


def ahead(rows: Sequence[Row], scenarios: Sequence[Row]) -> list[str]:
    """Return a line for each figure in which another library is ahead of a row of delayq.

    Each library has the better of its two settings in each figure.
    """
    names = {name: f"{name}, jobs a second" for row in scenarios for name in row["rates"]}
    return comparisons(rows, FIGURES, best_of) + comparisons(
        scenarios, names, lambda row, name: row["rates"].get(name)
    )


def tell(about: Row, rows: Sequence[Row], scenarios: Sequence[Row], lines: Sequence[str]) -> None:
    """Print the tables of offers, of handling and of scenarios, and then lines."""
    print("\n".join(about.values()) + "\n")
    title = {"offers": "Offers a second, by one process that does nothing else:"}
    table = Table(title, OFFERS, as_json=False)
    for row in rows:
        cells = (shown(row, "default", name) for name in ("one", "ten", "hundred", "bulk"))
        memory = shown(row, "default", "memory")
        table.add(row, f"{row['peer']} {row['version']}", *cells, memory, row["bulk_way"])
    print()
    title = {"handling": "Handling, by one worker with default settings, and with its best:"}
    table = Table(title, HANDLING, as_json=False)
    for row in rows:
        table.add(
            row,
            f"{row['peer']} {row['version']}",
            shown(row, "default", "delivered"),
            shown(row, "best", "delivered"),
            lateness_shown(row, "default"),
            lateness_shown(row, "best"),
            shown(row, "default", "idle", 1),
            shown(row, "best", "idle", 1),
            row["best_settings"],
        )
    if scenarios:
        tell_scenarios(scenarios)
    print()
    for line in lines:
        print(line)


def tell_scenarios(scenarios: Sequence[Row]) -> None:
    print()
    names = list(scenarios[0]["rates"])
    columns = [f" {name}".rjust(10) for name in names]
    title = "Scenarios of bullmq-bench, jobs a second, with the warm-up left out, and counted in:"
    table = Table({"scenarios": title}, (LIBRARY, *columns), as_json=False)
    for row in scenarios:
        table.add(row, row["peer"], *(f"{row['rates'][name]:,.0f}" for name in names))
        counted = (f"{row['with_warm_up'][name]:,.0f}" for name in names)
        table.add(row, "  as bullmq-bench counts", *counted)


def draw(plt: Any, file: str, rows: Sequence[Row], footer: str) -> None:
    rows = [row for row in rows if row["default"].get("p50") is not None][::-1]
    figure, (left_plot, right_plot) = plt.subplots(
        1, 2, figsize=(9.4, 0.42 * len(rows) + 1.7), sharey=True
    )
    for place, row in enumerate(rows):
        settings = [
            setting
            for setting in ("default", "best")
            if row.get(setting, {}).get("p50") is not None
        ]
        for at, setting in enumerate(settings):
            height = 0.7 / len(settings)
            y = place + (height / 2 - at * height if len(settings) == 2 else 0)
            colour = SKY if setting == "default" and len(settings) == 2 else BLUE
            left_plot.barh(y, row[setting]["delivered"], height=height * 0.9, color=colour)
            p50, p99 = (max(row[setting][name], 0.05) for name in ("p50", "p99"))
            right_plot.plot(
                [p50, max(p99, p50 * 1.05)],
                [y, y],
                color=colour,
                linewidth=4.5,
                solid_capstyle="butt",
            )
            if row[setting]["early"]:
                right_plot.text(
                    max(p99, p50) * 1.3, y, "some early", fontsize=7, va="center", color="#555555"
                )
    left_plot.set_yticks(range(len(rows)), [row["peer"] for row in rows])
    left_plot.set_xscale("log")
    right_plot.set_xscale("log")
    for panel in (left_plot, right_plot):
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.grid(visible=False, axis="y")
    left_plot.set_title("delivered per second, all due", loc="left", fontsize=9.5)
    right_plot.set_title("lateness, ms: from p50 to p99", loc="left", fontsize=9.5)
    figure.suptitle(
        "Delayed messages on Redis: default settings (pale) and best settings (dark)",
        x=0.012,
        ha="left",
        fontweight="bold",
    )
    figure.subplots_adjust(
        left=0.19,
        right=0.97,
        top=1 - 0.75 / figure.get_figheight(),
        bottom=0.65 / figure.get_figheight(),
    )
    save(figure, file, footer)
