"""The judge of limits names each bug that is planted in a log, and finds none in others. And in a
storm of kills, limits are exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults import report
from tests.faults.checker import Rules, summary
from tests.faults.history import Delivered, End, History, Offered, Told
from tests.faults.limits import QUEUE, Bound, Gap, Log, gaps, judge, judge_share, shares
from tests.faults.limits_storm import LEASE_US, Plan, blow, describe

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.servers import PrivateServer

MS = 1_000
SECOND = 1_000 * MS
LEASE = 2 * SECOND
RULES = Rules(lease_us=LEASE, within_us=60 * SECOND)
T0 = 100 * SECOND
ONE = Bound(concurrency=1)
TWO = Bound(concurrency=2)
FIVE_A_SECOND = Bound(rate=5)


def ran(key: int, start_ms: float, for_ms: float, **facts: Any) -> Delivered:
    """Return a delivery that was claimed that long after the start, and how long it ran."""
    at = T0 + int(start_ms * MS)
    usual: dict[str, Any] = {"who": "one", "copy": f"m{key}", "claimed_us": at, "attempt": 1}
    usual |= {"ends_us": at + LEASE, "ended_us": at + int(for_ms * MS), "end": End.UNKNOWN}
    return Delivered(key, at + MS, **(usual | facts))


def killed(key: int, start_ms: float, **facts: Any) -> Delivered:
    return ran(key, start_ms, 0, **({"ended_us": 0, "end": End.NONE, "who": "killed"} | facts))


def log(*delivered: Delivered, bound: Bound = ONE, keys: int = 0, **more: Any) -> Log:
    """Return a log in which everything was due at the start and is of one group."""
    keys = keys or max(one.key for one in delivered) + 1
    history = History({key: Offered(T0, Told.OK) for key in range(keys)}, list(delivered))
    groups: dict[int, str] = more.pop("groups", dict.fromkeys(range(keys), "a"))
    bounds = dict.fromkeys([*groups.values(), "a"], bound)
    return Log(history, groups, bounds, **more)


def kinds(log: Log) -> list[str]:
    return [violation.kind for violation in judge(log, RULES)]


DEAD = {"killed": T0 + 500 * MS}


# Logs without a violation


@pytest.mark.parametrize(
    "log",
    [
        log(ran(0, 0, 100), ran(1, 100, 100)),
        log(ran(0, 0, 100), ran(1, 50, 100), ran(2, 100, 100), bound=TWO),
        log(ran(0, 0, 100), ran(1, 50, 100), groups={0: "a", 1: "b"}),
        log(*(ran(key, key, 10) for key in range(5)), ran(5, 1000, 10), bound=FIVE_A_SECOND),
        log(*(ran(key, 999, 10) for key in range(5)), bound=FIVE_A_SECOND),
        # An end of leases is a few microseconds later if another claim has that end.
        log(*(ran(key, 0.02, 1) for key in range(5)), ran(5, 1000, 1), bound=FIVE_A_SECOND),
    ],
)
def test_a_log_within_its_limits_has_no_violation(log: Log) -> None:
    assert judge(log, RULES) == []


def test_a_killed_process_runs_nothing_any_more() -> None:
    assert kinds(log(killed(0, 0), ran(0, 2000, 10, attempt=2), ran(1, 500, 10), kills=DEAD)) == []


def test_a_handler_that_outlives_its_lease_has_no_slot_any_more() -> None:
    stopped = ran(0, 0, 3000, who="stopped")
    again = ran(0, 2000, 10, attempt=2)
    assert kinds(log(stopped, again, ran(1, 2500, 10), paused={"stopped"})) == []


def test_a_message_may_come_again_after_the_kill_of_a_process_that_had_handled_it() -> None:
    first, again = ran(0, 0, 499, who="killed"), ran(0, 2000, 10, attempt=2)
    assert kinds(log(first, again, kills=DEAD)) == []


def test_a_message_may_come_again_after_its_process_was_stopped() -> None:
    first, again = ran(0, 0, 499, who="stopped"), ran(0, 2000, 10, attempt=2)
    assert kinds(log(first, again, paused={"stopped"})) == []


def test_a_message_that_failed_comes_again() -> None:
    assert kinds(log(ran(0, 0, 10, end=End.NACKED), ran(0, 20, 10, attempt=2))) == []


# Planted bugs


def test_one_more_at_a_time_than_its_group_allows_is_named() -> None:
    assert kinds(log(ran(0, 0, 100), ran(1, 99.99, 100))) == ["too many"]
    planted = log(ran(0, 0, 100), ran(1, 20, 100), ran(2, 40, 100), ran(3, 100, 9), bound=TWO)
    (first, second) = judge(planted, RULES)
    assert str(first) == f"too many: message 2 was number 3 to run in a, of 2, at {T0 + 40 * MS}"
    assert second.key == 3


def test_a_message_runs_from_its_claim_not_from_the_start_of_its_handler() -> None:
    late = ran(1, 50, 100)
    late.seen_us = T0 + 120 * MS
    assert kinds(log(ran(0, 0, 100), late)) == ["too many"]


def test_one_more_at_a_time_than_the_queue_allows_is_named() -> None:
    planted = log(ran(0, 0, 100), ran(1, 50, 100), groups={0: "a", 1: "b"}, whole=ONE)
    assert kinds(planted) == ["too many"]


def test_what_runs_while_the_handler_of_a_process_that_is_yet_to_be_killed_does_is_named() -> None:
    planted = log(killed(0, 0), ran(0, 2000, 10, attempt=2), ran(1, 499, 10), kills=DEAD)
    assert kinds(planted) == ["too many"]


def test_what_runs_before_the_lease_of_a_stopped_process_has_ended_is_named() -> None:
    stopped, again = ran(0, 0, 3000, who="stopped"), ran(0, 2300, 10, attempt=2)
    planted = log(stopped, ran(1, 1900, 10), again, paused={"stopped"})
    assert kinds(planted) == ["too many"]


def test_a_renewed_lease_keeps_its_slot() -> None:
    renewed = ran(0, 0, 3000, ends_us=T0 + 4 * SECOND)
    assert kinds(log(renewed, ran(1, 2500, 10))) == ["too many"]


def test_one_more_start_in_a_window_than_the_rate_allows_is_named() -> None:
    some = [ran(key, 300 + key, 1) for key in range(5)]
    assert kinds(log(*some, ran(5, 1299.9, 1), bound=FIVE_A_SECOND)) == ["too fast"]
    assert kinds(log(*some, ran(5, 900, 1), ran(6, 1301, 1), bound=FIVE_A_SECOND)) == ["too fast"]


def test_a_full_bucket_before_a_full_window_is_named() -> None:
    """Five in the first half of one window, and five in the second: a bucket that refills itself
    while it is full allows them.
    """
    some = [ran(0, 0, 1), *(ran(key, 999, 1) for key in range(1, 5))]
    more = [ran(key, 1001, 1) for key in range(5, 10)]
    assert kinds(log(*some, *more, bound=FIVE_A_SECOND)) == ["too fast"] * 4


def test_a_faster_start_than_the_queue_allows_is_named() -> None:
    groups = {key: f"group {key}" for key in range(6)}
    some = [ran(key, key, 1) for key in range(6)]
    assert kinds(log(*some, groups=groups, whole=FIVE_A_SECOND)) == ["too fast"]


def test_a_second_attempt_is_a_start_too() -> None:
    bound = Bound(rate=1)
    some = (ran(0, 0, 10, end=End.NACKED), ran(0, 500, 10, attempt=2))
    assert kinds(log(*some, bound=bound)) == ["too fast"]


def test_what_comes_again_although_its_process_lived_is_named() -> None:
    planted = log(ran(0, 0, 100), ran(0, 2000, 10, attempt=2))
    assert kinds(planted) == ["again"]


def test_the_rules_of_every_queue_hold_as_well() -> None:
    assert kinds(log(ran(0, 0, 1), keys=2)) == ["lost"]
    assert kinds(log(killed(0, 0), ran(0, 1000, 10, attempt=2), kills=DEAD)) == ["duplicate"]


# The throughput


def of_a(log: Log) -> float:
    return round(shares(log, LEASE)["a"], 3)


def test_a_group_that_never_stands_still_has_everything() -> None:
    assert of_a(log(ran(0, 0, 100), ran(1, 100, 100), ran(2, 200, 100))) == 1.0


def test_a_slot_that_is_filled_late_is_a_loss() -> None:
    # From 100 to 120 and from 220 to 240 of the 240 ms until the last message has started.
    assert of_a(log(ran(0, 0, 100), ran(1, 120, 100), ran(2, 240, 100))) == round(1 - 40 / 240, 3)


def test_the_longest_gaps_are_told() -> None:
    some = [ran(0, 0, 100), ran(1, 120, 100), ran(2, 250, 100)]
    late = [Gap("a", T0 + 220 * MS, T0 + 250 * MS), Gap("a", T0 + 100 * MS, T0 + 120 * MS)]
    assert gaps(log(*some), LEASE) == late


def test_one_slot_of_several_is_its_share_of_the_loss() -> None:
    some = [ran(0, 0, 200), ran(1, 0, 100), ran(2, 120, 300), ran(3, 200, 100), ran(4, 300, 9)]
    assert of_a(log(*some, bound=TWO)) == round(1 - 20 / 300 / 2, 3)


def test_a_token_that_is_used_late_is_its_share_of_the_loss() -> None:
    first = [ran(key, 0, 1) for key in range(5)]
    late = [ran(key, 1020, 1) for key in range(5, 10)]
    assert of_a(log(*first, *late, bound=FIVE_A_SECOND)) == round(1 - 20 / 1020, 3)


def test_the_limit_that_holds_a_group_back_is_what_counts() -> None:
    by_slots = Bound(concurrency=1, rate=500)
    some = [ran(key, 110 * key, 100) for key in range(4)]
    assert of_a(log(*some, bound=by_slots)) == round(1 - 30 / 330, 3)
    by_tokens = Bound(concurrency=5, rate=5)
    some = [ran(key, 220 * key, 10) for key in range(10)]
    # Each token is used 100 ms late, in turn, after the first five.
    assert of_a(log(*some, bound=by_tokens)) < 0.8


def test_a_message_that_is_not_due_is_no_loss() -> None:
    later = log(ran(0, 0, 100), ran(1, 500, 100))
    later.history.offered[1].due_us = T0 + 500 * MS
    assert of_a(later) == 1.0


def test_a_slot_of_a_killed_process_is_no_loss_until_its_lease_has_ended() -> None:
    some = [killed(0, 0), ran(1, 2500, 100), ran(0, 2600, 100, attempt=2)]
    assert of_a(log(*some, kills=DEAD)) == 1.0
    # It may have renewed its lease just before, but that is over now.
    some = [killed(0, 0), ran(1, 3000, 100), ran(0, 3100, 100, attempt=2)]
    assert of_a(log(*some, kills=DEAD)) == round(1 - 500 / 3000, 3)


def test_a_lease_that_a_killed_process_has_not_noted_keeps_its_slot() -> None:
    some = [ran(1, 0, 500), ran(2, 2500, 100), ran(0, 2600, 100, attempt=2)]
    assert of_a(log(*some, leases={(0, T0 + 2500 * MS)})) == 1.0
    assert of_a(log(*some)) < 1.0


def test_a_lease_that_was_renewed_is_no_other_one() -> None:
    some = [ran(0, 0, 2300, ends_us=T0 + 3 * SECOND), ran(1, 2300, 100)]
    leases = {(0, T0 + 2 * SECOND), (0, T0 + 3 * SECOND)}
    assert log(*some, leases=leases).claims(LEASE) == some


def test_a_start_that_was_not_noted_counts_for_the_rate() -> None:
    some = [ran(0, 500, 10), ran(1, 2700, 1, attempt=2)]
    assert kinds(log(*some, bound=Bound(rate=1), leases={(1, T0 + 2700 * MS)})) == ["too fast"]


def test_an_acknowledgement_that_died_with_its_process_is_no_loss() -> None:
    some = [ran(0, 0, 499, who="killed"), ran(0, 2000, 100, attempt=2), ran(1, 2100, 10)]
    assert of_a(log(*some, kills=DEAD)) == 1.0


def test_a_group_waits_for_the_queue_without_loss() -> None:
    groups = {0: "a", 1: "b", 2: "b"}
    some = [ran(1, 0, 100), ran(0, 100, 100), ran(2, 200, 10)]
    found = shares(log(*some, groups=groups, whole=ONE), LEASE)
    assert found == {"a": 1.0, "b": 1.0, QUEUE: 1.0}


def test_a_message_that_never_starts_is_a_loss() -> None:
    some = [ran(0, 0, 100), ran(1, 0, 100), ran(2, 100, 100), ran(3, 200, 100)]
    groups = {0: "a", 1: "b", 2: "b", 3: "b", 4: "a"}
    assert of_a(log(*some, keys=5, groups=groups)) == 0.5


def test_the_queue_has_the_share_of_all_groups_by_their_time() -> None:
    groups = {0: "a", 1: "b", 2: "b", 3: "a"}
    some = [ran(0, 0, 100), ran(3, 200, 10), ran(1, 0, 100), ran(2, 100, 10)]
    planted = log(*some, groups=groups)
    assert round(shares(planted, LEASE)[QUEUE], 3) == round(1 - 100 / 300, 3)
    (idle,) = judge_share(planted, LEASE)
    assert (
        str(idle) == "idle: message 0 66.7% of what the limits allow were running, of at least 95%"
    )
    assert judge_share(planted, LEASE, 0.6) == []
    assert judge_share(replace(planted, spare=0.05), LEASE) == []


# Storms

SMALL = Plan(processes=3, groups=10, messages=40, seconds=3, stops=1)
WHOLE = Bound(concurrency=6, rate=60)


@pytest.mark.parametrize("whole", [Bound(), WHOLE], ids=["groups", "groups and queue"])
async def test_limits_are_exact_while_workers_are_killed(
    own_server: PrivateServer, tmp_path: Path, whole: Bound
) -> None:
    plan = replace(SMALL, whole=whole)
    log = await blow(own_server, plan, tmp_path)
    assert len(log.kills) > plan.processes
    violations = judge(log, plan.rules)
    assert not violations, summary(violations, show=20)


async def test_a_storm_without_limits_breaks_them(
    own_server: PrivateServer, tmp_path: Path
) -> None:
    plan = replace(SMALL, limited=False, whole=WHOLE, stops=0)
    log = await blow(own_server, plan, tmp_path)
    assert Counter(kinds_of(log, plan)).keys() == {"too many", "too fast"}


@pytest.mark.storm
@pytest.mark.every_server
async def test_limits_are_exact_and_used_in_a_storm(
    own_server: PrivateServer, tmp_path: Path
) -> None:
    plan = Plan()
    log = await blow(own_server, plan, tmp_path)
    print(*describe(log), sep="\n")
    violations = judge(log, plan.rules) + judge_share(log, LEASE_US)
    assert not violations, summary(violations, show=20)
    faults = Counter({"worker killed": len(log.kills), "worker stopped": len(log.paused)})
    report.tell(len(log.history.offered), len(log.history.delivered), faults)


def kinds_of(log: Log, plan: Plan) -> list[str]:
    return [violation.kind for violation in judge(log, plan.rules)]
