# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.engines.trial VERSION [--record] [ARGUMENT...]`: whether Slipway fits the vLLM
of this Python: its patches, and a short suite with the real engine. Further arguments go to pytest.

--record writes the result into serving/engine/versions/versions.toml.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from serving.engine.versions.table import FILE

ROOT = Path(__file__).parent.parent.parent
CONTRACT = ("tests/serving/test_patches.py", "tests/serving/engine/test_versions.py")
SHORT = (
    "tests/e2e/test_api.py",
    "tests/e2e/test_agents.py",
    "tests/e2e/test_forced_calls.py",
    "tests/e2e/test_adapters.py::test_caches_are_never_shared",
    "tests/e2e/test_adapters.py::test_in_one_batch_each_has_its_own_weights",
    "tests/e2e/test_adapters.py::test_a_prompts_log_probabilities_are_those_of_its_own_adapter",
    "tests/e2e/test_kv_tiers.py::test_a_hit_answers_as_a_miss_does",
    "tests/e2e/test_kv_tiers.py::test_tenants_never_share",
    "tests/e2e/test_speech.py::test_tenants_share_no_sounds",
)
"""The end-to-end tests of the engine's patches, and of the clients' paths."""
SEEN = "the contract tests and the short end-to-end suite, on CPUs"


def recorded(table: str, version: str, seen: str) -> str:
    """The table's text with a test result of a version of vLLM."""
    line = f'"{version}" = "{seen}"\n'
    text, replaced = re.subn(
        rf'(?m)^"{re.escape(version)}" = ".*"\n(?=(?:".*\n)*\n\[vllm\.limits\])', line, table
    )
    return text if replaced else table.replace("\n[vllm.limits]", f"{line}\n[vllm.limits]", 1)


def summary(output: str) -> str:
    """Pytest's last line without its time, as `3 failed, 40 passed`."""
    found = re.findall(r"(?m)^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", output)
    return found[-1] if found else "the tests did not run"


def run(tests: Sequence[str], more: Sequence[str]) -> tuple[int, str]:
    """Run tests with this Python. Returns the exit code and pytest's summary."""
    command = [sys.executable, "-m", "pytest", "-q", *tests, *more]
    done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.stdout
    lines = []
    for line in done.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return done.wait(), summary("".join(lines))


def main(version: str, *more: str) -> int:
    """Returns the exit code."""
    arguments = [it for it in more if it != "--record"]
    contract, of_contract = run(CONTRACT, arguments)
    suite, of_suite = run(SHORT, arguments)
    ends = f"the contract tests: {of_contract}; the short end-to-end suite, on CPUs: {of_suite}"
    print(f"vLLM {version}: {ends}")
    if "--record" in more:
        FILE.write_text(recorded(FILE.read_text(), version, ends if contract or suite else SEEN))
    return contract or suite


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
