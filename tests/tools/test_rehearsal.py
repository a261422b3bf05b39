# SPDX-License-Identifier: Apache-2.0
"""Plans for machines with GPUs, compared with the verdicts of vLLM's CUDA build on the same cases,
as the last `scripts/test rehearsal --record` wrote them.
"""

import json
from pathlib import Path

import pytest

from tools.rehearsal import shapes
from tools.rehearsal.cases import FEATURES, MACHINES, cases, disagreements, planned

RECORDED = Path(__file__).parents[1] / "rehearsal" / "recorded.jsonl"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shapes.make(folder)
    return folder


def test_what_plan_says_is_what_vllm_said(models):
    said = {it["case"]: it["vllm"] for it in map(json.loads, RECORDED.read_text().splitlines())}
    assert [*said] == [case.name for case in cases()]
    wrong = {
        case.name: [*disagreements(planned(case, models), said[case.name])] for case in cases()
    }
    assert {name: it for name, it in wrong.items() if it} == {}


def test_every_model_and_every_machine_meets_every_feature():
    pairs = {tuple(case.name.split()) for case in cases()}
    for feature in FEATURES:
        assert {model for _, model, *rest in pairs if rest == [feature]} == {*shapes.MODELS}
        assert {machine for machine, _, *rest in pairs if rest == [feature]} == {*MACHINES}


@pytest.mark.parametrize(
    ("plan", "vllm", "found"),
    [
        ({"refused": ["a"]}, {"refused": "b"}, []),
        ({"refused": ["a"]}, {"tensor": 1}, ["vLLM would have run what plan refuses: ['a']"]),
        ({"tensor": 1}, {"refused": "b"}, ["plan accepts what vLLM refuses: b"]),
        ({"tensor": 1, "length": 2}, {"tensor": 1, "length": 3}, ["length: plan 2, vLLM 3"]),
        ({"tensor": 1}, {"tensor": 1, "not_built": "wants a GPU"}, []),
    ],
)
def test_a_disagreement_is_seen(plan, vllm, found):
    assert [*disagreements(plan, vllm)] == found
