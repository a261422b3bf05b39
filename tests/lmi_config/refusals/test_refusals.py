# SPDX-License-Identifier: Apache-2.0
"""The configurations that vLLM refuses are known: each line of vLLM that refuses one is classified,
and the plan refuses everything that can be known before the start.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lmi_config.options.settings import SettingsError
from tests.lmi_config.refusals.situations import FOLDER, ROWS, TOLD, planned

ROOT = Path(__file__).parent.parent.parent.parent
MOST_OPEN = 0.1


def test_every_refusal_of_vllms_is_classified():
    listed = [line.partition("\t")[0] for line in (FOLDER / "vllm.tsv").read_text().splitlines()]
    assert [*ROWS] == listed


def test_few_are_open():
    states = Counter(row["state"] for row in ROWS.values())
    assert states.keys() == {"told", "unknowable", "open"}
    assert states["open"] <= MOST_OPEN * states.total()
    assert all(row["why"] for row in ROWS.values() if row["state"] != "told")


@pytest.mark.parametrize("row", TOLD.values(), ids=TOLD)
def test_the_plan_tells(row):
    with pytest.raises(SettingsError) as refused:
        planned(row)
    assert row["says"] in "\n".join(refused.value.faults)


def test_an_adapter_that_is_not_there(tmp_path):
    given = {"enable_lora": True, "lora_modules": ["a=/nowhere/a", f"b={tmp_path}"]}
    with pytest.raises(SettingsError, match="OPTION_LORA_MODULES: a=/nowhere/a: there is no such"):
        planned({"options": given})
    given["lora_modules"] = [f"b={tmp_path}"]
    assert planned({"options": given}).options["max_loras"] == 4


def test_the_default_of_max_loras_is_at_most_max_cpu_loras():
    found = planned({"options": {"enable_lora": True, "max_cpu_loras": 2}})
    assert found.options["max_loras"] == 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"options": {"quantization": "awq"}}, "the model's files are not quantised"),
        (
            {"options": {"load_format": "runai_streamer"}, "missing": ["runai_model_streamer"]},
            "needs the package runai-model-streamer, which is not installed",
        ),
        ({"options": {"kv_offloading_size": 4}}, "vLLM offloads KV from GPUs only"),
        (
            {"options": {}, "config": {"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}},
            "set OPTION_TRUST_REMOTE_CODE=true, if you trust that code",
        ),
        ({"options": {"max_model_len": 32768}}, '"max_position_embeddings": 32768'),
    ],
)
def test_what_vllm_refuses_elsewhere_is_told_as_well(row, says):
    """Refusals by its loaders and packages, which are not in the list."""
    with pytest.raises(SettingsError) as refused:
        planned(row)
    assert says in "\n".join(refused.value.faults)


def test_the_page_has_the_counts():
    states = Counter(row["state"] for row in ROWS.values())
    page = (ROOT / "docs" / "reference" / "support_matrix.md").read_text()
    assert f"in {states.total()} places" in page
    rows = {"told": "reported", "unknowable": "not knowable", "open": "open"}
    assert all(f"| {states[state]} | {text}" in page for state, text in rows.items())


def test_the_list_is_that_of_the_installed_vllm():
    from tools.generate import vllm_limits, vllm_refusals

    assert vllm_refusals.PATH.read_text() == vllm_refusals.text()
    assert vllm_limits.PATH.read_text() == vllm_limits.text()


def _words(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.replace("\\n", " ")).strip()


def test_vllm_refuses_them_too():
    """On CPUs, for the row's reason. Situations that need GPUs cannot be tried here."""
    apart = {"gpus", "elsewhere", "package", "missing"}
    asked = [key for key, row in TOLD.items() if not row.keys() & apart]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.lmi_config.refusals.vllm_answers", *asked],
        capture_output=True,
        text=True,
        env=os.environ | quiet,
        cwd=ROOT,
        check=True,
        timeout=500,
    )
    answers = json.loads(ran.stdout.splitlines()[-1])
    lines = (FOLDER / "vllm.tsv").read_text().splitlines()
    templates = {key: message for key, _, message in (line.split("\t") for line in lines)}
    wrong = {}
    for key, answer in answers.items():
        row = TOLD[key]
        pieces = [_words(it) for it in re.split(r"\{[^}]*\}", templates[key])]
        same = answer and all(it in _words(answer) for it in pieces if len(it) > 3)
        if not same and not (answer and row.get("loose")):
            wrong[key] = answer
    assert wrong == {}
