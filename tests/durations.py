# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that prints what the tests of each folder and of the costliest files cost.

The measure is CPU time, since it hardly depends on what else the machine does. It contains the
processes that a test starts, once they have ended and their parents have waited for them.
`--budget` fails a run that costs more. The last line has the share of the machine's busy cores,
other programs included. In the rest of the time, every test waited.
"""

import resource
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import PurePosixPath

import psutil
import pytest

from tests.support.harness import warm


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail if the run takes more than these seconds of CPU time"
    parser.addoption("--budget", type=float, metavar="SECONDS", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))


def cpu_s() -> float:
    """CPU time of this process, of the children that it has waited for, and of the processes that a
    warm Python has forked for it and that have ended, in seconds.
    """
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own = sum(it.ru_utime + it.ru_stime for it in map(resource.getrusage, whose))
    return own + warm.spent_s


@dataclass
class Cost:
    """cpu_s: CPU time. wall_s: the time on the clock, summed over processes. tests: how many."""

    cpu_s: float = 0
    wall_s: float = 0
    tests: int = 0


class Durations:
    """In the process of a test, measure; in the process that prints, sum up."""

    def __init__(self, config: pytest.Config) -> None:
        self._budget: float | None = config.getoption("--budget")
        self._prints = not hasattr(config, "workerinput")
        self._measured = 0.0
        self._busy = psutil.cpu_percent  # since its last call
        self._busy()
        self._collecting = 0.0
        self._folders: dict[str, Cost] = {}
        self._files: dict[str, Cost] = {}

    def pytest_collection_finish(self) -> None:
        self._collecting = self._measured = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_s()
        vars(report).update(cpu_s=now - self._measured, collecting_s=self._collecting)
        self._measured, self._collecting = now, 0.0
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = PurePosixPath(report.nodeid.partition("::")[0])
        for costs, name in ((self._folders, file.parent), (self._files, file)):
            cost = costs.setdefault(str(name), Cost())
            cost.cpu_s += getattr(report, "cpu_s", 0.0)
            cost.wall_s += report.duration
            cost.tests += report.when == "call"
        collection = self._folders.setdefault("collection", Cost())
        collection.cpu_s += getattr(report, "collecting_s", 0.0)

    def total_s(self) -> float:
        return sum(it.cpu_s for it in self._folders.values())

    def over_budget(self) -> bool:
        return self._prints and self._budget is not None and self.total_s() > self._budget

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        tables = (("CPU time by folder", self._folders, None), ("costliest files", self._files, 10))
        for title, costs, most in tables:
            terminalreporter.section(title)
            for name, cost in sorted(costs.items(), key=lambda it: -it[1].cpu_s)[:most]:
                what = f"{cost.wall_s:8.1f} s on the clock {cost.tests:6}  {name}"
                write(f"{cost.cpu_s:7.1f} s {what}")
        budget = "" if self._budget is None else f" of a budget of {self._budget:.0f} s"
        cores = f"{psutil.cpu_count()} cores were busy for {self._busy():.0f} % of the run"
        write(f"{self.total_s():7.1f} s{budget}; {cores}")
        if self.over_budget():
            write("Over the budget: share servers, start fewer processes, or mark tests `nightly`.")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.over_budget() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
