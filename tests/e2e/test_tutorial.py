# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/start/tutorial, run in order: each command prints what its page shows.

A server is forked with the tiny model instead of the default one, so texts and numbers differ from
the page: the keys of JSON and everything outside of "…" must agree.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documented
from tests.e2e.conftest import PYTHON, serving
from tests.e2e.test_docs import shape
from tests.support.harness import ports
from tests.support.harness.process import ROOT

FOLDER = "docs/start/tutorial/"
PAGES = ("model", "adapter", "kv_tiers", "router", "keys metrics", "sagemaker")
"""Groups of pages that share servers."""


def commands(page):
    return [it for it in documented.commands() if it.where.startswith(f"{FOLDER}{page}.md")]


class Terminals:
    """A checkout's folder, the servers that were started in it, and their ports."""

    def __init__(self, folder: Path, options: dict[str, str], stack: contextlib.ExitStack) -> None:
        kept = {"OPTION_KV_DISK_PATH": str(folder / "kv")}  # with nothing of an earlier run
        self.folder, self.options, self.stack = folder, options | kept, stack
        self.ports: dict[str, int] = {}
        self.environ = {
            **os.environ,
            "OPTION_MODEL_ID": options["OPTION_MODEL_ID"],
            "SLIPWAY_PYTHON": sys.executable,  # as scripts/sagemaker sets it
        }
        for name in (
            ".venv",
            "scripts",
            "tools",
            "tests",
            "examples",
            "serving",
            "lmi_config",
            "entrypoint.sh",
        ):
            (folder / name).symlink_to(ROOT / name)

    def moved(self, line: str) -> str:
        """The line with the actual ports of the servers."""
        line = line.replace("$PWD", str(self.folder))
        for port, real in self.ports.items():
            line = re.sub(rf"(localhost|127\.0\.0\.1):{port}", f"127.0.0.1:{real}", line)
        model = self.options["OPTION_MODEL_ID"]
        return line.replace("/root/.cache/slipway/models/tiny-llama-1", model)

    def start(self, verb: str, words: list[str]) -> None:
        port = "8080"
        if "--port" in words:
            at = words.index("--port")
            port = words[at + 1]
            del words[at : at + 2]
        served = serving(
            self.folder / f"log-{port}",
            *PYTHON,
            verb,
            *words,
            **(self.options if verb == "serve" else {}),
        )
        self.stack.enter_context(served)
        served.ready()
        self.ports[port] = served.port

    def stand_in(self, words: list[str], shown: str) -> None:
        port = ports.free()
        command = [sys.executable, "-m", "tools.sagemaker_local", *words, "--port", str(port)]
        process = self.stack.enter_context(
            subprocess.Popen(
                command, cwd=self.folder, stdout=subprocess.PIPE, text=True, env=self.environ
            )
        )
        self.stack.callback(process.terminate)
        self.ports["9000"] = port
        assert process.stdout
        lines = [next(process.stdout) for _ in shown.strip().splitlines()]
        assert_shown("".join(lines), self.moved(shown))
        self.environ |= dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))

    def run(self, command: documented.Command) -> None:
        line = self.moved(command.line)
        verb, *words = shlex.split(line)
        if verb in ("scripts/serve", "scripts/route"):
            self.start(verb.removeprefix("scripts/"), words)
        elif verb == "scripts/sagemaker":
            self.stand_in(words, command.output)
        else:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=self.folder,
                env=self.environ,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if command.output.strip():
                assert_shown(done.stdout, self.moved(command.output))


def assert_shown(got: str, shown: str) -> None:
    """Compare output with a page: numbers in sentences may differ, and "…" matches anything."""
    with contextlib.suppress(ValueError):
        expected = [json.loads(it) for it in shown.strip().splitlines()]
        if any(isinstance(it, dict) for it in expected):
            assert shape([json.loads(it) for it in got.splitlines()]) == shape(expected)
            return
    pattern = re.escape(shown.strip()).replace("…", ".*")
    pattern = re.sub(r"\d+\\\.\d+(?=\\ s,)", r"\\d+\\.\\d+", pattern)
    pattern = re.sub(r"[1-9][\d,]*(?=\\ (of|prompt))", r"[1-9][\\d,]*", pattern)
    assert re.fullmatch(pattern, got.strip(), re.DOTALL | re.IGNORECASE), (got, shown)


@pytest.mark.parametrize("pages", PAGES)
def test_each_command_prints_what_its_page_shows(pages, tiny_options, tmp_path):
    with contextlib.ExitStack() as stack:
        here = Terminals(tmp_path, tiny_options, stack)
        for page in pages.split():
            assert commands(page)
            for command in commands(page):
                here.run(command)


def test_every_page_is_run():
    pages = {it.stem for it in (ROOT / FOLDER).glob("*.md")}
    assert pages == set(" ".join(PAGES).split())
