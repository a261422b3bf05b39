# SPDX-License-Identifier: Apache-2.0
"""A copy of the model is killed while it stores KV in the cache server that it shares with another.

KV that it reserved and never wrote may not be read: not by the other copy, not by the copy that
replaces it, and not from the disk after a restart.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.conftest import START_S, serving
from tests.support.harness.wait import until

pytestmark = pytest.mark.nightly

HALTING = (sys.executable, "tests/e2e/halting_stores.py", "serve")
YAML = "max_local_cpu_size: 0.25\nlocal_disk: {folder}/kv\nmax_local_disk_size: 1"
PROMPT = " ".join(f"shared{n}" for n in range(700))
REAP_S = 30
"""The cache server forgets a silent worker after this time (halting_stores.py)."""


@pytest.fixture
def options(tiny_options, tmp_path):
    (tmp_path / "lmcache.yaml").write_text(YAML.format(folder=tmp_path))
    return {
        **tiny_options,
        "OPTION_COPIES": "2",
        "OPTION_DTYPE": "float32",
        "OPTION_ENABLE_PREFIX_CACHING": "false",  # hits come from the tiers alone
        "OPTION_LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"),
        "OPTION_CACHE_SALT_HEADER": "x-tenant",
        "STORES_HALT": str(tmp_path / "halt"),
    }


def ask(served, **headers):
    """The text, and how many tokens of the prompt were not computed."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    url = f"{served.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    found = answer.json()
    details = found["usage"]["prompt_tokens_details"] or {}
    return found["choices"][0]["text"], details.get("cached_tokens") or 0


def is_copy(process):
    *_, program, descriptor = process.cmdline()
    return program.endswith("halting_stores.py") and descriptor.isdigit()


def test_nothing_that_a_copy_had_reserved_and_not_written_is_read(options, tmp_path):
    halt, at = tmp_path / "halt", tmp_path / "at"
    with serving(tmp_path / "log", *HALTING, **options) as it:
        it.ready()
        right, _ = ask(it, **{"x-tenant": "another"})  # which shares no KV with the others
        halt.touch()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, it)
            until(lambda: at.exists() and at.read_text(), 60)
            halt.unlink()
            worker = psutil.Process(int(at.read_text()))
            next(it for it in [worker, *worker.parents()] if is_copy(it)).kill()
            assert asked.result()[0] == right  # by the other copy
        until(lambda: "Reaped non-GPU instance" in it.logged(), REAP_S + 60)
        assert ask(it) == (right, 0)
        until(lambda: ask(it)[1] > 0, 60)  # which the other copy has written since
        until(lambda: "is started again" in it.logged() and it.ready_replicas() == 2, START_S)
        assert {ask(it)[0] for _ in range(4)} == {right}
        until(lambda: any((tmp_path / "kv").rglob("*.data")), 60)
    with serving(tmp_path / "again", *HALTING, **options) as it:
        it.ready()
        found = [ask(it) for _ in range(4)]
        assert {text for text, _ in found} == {right}
        assert found[0][1] > 0  # from the disk
