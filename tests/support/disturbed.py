"""Runs a test that failed once more, by itself, after all others.

A machine that pauses for a second, or a server that others keep busy, is no defect of the package.
A test that then passes was *disturbed*: the last lines of the output name it, and the run is green.
More than :data:`MOST` failed tests are never the weather, so none of them is run again.

This applies where several processes share the machine, as in ``make test``. Somebody who runs one
test in one process, or stops at the first failure, wants to see that failure. Nothing is forgiven
if a test process has crashed, or if chance has found a failure: a storm, a trial at full length, or
a random example would not find it a second time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 5
"""The number of tests that may be disturbed in one run."""
WITHIN = 900
"""The seconds that one test may take when it is run again."""
BY_CHANCE = {"storm", "nightly"}
"""The marks of tests whose failure may not come again."""


class Disturbed:
    """Collects the failures of a run, and judges them when it ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failures: dict[str, list[pytest.TestReport]] = {}
        self._is_final = False
        self._disturbed: list[str] = []
        self._second_failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, []).append(report)
            crashed = report.when not in ("setup", "call", "teardown")
            self._is_final |= crashed or not BY_CHANCE.isdisjoint(report.keywords)

    @pytest.hookimpl(trylast=True)  # the test processes have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Any other status says that not all tests were run.
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or self._is_final:
            return
        if not 0 < len(self._failures) <= MOST:
            return
        for name in self._failures:
            status, output = self._run_again(name)
            if status == pytest.ExitCode.OK:
                self._disturbed.append(name)
            else:
                self._second_failures[name] = output
        unnamed_failures = session.testsfailed - sum(map(len, self._failures.values()))
        if self._disturbed:
            self._count_as_disturbed()
        # Other reasons, such as too little coverage, count like failures.
        if not self._second_failures and not unnamed_failures:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, output in self._second_failures.items():
            terminalreporter.section(f"failed again by itself: {name}")
            terminalreporter.write_line(output)
        for name in self._disturbed:
            terminalreporter.section(f"disturbed: {name}")
            for report in self._failures[name]:
                terminalreporter.write_line(report.longreprtext)
        if self._is_final:
            line = "NONE RUN AGAIN: a test process crashed, or chance found a failure"
            terminalreporter.write_line(line, bold=True, red=True)
        elif len(self._failures) > MOST:
            line = (
                f"NONE RUN AGAIN: {len(self._failures)} failed, and at most {MOST} may be disturbed"
            )
            terminalreporter.write_line(line, bold=True, red=True)
        elif self._failures:
            line = f"disturbed: {len(self._disturbed)}"
            terminalreporter.write_line(line, bold=True, yellow=True)
            for name in self._disturbed:
                terminalreporter.write_line(f"  {name}: passed by itself", yellow=True)

    def _run_again(self, name: str) -> tuple[int, str]:
        """Run one test in a process of its own. Return the exit status and the output."""
        selection = set(self._config.option.file_or_dir)
        options = [
            option
            for option in self._config.invocation_params.args
            if option not in selection and not str(option).startswith("--cov")
        ]
        command = [sys.executable, "-m", "pytest", *map(str, options), "-n0", name]
        try:
            again = subprocess.run(
                command,
                cwd=self._config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=WITHIN,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return pytest.ExitCode.INTERNAL_ERROR, f"not finished after {WITHIN} s"
        return again.returncode, again.stdout

    def _count_as_disturbed(self) -> None:
        """Move the reports of the disturbed tests out of the counts of failures and errors."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not isinstance(terminal, pytest.TerminalReporter):
            return
        for category in ("failed", "error"):
            reports = terminal.stats.pop(category, [])
            other_reports = [r for r in reports if getattr(r, "nodeid", "") not in self._disturbed]
            if other_reports:
                terminal.stats[category] = other_reports
        terminal.stats["disturbed"] = [self._failures[name][0] for name in self._disturbed]


def register(config: pytest.Config) -> None:
    """Apply the policy if this process distributes tests to others and runs all of them."""
    is_worker = hasattr(config, "workerinput")
    distributes = config.getoption("numprocesses", None)
    is_random = config.getoption("hypothesis_profile", None) == "fuzz"
    if distributes and not is_worker and not is_random and not config.getoption("maxfail"):
        config.pluginmanager.register(Disturbed(config))
