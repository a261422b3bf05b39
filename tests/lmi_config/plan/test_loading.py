# SPDX-License-Identifier: Apache-2.0
"""How vLLM gets the weights, as the plan decides it."""

import json
import os

import pytest

from lmi_config.facts.layers import KvLayers
from lmi_config.facts.machine import Place, place_of
from lmi_config.facts.model import Folder, Shards, look
from lmi_config.options.settings import read
from lmi_config.plan import explain, plan
from lmi_config.plan.weights import loading as loading_of_plan
from tests.lmi_config.examples import GIB, PARTS, machine, model
from tests.lmi_config.facts.test_model import LLAMA_8B, safetensors

FILES = {"model-1-of-2.safetensors": GIB, "model-2-of-2.safetensors": GIB}
EARLY = "fetched while vLLM starts; it reads each file once the file is complete"


def loading(environ=None, to_fetch=2 * GIB, drafted=None, here=None, **more):
    environ = {"OPTION_MODEL_ID": "s3://bucket/model", "OPTION_MAX_MODEL_LEN": "8192"} | (
        environ or {}
    )
    facts = model(2, **{"shards": Shards(FILES), **more})
    made = plan.make(
        *(read(environ), here or machine(), facts, drafted, environ, PARTS), to_fetch=to_fetch
    )
    return made, made.loading


def test_vllm_starts_while_its_weights_are_fetched():
    made, found = loading()
    assert (dict(found.arriving), found.reason) == (FILES, EARLY)
    assert [*found.arriving] == [*FILES]
    assert ("weights", "2 files", EARLY) in [*explain.rows(made)]


def test_weights_that_are_here_are_loaded_as_ever():
    made, found = loading(to_fetch=0)
    assert (found.arriving, found.reason) == ({}, "")
    assert not [row for row in explain.rows(made) if row[0] == "weights"]


@pytest.mark.parametrize(
    ("environ", "more", "why"),
    [
        ({}, {"shards": None}, "there is one file, or no index"),
        ({}, {"shards": Shards(FILES, "vLLM looks for it")}, "vLLM looks for it"),
        ({"OPTION_COPIES": "2"}, {}, "several servers use one fetch"),
        ({"OPTION_LMCACHE_AUTO_CONFIG": "true"}, {}, "KV caches are named after all"),
        ({"OPTION_ENTRYPOINT": "model.py"}, {}, "a model.py may read the weights"),
        ({"OPTION_LOAD_FORMAT": "safetensors"}, {}, "OPTION_LOAD_FORMAT is set"),
        ({"OPTION_HF_OVERRIDES": "{}"}, {}, "OPTION_HF_OVERRIDES is set"),
        ({"OPTION_TRUST_REMOTE_CODE": "true"}, {}, "code of the model"),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"method": "ngram", "num_speculative_tokens": 3}'},
            {},
            "a draft is loaded as well",
        ),
        ({}, {"quantization": "fp8"}, "the weights are quantised"),
        ({"OPTION_QUANTIZE": "fp8_per_tensor"}, {}, "the weights are quantised"),
        ({"OPTION_TASK": "embed"}, {}, "embeddings or scores"),
        ({}, {"kept": KvLayers(full=32, pooled=True)}, "embeddings or scores"),
    ],
)
def test_all_is_fetched_first_where_others_read_the_weights(environ, more, why):
    _, found = loading(environ, **more)
    assert not found.arriving
    assert found.reason.startswith("fetched before vLLM starts: ")
    assert why in found.reason


def test_a_model_py_beside_the_options_may_read_the_weights(tmp_path):
    (tmp_path / "serving.properties").write_text("option.model_id=s3://bucket/model\n")
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    _, found = loading({"SERVING_MODEL_STORE": str(tmp_path), "OPTION_ENTRYPOINT": "model.py"})
    assert "a model.py may read the weights" in found.reason


SHARDS = [f"model-{number}-of-11.safetensors" for number in (10, 2, 11, 1)]


def shards(folder, config=LLAMA_8B, head=False, **files):
    """The facts about a model of four files with an index."""
    weights = {name: f"model.layers.{at}.weight" for at, name in enumerate(SHARDS)}
    if head:
        weights[SHARDS[0]] = "lm_head.weight"
    (folder / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {tensor: file for file, tensor in weights.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, tensor in weights.items():
        (folder / name).write_bytes(safetensors({tensor: ("BF16", [2, 3])}))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return look(Folder(folder)).shards


def test_the_files_are_in_the_order_in_which_vllm_reads_them(tmp_path):
    found = shards(tmp_path)
    assert found
    assert [*found.sizes] == [SHARDS[at] for at in (3, 1, 0, 2)]
    assert found.sizes[SHARDS[0]] == (tmp_path / SHARDS[0]).stat().st_size
    assert found.unsettled == ""


UNTIED = LLAMA_8B | {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "head", "files", "why"),
    [
        (UNTIED, True, {}, ""),
        (LLAMA_8B, True, {}, "vLLM looks for lm_head.weight in them"),
        (LLAMA_8B | {"tie_word_embeddings": True}, True, {}, "vLLM looks for lm_head.weight"),
        ({**LLAMA_8B, "torch_dtype": None}, False, {}, "config.json has no dtype"),
        (UNTIED, False, {"model__py": b""}, "its model.py may read them"),
    ],
)
def test_what_else_reads_them_is_known(tmp_path, config, head, files, why):
    found = shards(tmp_path, config, head, **files)
    assert found
    assert found.unsettled.startswith(why)
    assert bool(found.unsettled) == bool(why)


@pytest.mark.parametrize("other", ["other__safetensors", "consolidated__safetensors"])
def test_weights_beside_those_of_the_index_are_not_fetched_meanwhile(tmp_path, other):
    """vLLM reads the headers of all files, or takes the other ones."""
    content = safetensors({"lm_head.weight": ("BF16", [2, 3])})
    assert shards(tmp_path, UNTIED, **{other: content}) is None


NVME = Place("ext4")
BIG = {f"model-{number}-of-4.safetensors": 4 * GIB for number in range(4)}


def from_disk(environ=None, gpus=1, place=NVME, gib=16, missing=(), drafted=None, **more):
    environ = {"OPTION_MODEL_ID": "/models/it", "OPTION_MAX_MODEL_LEN": "8192"} | (environ or {})
    facts = model(gib, **{"shards": Shards(BIG), **more})
    here = machine(gpus, missing=missing)
    made = plan.make(read(environ), here, facts, drafted, environ, PARTS, place=place)
    return made, made.loading


def test_large_files_on_a_local_disk_are_read_in_parallel():
    made, found = from_disk()
    assert found.format == made.options["load_format"] == "fastsafetensors"
    assert ("weights", "fastsafetensors", found.reason) in [*explain.rows(made)]
    assert "OPTION_LOAD_FORMAT=auto" in found.reason


@pytest.mark.parametrize(
    ("gpus", "more"), [(2, {}), (1, {"gib": 50, "largest_file": 45 * GIB})], ids=["ranks", "tight"]
)
def test_a_loader_without_whole_files_on_the_gpu_where_they_have_no_room(gpus, more):
    made, found = from_disk(gpus=gpus, **more)
    assert found.format == made.options["load_format"] == "instanttensor"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"shards": None}, "they are not several safetensors files with an index"),
        ({"gib": 6}, "they have less than 8 GB"),
        ({"place": Place("ext4", cached=True)}, "they are in memory already"),
        ({"place": Place("tmpfs")}, "they are in memory already"),
        ({"place": Place("nfs4")}, "they are on nfs4"),
        ({"place": Place("fuse.s3fs")}, "they are on fuse.s3fs"),
        ({"missing": ("fastsafetensors",)}, "fastsafetensors is not installed"),
        ({"gpus": 2, "missing": ("instanttensor",)}, "instanttensor is not installed"),
        (
            {"gpus": 2, "environ": {"OPTION_PIPELINE_PARALLEL_DEGREE": "2"}},
            "fastsafetensors has not been tried",
        ),
    ],
)
def test_vllms_own_loader_where_it_is_better_or_the_only_one(more, why):
    made, found = from_disk(**more)
    assert made.options.get("load_format", "auto") == "auto"
    assert found.reason.startswith(f"vLLM's own loader: {why}"), found.reason


@pytest.mark.parametrize(
    "more",
    [
        {"gpus": 0, "gib": 8.5},
        {"place": None},
        {"environ": {"OPTION_LOAD_FORMAT": "auto"}},
        {"environ": {"OPTION_LOAD_FORMAT": "safetensors"}},
        {"environ": {"OPTION_SAFETENSORS_LOAD_STRATEGY": "prefetch"}},
    ],
)
def test_the_operator_decides_and_on_cpus_vllm(more):
    made, found = from_disk(**more)
    given = (more.get("environ") or {}).get("OPTION_LOAD_FORMAT", "auto")
    assert made.options.get("load_format", "auto") == given
    assert (found.format, found.reason) == ("", "")


def test_whether_a_file_is_in_memory(tmp_path):
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n")
    file = tmp_path / "weights"
    if place_of(file).kind not in loading_of_plan.LOCAL:
        pytest.skip("needs temporary files on a disk")
    with file.open("wb") as content:
        content.write(os.urandom(32 * 2**20))
        content.flush()
        os.fsync(content)
        os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert place_of(file, tmp_path) == Place("ext4", cached=False)
    assert file.read_bytes()
    assert place_of(file, tmp_path) == Place("ext4", cached=True)
    assert place_of(tmp_path / "none", tmp_path) == Place("ext4")
