"""Plant a fault in the package, and see which tests notice it.

    python -m tests.mutations                # every fault, one after the other: about 20 minutes
    python -m tests.mutations --only wheel   # those whose name contains a text
    python -m tests.mutations --tree ../old  # the same faults under another checkout's tests

Each fault is a small change that a tired programmer could make. The tests of `make test` run with
it in a copy of the tree, first those that are closest to the module. The exit status is the number
of faults that no test has noticed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Module:
    """A module, and where the tests are that are most likely to notice a fault in it."""

    path: str
    closest: tuple[str, ...]
    faults: tuple[tuple[str, str, str], ...]
    """The name of each fault, the text that it replaces, and the new text."""


WHEEL = Module(
    "delayq/_timer/wheel.py",
    ("tests/unit/timer",),
    (
        ("a timer fires a tick early", "(key := keys[0]) < present", "(key := keys[0]) <= present"),
        (
            "a deadline in the past stays there",
            "deadline = now if deadline < now",
            "deadline = deadline if deadline < now",
        ),
        ("an expired timer stays pending", "self.pending -= 1\n                    yield", "yield"),
        ("far timers are moved one wheel late", "shift=bits, lead=1", "shift=bits, lead=0"),
        (
            "a clear forgets the far level",
            "for level in (self.near, self.far, self.very_far):\n                for",
            "for level in (self.near, self.very_far):\n                for",
        ),
        ("empty buckets are never swept", "if len(self.keys) >= self.sweep_at:", "if False:"),
    ),
)
WAKEUP_PLAN = Module(
    "delayq/_engine/wakeup_plan.py",
    ("tests/unit/engine",),
    (
        ("a fired timer drops any wake-up", "if self.armed is wakeup:", "if True:"),
        (
            "a later wake-up replaces an earlier one",
            "if wake_at >= armed.wake_at:",
            "if False:",
        ),
        (
            "a failure is not retried",
            "return () if self._is_closed else self._arm(now + self._retry_delay(self.failures))",
            "return ()",
        ),
        (
            "a reply out of date is believed",
            "if invalidations != self.invalidations and self.callers.want_messages()",
            "if False",
        ),
        (
            "our own notice is acted upon",
            "if notice.client == self.stagger.client or self.stagger.is_dormant:",
            "if self.stagger.is_dormant:",
        ),
        (
            "a second request narrows the first one",
            "max(self._requested, due_us)",
            "min(self._requested, due_us)",
        ),
        (
            "a closed plan makes calls",
            '``due_us``."""\n        if self._is_closed:',
            '``due_us``."""\n        if False:',
        ),
    ),
)
HANDLING = Module(
    "delayq/worker/_handling.py",
    (
        "tests/unit/worker",
        "tests/integration/test_worker.py",
        "tests/integration/test_worker_robustness.py",
    ),
    (
        (
            "a message's own timeout is ignored",
            "return self._timeout if timeout is None else timeout",
            "return self._timeout",
        ),
        ("middleware runs inside out", "tuple(reversed(middleware))", "tuple(middleware)"),
        (
            "a burial is not tried again",
            "except ServerUnavailable:\n            await call()",
            "except ServerUnavailable:\n            raise",
        ),
        (
            "a snooze spends an attempt",
            "partial(message.snooze, delay)",
            "partial(message.nack, delay)",
        ),
        (
            "the reason of a retry is lost",
            "partial(message.nack, delay, error if is_error else reason)",
            "partial(message.nack, delay)",
        ),
        (
            "a swallowed failure counts as a success",
            "raise failure\n        return result",
            "return result\n        return result",
        ),
        ("an unreadable message is retried", "if not message.is_decoded:", "if False:"),
    ),
)
JACKSON = Module(
    "delayq/codecs/java/_jackson_reader.py",
    ("tests/unit/codecs",),
    (
        (
            "NaN without quotes is read",
            'which Python\'s JSON parser reads."""\n    raise Malformed',
            'Read them."""\n    return float(_name)',
        ),
        (
            "an unknown map becomes an object",
            "if name not in self._types and _MAP_NAME.fullmatch(name):",
            "if False:",
        ),
        ("an enum is read in any place", "site is Site.ELEMENT\n", "True\n"),
        (
            "a long number is an int",
            '"java.lang.Long": _int(64, JavaLong)',
            '"java.lang.Long": _int(64, int)',
        ),
        ("a short may have 32 bits", "_int(16, JavaShort)", "_int(32, JavaShort)"),
        (
            "a UUID in braces is read",
            "if str(value := UUID(tree)) != tree.lower():",
            "if not (value := UUID(tree)):",
        ),
        ("a date beyond Python is an error", "except OverflowError:", "except ZeroDivisionError:"),
    ),
)
DEAD = Module(
    "delayq/cli/dead.py",
    ("tests/unit/cli", "tests/integration/test_cli.py"),
    (
        ("an empty --error chooses everything", 'if text == "":', "if False:"),
        (
            "ids and filters are taken together",
            "if self.ids and not self.choice.is_all:",
            "if False:",
        ),
        ("a dry run acts", "self._count if dry_run else self._act", "self._act"),
        (
            "a purge redrives",
            'admin.redrive if self.name == "redriven" else admin.purge',
            "admin.redrive",
        ),
        ("nothing to do is a success", "raise typer.Exit(0 if done else 1)", "raise typer.Exit(0)"),
        ("the offset is ignored", "groups[offset : offset + limit]", "groups[:limit]"),
        ("a purge asks nothing", "yes=yes or dry_run)", "yes=True)"),
    ),
)
CLAIM = Module(
    "delayq/lua/reliable/claim.lua",
    (
        "tests/integration/test_reliable_leases.py",
        "tests/integration/test_reliable_queue.py",
        "tests/integration/test_reliable_model.py",
    ),
    (
        (
            "the last attempt is never the last",
            "attempt_counts.used - attempt_counts.uncounted >= most",
            "attempt_counts.used - attempt_counts.uncounted > most",
        ),
        (
            "an expired message is handed out",
            "number_or(MAX_SCORE, expiry) < now",
            "number_or(MAX_SCORE, expiry) < 0",
        ),
        (
            "a message's own limit is ignored",
            "'^[%d+e]+x(%d+)')) or most end",
            "'^[%d+e]+x(%d+)')) and most end",
        ),
        (
            "large bodies exceed the reply",
            "if count > 0 and #body > remaining_bytes then",
            "if false then",
        ),
        (
            "a paused queue hands out",
            "if redis.call('EXISTS', paused) == 1 then return nothing() end",
            "",
        ),
        (
            "two claims share the end of a lease",
            "or redis.call('ZCOUNT', leased, ends, ends) > 0",
            "",
        ),
        ("the end of a lease wakes nobody", "if next_end then wait =", "if false then wait ="),
        (
            "low priorities go first",
            "for priority = some_grouped and -1 or highest, 0, -1 do\n  if",
            "for priority = 0, some_grouped and -1 or highest, 1 do\n  if",
        ),
    ),
)
TRANSFER = Module(
    "delayq/lua/redisson/transfer.lua",
    (
        "tests/integration/test_delayed_queue.py",
        "tests/integration/test_deliveries.py",
        "tests/integration/test_hand_over_model.py",
        "tests/integration/test_many_clients.py",
    ),
    (
        (
            "due messages overtake those that are ready",
            "while from_list < waiting and not is_full do",
            "while false do",
        ),
        (
            "what is handed out is ready as well",
            "unpack(payloads, first)",
            "unpack(payloads)",
        ),
        (
            "an unreadable record is dropped",
            "pushed = redis.pcall('RPUSH', quarantine, unpack(unreadable))",
            "pushed = 1",
        ),
        ("the ordered list keeps what has left", "remove_from_list(due, now)", ""),
        ("what has returned hides what is due", "  due = redis.call(", "  local _ = redis.call("),
        (
            "a fence is no fence",
            "if take > 0 and redis.call('EXISTS', fence) == 1 then take = 0 end",
            "",
        ),
        (
            "ended leases wake nobody",
            "shorter_wait(wait_us(timeout, now, 1000, #due), wait_us(leases, now, 1000, #ended))",
            "wait_us(timeout, now, 1000, #due)",
        ),
        ("no notice is given", "#due > 0 and give_notice(", "false and give_notice("),
    ),
)
MODULES = (WHEEL, WAKEUP_PLAN, HANDLING, JACKSON, DEAD, CLAIM, TRANSFER)


def copy_of(tree: Path, parent: Path) -> Path:
    """Copy what git knows of a tree, with what has not been committed."""
    copy = parent / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / name, copy / name)
    return copy


def failed_tests(copy: Path, *paths: str) -> list[str]:
    """Run these tests, or all of them, until one fails. Return the names of those that have."""
    # A fault may make a test wait for ever.
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
    options += ["-n0"] if paths else ["-n", "auto", "--dist", "worksteal"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=copy,
        # The copy instead of the checkout that is installed, also for programs that tests start.
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode and not names:
        raise SystemExit(f"pytest named no test:\n{run.stdout}{run.stderr}")
    return names


def notice(copy: Path, module: Module, old: str, new: str, number: int) -> list[str]:
    """Plant a fault, and return the tests that have failed because of it."""
    path = copy / module.path
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{module.path} has {text.count(old)} places like {old!r}: find another")
    modified = path.stat().st_mtime
    path.write_text(text.replace(old, new))
    # Bytecode is taken to be that of a file which was modified in the same second.
    os.utime(path, (modified + 10 + number, modified + 10 + number))
    try:
        closest = [name for name in module.closest if (copy / name).exists()]
        return failed_tests(copy, *closest) or failed_tests(copy)
    finally:
        path.write_text(text)
        os.utime(path, (modified, modified))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose module or name contains this text")
    parser.add_argument("--tree", type=Path, default=TREE, help="the checkout whose tests to run")
    options = parser.parse_args()
    faults = [
        (module, *fault)
        for module in MODULES
        for fault in module.faults
        if options.only in f"{module.path}: {fault[0]}"
    ]
    missed = 0
    with tempfile.TemporaryDirectory() as parent:
        copy = copy_of(options.tree, Path(parent))
        if failed := failed_tests(copy):
            raise SystemExit(f"red without any fault: {failed[0]}")
        for number, (module, name, old, new) in enumerate(faults):
            began = time.monotonic()
            tests = notice(copy, module, old, new, number)
            missed += not tests
            outcome = f"noticed by {tests[0]}" if tests else "NOT NOTICED"
            print(
                f"{time.monotonic() - began:4.0f} s  {module.path}: {name}: {outcome}", flush=True
            )
    print(f"{len(faults)} faults, {len(faults) - missed} noticed")
    return missed


if __name__ == "__main__":
    sys.exit(main())
