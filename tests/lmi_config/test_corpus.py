# SPDX-License-Identifier: Apache-2.0
"""Configurations that people bring run, or are refused with a reason, on a machine with 8 GPUs or
one.
"""

import pytest

from lmi_config.options.settings import SettingsError
from tests.lmi_config.corpus import corpus, planned, published, told

EIGHT_ONLY = "runs on 8 GPUs"


@pytest.mark.parametrize("gpus", [8, 1])
def test_what_people_come_with(tmp_path, gpus):
    wrong = []
    for number, (line, verdict) in enumerate(corpus()):
        store = tmp_path / str(number)
        store.mkdir()
        expected = verdict.removeprefix("refused: ")
        if verdict == EIGHT_ONLY:
            expected = "runs" if gpus == 8 else "GPUs, but this machine shows 1"
        try:
            planned(line, gpus, store)
            found = "runs"
        except SettingsError as error:
            found = "\n".join(error.faults)
        if gpus == 1 and "this machine shows 1" in found and verdict != "runs":
            continue  # that is found before the other faults
        if expected not in found:
            wrong.append((line, expected, found))
    assert not wrong


def test_no_line_is_there_twice():
    lines = [line for line, _ in corpus()]
    assert len({*lines}) == len(lines)


@pytest.mark.parametrize("it", [*published()], ids=lambda it: it.address.partition("/blob/")[2])
def test_what_people_have_published(tmp_path, it):
    try:
        found = told(it.plan(tmp_path))
    except SettingsError as error:
        found = {"refused": "\n".join(error.faults)}
    missing = {name: text for name, text in it.expected.items() if text not in found.get(name, "")}
    assert not missing, {name: found.get(name, found.get("refused")) for name in missing}


def test_what_is_published_is_of_every_kind():
    """At least 100: 30 of them have LMCache, a disk or disaggregated prefill, and 20 are
    manifests.
    """
    found = [*published()]
    assert len({it.address for it in found}) == len(found) >= 100
    assert all(it.expected for it in found)
    cached = ("LMCACHE", "kv_transfer_config", "kv-transfer-config", "KV_TRANSFER")
    assert sum(any(word in str(it) for word in cached) for it in found) >= 30
    manifests = ("kubernetes", "llm-d/llm-d", "production-stack", "HyperPod", "hyperpod")
    assert sum(any(word in it.address for word in manifests) for it in found) >= 20
