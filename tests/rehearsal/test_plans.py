# SPDX-License-Identifier: Apache-2.0
"""Plans for machines with GPUs, checked by vLLM's CUDA build on a machine that claims to
have them.
"""

import json
from pathlib import Path

import pytest

from tests.rehearsal.conftest import ask
from tools.rehearsal.cases import MACHINES, cases, disagreements, planned

RECORDED = Path(__file__).parent / "recorded.jsonl"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", MACHINES)
def test_what_plan_says_is_what_vllm_does(machine, models, libraries, request):
    mine = [case for case in cases() if case.machine == machine]
    plans = [planned(case, models) for case in mine]
    wanted = ("judge", "environment")
    questions = ({name: plan[name] for name in wanted} for plan in plans)
    verdicts = [
        json.loads(json.dumps(verdict).replace(str(models), "{models}"))
        for verdict in ask(libraries, MACHINES[machine], questions)
    ]
    found = {case.name: verdict for case, verdict in zip(mine, verdicts, strict=True)}
    recorded = {
        line["case"]: line["vllm"] for line in map(json.loads, RECORDED.read_text().splitlines())
    }
    if request.config.getoption("--record", False):
        order = [case.name for case in cases()]
        kept = {name: it for name, it in (recorded | found).items() if name in order}
        RECORDED.write_text(
            "".join(
                json.dumps({"case": name, "vllm": kept[name]}) + "\n"
                for name in sorted(kept, key=order.index)
            )
        )
        recorded = kept
    wrong = {
        case.name: list(disagreements(plan, found[case.name]))
        for case, plan in zip(mine, plans, strict=True)
    }
    assert {name: it for name, it in wrong.items() if it} == {}
    assert found == {name: recorded.get(name) for name in found}
