"""A profile of a sample: the client's time by module, and the server's by command."""

from __future__ import annotations

import cProfile
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._moves import SENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import CodeType

KERNEL, HANDLER, OTHER_PYTHON = "system calls", "the benchmark itself", "rest of Python"
LUA, OUTSIDE = "Lua, and replies", "outside scripts"
# Packages that are not divided into modules.
PACKAGES = {
    "asyncio": "asyncio",
    "benchmarks": HANDLER,
    "__main__": HANDLER,
    "hiredis": "hiredis",
    "json": "JSON",
    "redis": "redis-py",
}
# Parts of the names of functions in C. All other functions in C belong to their callers.
IN_C = {
    "hiredis": "hiredis",
    "_json": "JSON",
    "msgspec": "JSON",
    "_asyncio": "asyncio",
    "_contextvars": "asyncio",
}
# These functions in C wait, or make other processes run instead: the system's own figure is used.
SYSTEM = ("select.", "_socket", "posix")


class Share(NamedTuple):
    """The part of a cause: elapsed time and calls from its functions, per message."""

    us: float
    calls: float


class Profile:
    """Profiles this process and counts the time of the server's commands, from :meth:`begin` to
    :meth:`end`.

    Attributes:
        client: The share of each cause, without system calls.
        commands: Microseconds per message of each command that scripts called.
    """

    def __init__(self) -> None:
        self.client: dict[str, Share] = {}
        self.commands: dict[str, float] = {}
        self._profiler = cProfile.Profile()
        self._before: dict[str, float] = {}

    def begin(self, server: Any) -> None:
        self._before = command_us(server)
        self._profiler.enable()

    def end(self, server: Any, count: int) -> None:
        self._profiler.disable()
        self.client = {
            cause: Share(share.us / count, share.calls / count)
            for cause, share in shares(self._profiler.getstats(), modules()).items()
        }
        spent = {name: us - self._before.get(name, 0.0) for name, us in command_us(server).items()}
        self.commands = {name: us / count for name, us in spent.items()}


def command_us(server: Any) -> dict[str, float]:
    """Return how long each command has taken so far, microseconds, if only scripts call it."""
    stats = server.info("commandstats")
    names = {name: name.removeprefix("cmdstat_") for name in stats}
    return {
        short: stats[name]["usec"]
        for name, short in names.items()
        if short not in SENT and short != "info"
    }


def modules() -> dict[str, str]:
    """Return the names of all modules, by their files."""
    return {
        file: name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
    }


def cause_of(code: CodeType | str, names: Mapping[str, str]) -> str | None:
    """Return the cause to which a function's time belongs, or None if it is its caller's.

    Functions in C are strings.
    """
    if isinstance(code, str):
        return next((cause for part, cause in IN_C.items() if part in code), None)
    module = names.get(code.co_filename, "")
    package = module.partition(".")[0]
    return module if package == "delayq" else PACKAGES.get(package, OTHER_PYTHON)


def shares(entries: Iterable[Any], names: Mapping[str, str]) -> dict[str, Share]:
    """Add up a profile's entries by cause: microseconds, and calls made."""
    totals: dict[str, Share] = {}

    def add(cause: str, seconds: float, calls: int) -> None:
        before = totals.get(cause, Share(0.0, 0))
        totals[cause] = Share(before.us + seconds * 1e6, before.calls + calls)

    for entry in entries:
        cause, callees = cause_of(entry.code, names) or OTHER_PYTHON, entry.calls or ()
        # The time of functions in C is counted with their callers, below.
        seconds = 0.0 if isinstance(entry.code, str) else entry.inlinetime
        add(cause, seconds, sum(callee.callcount for callee in callees))
        for callee in callees:
            if isinstance(callee.code, str) and not any(part in callee.code for part in SYSTEM):
                add(cause_of(callee.code, names) or cause, callee.inlinetime, 0)
    return totals


def undisturbed(profiles: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Share]:
    """Return the least share of each cause over several profiles of the same work.

    A profile has elapsed time, and other processes only add to that.
    """
    return {
        cause: min(Share(*profile[cause]) for profile in profiles if cause in profile)
        for cause in {cause for profile in profiles for cause in profile}
    }


def client_us(
    profile: Mapping[str, Share],
    profiled: Mapping[str, float],
    plain_us: float,
    kernel_us: float,
) -> dict[str, float]:
    """Return the processor time of each cause per message, microseconds, which add up to
    ``plain_us``.

    A profiler adds some time to each call. So the time that the process needed more with it is
    divided among the calls and subtracted.

    Args:
        profile: The share of each cause.
        profiled: The figures of the process under the profiler.
        plain_us: The processor time of a process without one.
        kernel_us: The part of it that system calls took.
    """
    own_us = plain_us - kernel_us
    calls = sum(share.calls for share in profile.values())
    overhead_us = max(0.0, profiled["client_us"] - profiled["kernel_us"] - own_us) / max(calls, 1.0)
    adjusted = {
        cause: max(0.0, share.us - overhead_us * share.calls) for cause, share in profile.items()
    }
    scale = own_us / sum(adjusted.values())
    return {KERNEL: kernel_us} | {cause: us * scale for cause, us in adjusted.items()}


def server_us(commands: Mapping[str, float], script_us: float, whole_us: float) -> dict[str, float]:
    """Return the server's processor time per message by cause, microseconds."""
    lua = script_us - sum(commands.values())
    called = {name: us for name, us in commands.items() if us}
    return {OUTSIDE: max(0.0, whole_us - script_us), LUA: lua, **called}
