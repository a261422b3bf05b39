# SPDX-License-Identifier: Apache-2.0
"""The suite for a machine with GPUs: `scripts/test gpu`. It writes its findings to build/gpu.json
and, for people, to build/gpu.md.

With SLIPWAY_GPU_SUITE=cpu the same tests run on the CPU engine, so that only CUDA is left untried.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from lmi_config.facts import gpus
from tests.e2e.conftest import ROOT, Served, serving, tiny_options
from tests.support.harness.process import SERVE

__all__ = ["tiny_options"]  # a fixture

ON_CPU = os.environ.get("SLIPWAY_GPU_SUITE") == "cpu"
FOUND = gpus.look(os.environ)
RESULT = ROOT / "build" / "gpu.json"
_outcomes: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--list", action="store_true", help="print what would be done, and do nothing")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--list", False):
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        for item in items:
            documented = getattr(item, "function", None).__doc__ or ""
            terminal.write_line(f"{item.name:40} {documented.partition(chr(10))[0]}")
        items.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        _outcomes[item.name] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            **dict(report.user_properties),
        }


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--list", False):
        session.exitstatus = pytest.ExitCode.OK
    ran = any(it["outcome"] != "skipped" for it in _outcomes.values())
    if ran:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result(), indent=2) + "\n")
        RESULT.with_suffix(".md").write_text(page(result()))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def result() -> dict[str, Any]:
    """All findings, and the machine that they come from."""
    git = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit or None,
        "engine": "cpu" if ON_CPU else "gpu",
        "gpus": [gpu.name for gpu in FOUND.shown],
        "driver": FOUND.shown[0].driver if FOUND.shown else None,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "versions": {it: _version(it) for it in ("vllm", "lmcache", "torch")},
        "tests": _outcomes,
    }


def page(found: dict[str, Any]) -> str:
    """The findings as a page for people."""
    devices = ", ".join(found["gpus"]) or "no GPU: the CPU engine"
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    lines = [
        f"# {devices}",
        "",
        f"{found['date']}; driver {found['driver'] or 'none'}; {found['machine']}; {versions}; "
        f"commit {(found['commit'] or 'unknown')[:12]}.",
        "",
        "| | | seconds | figures |",
        "|---|---|---|---|",
    ]
    for name, it in found["tests"].items():
        figures = {key: it[key] for key in it if key not in ("outcome", "seconds", "output")}
        told = ", ".join(f"{key} {number}" for key, number in figures.items())
        lines.append(f"| {name} | {it['outcome']} | {it['seconds']} | {told} |")
    for name, it in found["tests"].items():
        if "output" in it:
            lines += ["", f"## {name}", "", "```text", it["output"].strip(), "```"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu() -> None:
    if not ON_CPU and not FOUND.shown:
        pytest.skip(f"no GPU is visible: {FOUND.missing}")


@pytest.fixture(scope="session")
def options(tiny_options) -> dict[str, str]:
    """In float32: the rest of a batch does not decide between near ties."""
    alone = {"OPTION_DTYPE": "float32", "OPTION_TENSOR_PARALLEL_DEGREE": "1"}
    return {**tiny_options, **alone, **shared()}


def shared(part: str = "0.5") -> dict[str, str]:
    """Options of a server that shares the GPU with others: vLLM refuses to start unless this share
    of it is free.
    """
    return {} if ON_CPU else {"OPTION_GPU_MEMORY_UTILIZATION": part}


def start(log: Path, **environ: str) -> Served:
    """A server to be entered. It is not forked on a GPU, because CUDA must not be forked."""
    return serving(log, *(() if ON_CPU else SERVE), **environ)
