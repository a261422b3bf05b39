# SPDX-License-Identifier: Apache-2.0
"""A model's fingerprint: the changes that make another model of it, and those that do not."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import vllm.model_executor

from lmi_config.options.settings import read
from lmi_config.plan import plan
from serving.kv_cache.fingerprints import fingerprint, store_name
from serving.kv_cache.neutral_options import ELSEWHERE, HARMLESS
from tests.lmi_config.examples import H100, PARTS, machine
from tests.lmi_config.examples import model as facts
from tests.serving.sources.test_digests import SIZE, model

CHUNK = 128
ROOT = Path(__file__).parents[3]
OPTIONS = json.loads((ROOT / "lmi_config/options/vllm_options.json").read_text())
LONG_ROPE = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024}


def configured(folder: Path, config: object) -> Path:
    made = model(folder)
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_one_byte_of_the_weights_makes_another_model(tmp_path):
    same = [model(tmp_path / name) for name in ("a", "b")]
    others = [model(tmp_path / str(place), place) for place in (0, SIZE // 2 + 5000, SIZE - 1)]
    found = [fingerprint(it, {}, CHUNK) for it in (*same, *others)]
    assert found[0] == found[1]
    assert len({*found}) == 4


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - ELSEWHERE))
def test_every_option_counts_that_is_not_named_harmless(tmp_path, option):
    """A new option of vLLM's is in the file, and counts."""
    folder = tmp_path
    (folder / "config.json").write_text("{}")
    found = [fingerprint(folder, it, CHUNK) for it in ({}, {option: "1"}, {option: "2"})]
    assert len({*found}) == (1 if option in HARMLESS else 3)


def test_only_options_that_there_are_are_named_harmless():
    assert OPTIONS.keys() >= HARMLESS | ELSEWHERE


MAY_CHANGE_KV = {
    *("dtype", "hf_overrides", "kv_cache_dtype", "load_format", "quantization", "hf_config_path"),
    *("config_format", "model_impl", "mm_processor_kwargs", "disable_sliding_window", "runner"),
    *("kv_sharing_fast_prefill", "kv_cache_dtype_skip_layers", "quantization_config", "convert"),
    *("speculative_config", "attention_config", "additional_config", "pipeline_parallel_size"),
    *("decode_context_parallel_size", "disable_hybrid_kv_cache_manager", "block_size"),
}


def test_what_may_change_kv_is_not_harmless():
    assert OPTIONS.keys() >= MAY_CHANGE_KV
    assert not MAY_CHANGE_KV & (HARMLESS | ELSEWHERE)


def test_what_is_vllms_default_anyway_makes_no_other_model(tmp_path):
    folder = model(tmp_path / "a")
    same: tuple[dict[str, Any], ...]
    same = {}, {"dtype": "auto"}, {"kv_cache_dtype": "auto"}, {"dtype": None}
    same = *same, {"load_format": "auto"}, {"load_format": "fastsafetensors"}
    assert len({fingerprint(folder, it, CHUNK) for it in same}) == 1


@pytest.mark.parametrize(
    ("config", "lengths", "models"),
    [
        ({"model_type": "llama"}, (None, 1000, 2000, -1), 1),
        ({"rope_scaling": {"rope_type": "yarn"}}, (None, 1000, 2000), 1),
        (LONG_ROPE, (None, 512, 1024, -1), 1),
        (LONG_ROPE, (2048, 4096), 1),
        (LONG_ROPE, (1024, 2048), 2),
        ({"text_config": LONG_ROPE}, (1024, 2048), 2),
        (LONG_ROPE | {"original_max_position_embeddings": "?"}, (1024, 2048), 2),
        ({"model_type": "llama4"}, (32768, 32769), 2),
        ({"text_config": {"model_type": "llama4_text"}}, (-1, -1), 2),
        ({"auto_map": {"AutoModel": "code.Model"}}, (1024, 2048), 2),
        ([], (1024, 2048), 2),
    ],
)
def test_the_length_counts_where_positions_depend_on_it(tmp_path, config, lengths, models):
    folder = configured(tmp_path / "a", config)
    found = {fingerprint(folder, {"max_model_len": it}, CHUNK) for it in lengths}
    assert len(found) == models


def test_the_length_counts_where_the_configuration_is_another(tmp_path):
    folder = configured(tmp_path / "a", {})
    options = {"hf_overrides": {"rope_scaling": LONG_ROPE}}
    found = {fingerprint(folder, options | {"max_model_len": it}, CHUNK) for it in (1024, 2048)}
    assert len(found) == 2


def test_every_place_where_vllm_uses_the_length_in_a_model_is_known():
    """A new place may change positions: see _length, and add the place there or here."""
    code = Path(vllm.model_executor.__file__).parent
    folders = (code / "layers" / "rotary_embedding", code / "models")
    found = {
        file.stem
        for folder in folders
        for file in folder.rglob("*.py")
        if re.search(r"max_model_len", file.read_text())
    }
    positions = {"phi3_long_rope_scaled_rope", "llama4", "minimax_m2", "cohere_compass"}
    positions |= {"plamo3"}
    assert found - positions == BY_THE_WAY


BY_THE_WAY = {
    *("colpali", "config", "deepseek_ocr", "deepseek_v2", "diffusion_gemma", "embedding_gemma2"),
    *("ernie45_vl", "gemma3_mm", "gemma4_mm", "glm4_1v", "idefics3", "internvl", "kimi_k25"),
    *("kimi_vl", "lfm2_vl", "minicpmv", "mllama4", "nano_nemotron_vl", "parakeet", "qwen2_5_vl"),
    *("qwen2_vl", "qwen3_vl", "step3_vl", "voxtral", "voxtral_realtime"),
}
"""The length of buffers and of media; and of positions, in models that keep no KV."""


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("preprocessor_config.json", True),
        ("modeling_own.py", True),
        ("tokenizer.json", False),
        ("generation_config.json", False),
        ("README.md", False),
        ("serving.properties", False),
        ("model.py", False),
    ],
)
def test_files_beside_the_weights(tmp_path, name, counts):
    folder = model(tmp_path / "a")
    before = fingerprint(folder, {}, CHUNK)
    (folder / name).write_text("{}")
    assert (fingerprint(folder, {}, CHUNK) != before) == counts


def test_chunks_of_another_size_are_another_models(tmp_path):
    folder = model(tmp_path / "a")
    assert fingerprint(folder, {}, 128) != fingerprint(folder, {}, 256)


def test_stores_from_before_are_another_models(tmp_path, monkeypatch):
    folder = model(tmp_path / "a")
    now = fingerprint(folder, {}, CHUNK)
    monkeypatch.setattr("serving.kv_cache.fingerprints.SCHEMA", 1)
    assert fingerprint(folder, {}, CHUNK) != now


def test_a_fleets_servers_share_whatever_their_sizes_ports_and_names(tmp_path):
    """The options come from plans for two machines with different settings."""
    folder = model(tmp_path / "a")
    one = {"OPTION_LMCACHE_AUTO_CONFIG": "true", "OPTION_MODEL_ID": "/a"}
    other = one | {
        "OPTION_MODEL_ID": "/elsewhere/b",
        "OPTION_MAX_ROLLING_BATCH_SIZE": "7",
        "OPTION_MAX_MODEL_LEN": "1024",
        "OPTION_GPU_MEMORY_UTILIZATION": "0.7",
        "OPTION_SERVED_MODEL_NAME": "name",
        "OPTION_ENABLE_PREFIX_CACHING": "true",
        "OPTION_SEED": "7",
    }
    fast, slow = (dataclasses.replace(H100, capability=it) for it in ((9, 0), (8, 6)))
    machines = (
        dataclasses.replace(machine(gpus=1), gpus=(fast,)),
        dataclasses.replace(machine(gpus=1, ports=(9, 8, 7)), gpus=(slow,)),
    )
    found = set()
    for environ, here in zip((one, other), machines, strict=True):
        made = plan.make(read(environ), here, facts(2), None, environ, PARTS, None, 0)
        found.add(fingerprint(folder, made.options, CHUNK, machine=here))
    assert len(found) == 1


def test_machines_that_take_other_numbers_do_not_share(tmp_path):
    folder = model(tmp_path / "a")
    old = dataclasses.replace(H100, capability=(7, 5))
    machines = machine(), machine(gpus=1), dataclasses.replace(machine(gpus=1), gpus=(old,))
    assert len({fingerprint(folder, {}, CHUNK, machine=it) for it in machines}) == 3


def test_servers_share_a_store_only_with_the_same_model_and_chunks(tmp_path):
    """The router uses this name to know whose KV a replica finds in its shared store."""
    same, other = model(tmp_path / "a"), model(tmp_path / "b", 0)
    here, there = {"host": "10.0.0.5", "port": 6379}, {"host": "10.0.0.6", "port": 6379}
    fleet = [(here, same, 128), (here, other, 128), (here, same, 256), (there, same, 128)]
    names = [store_name(place, fingerprint(it, {}, size)) for place, it, size in fleet]
    assert len({*names}) == 4
    again = store_name(dict(reversed(here.items())), fingerprint(model(tmp_path / "c"), {}, 128))
    assert again == names[0]
