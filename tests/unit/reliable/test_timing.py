"""The moments at which a recurring message is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import delayq
from delayq._durations import MICROSECOND
from delayq._reliable.ids import is_occurrence
from delayq._reliable.timing import AHEAD, Timing, cron_moments, timing_of, zone_of
from tests.support.depth import examples
from tests.support.programs import output_of

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_cron = pytest.mark.skipif(find_spec("cronsim") is None, reason="cronsim is not installed")
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia")
BERLIN, NEW_YORK, LORD_HOWE, APIA = map(ZoneInfo, ZONES)
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


# The model looks at every minute that there is.


def values(field: str, low: int, high: int) -> set[int]:
    moments: set[int] = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        if span == "*":
            first, last = low, high
        else:
            first, last = (
                int(end)
                for end in (span.split("-") if "-" in span else (span, high if step else span))
            )
        moments |= set(range(first, last + 1, int(step or 1)))
    return moments


class Model:
    def __init__(self, expression: str) -> None:
        self.fields = expression.split()
        minutes, hours, days, months, weekdays = self.fields
        self.minutes, self.hours = values(minutes, 0, 59), values(hours, 0, 23)
        self.days, self.months = values(days, 1, 31), values(months, 1, 12)
        self.weekdays = {day % 7 for day in values(weekdays, 0, 7)}
        self.both = days.startswith("*") or weekdays.startswith("*")
        self.once_a_day = not minutes.startswith("*") and not hours.startswith("*")

    def shows(self, local: datetime) -> bool:
        if (
            local.minute not in self.minutes
            or local.hour not in self.hours
            or local.month not in self.months
        ):
            return False
        day, weekday = local.day in self.days, local.isoweekday() % 7 in self.weekdays
        return day and weekday if self.both else day or weekday

    def moments(self, zone: tzinfo, after: datetime, until: datetime) -> Iterator[datetime]:
        moment = after.replace(second=0, microsecond=0)
        before = moment.astimezone(zone)
        while (moment := moment + MINUTE) < until:
            local = moment.astimezone(zone)
            comes = self.shows(local) and not (self.once_a_day and local.fold)
            skipped = before.replace(tzinfo=None, fold=0) + MINUTE
            while self.once_a_day and skipped < local.replace(tzinfo=None, fold=0):
                comes = comes or self.shows(skipped)
                skipped += MINUTE
            before = local
            if comes:
                yield moment


def ours(expression: str, zone: tzinfo, after: datetime, until: datetime) -> list[datetime]:
    return list(takewhile(lambda moment: moment < until, cron_moments(expression, zone, after)))


# Around each of these, a clock changes: by an hour, by half an hour, by a whole day, at midnight,
# at a minute past.
CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    ("Pacific/Apia", datetime(2011, 12, 30, 10, tzinfo=UTC)),
    ("America/St_Johns", datetime(2010, 3, 14, 3, 31, tzinfo=UTC)),
    ("America/St_Johns", datetime(2010, 11, 7, 2, 31, tzinfo=UTC)),
    ("Asia/Tehran", datetime(2021, 3, 21, 20, 30, tzinfo=UTC)),
    ("Africa/Casablanca", datetime(2026, 2, 15, 2, tzinfo=UTC)),
    ("UTC", datetime(2026, 3, 1, tzinfo=UTC)),
]


def field(low: int, high: int) -> st.SearchStrategy[str]:
    value = st.integers(low, high)
    # Ranges have two different ends, because the library reads 5-5/2 as 5/2.
    span = st.lists(value, min_size=2, max_size=2, unique=True).map(
        lambda ends: f"{min(ends)}-{max(ends)}"
    )
    step = st.integers(1, (high - low) // 2 + 1)
    return st.one_of(
        st.just("*"),
        value.map(str),
        st.lists(value, min_size=2, max_size=3, unique=True).map(
            lambda some: ",".join(map(str, sorted(some)))
        ),
        span,
        step.map("*/{}".format),
        st.tuples(span, step).map(lambda both: f"{both[0]}/{both[1]}"),
    )


@needs_cron
@given(
    change=st.sampled_from(CHANGES),
    minute=field(0, 59),
    hour=field(0, 4) | field(0, 23),
    day=st.just("*") | field(1, 31),
    weekday=st.just("*") | field(0, 7),
    before=st.integers(0, 1440 * 60_000_000),
)
@example(CHANGES[0], "30", "2", "*", "*", 86_400_000_000)
@example(CHANGES[1], "30", "2", "*", "*", 86_400_000_000)
@example(CHANGES[1], "30", "2", "*", "*", 0)
@example(CHANGES[4], "*/10", "2", "*", "*", 86_400_000_000)
@example(CHANGES[4], "30", "*", "*", "*", 86_400_000_000)
@settings(max_examples=examples(500))
def test_moments_are_those_of_a_clock_that_is_watched(
    change: tuple[str, datetime], minute: str, hour: str, day: str, weekday: str, before: int
) -> None:
    name, moment = change
    expression = f"{minute} {hour} {day} * {weekday}"
    after, until = moment - before * MICROSECOND, moment + DAY
    zone = ZoneInfo(name)
    assert ours(expression, zone, after, until) == list(
        Model(expression).moments(zone, after, until)
    )


@needs_cron
def test_seconds_and_the_last_day_of_a_month_are_understood() -> None:
    start = datetime(2026, 1, 30, tzinfo=UTC)
    assert ours("*/20 59 23 L * *", UTC, start, start + 30 * DAY)[:4] == [
        datetime(2026, 1, 31, 23, 59, second, tzinfo=UTC) for second in (0, 20, 40)
    ] + [datetime(2026, 2, 28, 23, 59, tzinfo=UTC)]
    # In the hour that occurs twice, only once.
    night = datetime(2026, 10, 24, 22, tzinfo=UTC)
    assert ours("15 30 2 * * *", BERLIN, night, night + DAY) == [
        night + timedelta(hours=2.5, seconds=15)
    ]


@needs_cron
def test_upcoming_moments_are_complete_and_after_the_given_one() -> None:
    now = 1_780_000_000_123_456
    moments = Timing(0, "*/5 * * * *", "UTC").moments(now)
    assert moments == [moments[0] + number * 300_000_000 for number in range(AHEAD)]
    assert now < moments[0] <= now + 300_000_000
    assert Timing(0, "*/5 * * * *", "UTC").moments(moments[0])[0] == moments[1]
    assert Timing(60_000_000).moments(now) == []


@needs_cron
def test_an_expression_that_cannot_be_read_or_never_comes_is_bad_input() -> None:
    for cron in ("", "* * * *", "60 * * * *", "x * * * *", "0 0 30 2 *", "* * * * * * *"):
        with pytest.raises(delayq.BadInput, match="cron"):
            timing_of(cron, None, "UTC").moments(0)


def test_a_timing_that_cannot_work_is_bad_input() -> None:
    wrong: list[tuple[Any, Any]] = [("* * * * *", 5), (5, None)]
    wrong += [(None, every) for every in (None, 0, -1, float("nan"), "1")]
    for cron, every in wrong:
        with pytest.raises(delayq.BadInput):
            timing_of(cron, every, "UTC")


def test_a_time_zone_without_a_common_name_is_bad_input() -> None:
    zones: list[Any] = ["Europe/Atlantis", "", "../etc/passwd", "Europe", "UTC+99:00"]
    nameless = tzinfo()  # type: ignore[abstract]
    for zone in (*zones, nameless, timezone(timedelta(seconds=1)), 5):
        with pytest.raises(delayq.BadInput, match=r"time ?zone"):
            timing_of("* * * * *", None, zone)


def test_a_time_zone_has_one_name_everywhere() -> None:
    moment = datetime(2026, 7, 1, tzinfo=UTC)
    zones: list[tuple[tzinfo | str, str]] = [
        (UTC, "UTC"),
        ("UTC", "UTC"),
        (timezone(timedelta(hours=-3, minutes=-30)), "UTC-03:30"),
        (timezone(timedelta(hours=5, minutes=45), "Nepal"), "UTC+05:45"),
        (BERLIN, "Europe/Berlin"),
    ]
    for zone, name in zones:
        found, meant = zone_of(zone)
        assert found == name
        offset = moment.astimezone(meant).utcoffset()
        assert moment.astimezone(zone_of(found)[1]).utcoffset() == offset, name
        assert isinstance(zone, str) or moment.astimezone(zone).utcoffset() == offset, name


def test_equal_timings_have_equal_texts() -> None:
    assert (
        timing_of(" 0  3 * * * ", None, BERLIN).text
        == timing_of("0 3 * * *", None, "Europe/Berlin").text
    )
    assert timing_of(None, 60, UTC).text == timing_of(None, timedelta(minutes=1), BERLIN).text
    for timing in (timing_of("0 3 * * *", None, BERLIN), timing_of(None, 60, UTC)):
        assert Timing.parse(timing.text) == timing


def test_an_occurrence_is_known_by_its_id() -> None:
    assert all(map(is_occurrence, (b"daily@1780000000000000", b"@1780000000000000")))
    assert not any(map(is_occurrence, (b"daily@178000000000000", b"me@example", b"")))


def test_without_the_extra_an_expression_is_refused_clearly_and_nothing_is_loaded() -> None:
    program = (
        "import sys, delayq\nfrom delayq._reliable.timing import timing_of\n"
        "print('cronsim' in sys.modules); sys.modules['cronsim'] = None\n"
        "timing_of(None, 5, 'UTC').moments(0)\n"
        "try: timing_of('* * * * *', None, 'UTC').moments(0)\n"
        "except delayq.ConfigurationError as error: print(error)\n"
    )
    refusal = "cron expressions need an extra: pip install 'delayq[cron]'"
    assert output_of("-c", program) == f"False\n{refusal}"
