# SPDX-License-Identifier: Apache-2.0
"""The plan as an operator sees it, and its warnings."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_config.facts import draft
from lmi_config.facts.chat import Chat, Parser
from lmi_config.facts.kv import KvShape
from lmi_config.facts.model import WeightParts
from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import explain, plan, speculation
from tests.lmi_config.examples import GIB, H100, PARTS, machine, model
from tests.lmi_config.facts.test_draft import EAGLE3, EAGLE3_TENSORS, Memory, target
from tests.lmi_config.options.test_settings import NAMES, VALUES


def planned(environ, here=None, facts=None, drafted=None, **more):
    facts = facts or model(2)
    return plan.make(read(environ), here or machine(), facts, drafted, environ, PARTS, **more)


TEXT = """\
model                     16.0 GiB         org/model, LlamaForCausalLM, bfloat16
KV per token              128 KiB          32 layers
longest request           8,192 tokens     OPTION_MAX_MODEL_LEN
tool calls                none             unknown for this model; OPTION_TOOL_CALL_PARSER names one
reasoning                 none             unknown for this model; OPTION_REASONING_PARSER names one
devices                   2 x NVIDIA H100  tensor parallel 2 (SM_NUM_GPUS)
each GPU                  80.0 GiB         vLLM may use 73.6 GiB
  weights                 8.0 GiB          the rank's part, and the draft's
  overhead                3.0 GiB          context, activations, graphs; an estimate
  KV cache                62.6 GiB         about 1,025,638 tokens in all
memory                    256.0 GiB        the container's limit; 256.0 GiB free
  server and engine core  1.5 GiB          measured
  2 workers               6.0 GiB          estimate, CUDA included
  weights being loaded    8.0 GiB          a file in each worker, at most all
  shared memory           0.5 GiB          /dev/shm counts too
  margin                  25.6 GiB         10% of the memory
  cache server            0.8 GiB          without its pool; measured
  KV tier L1              213.6 GiB        below
  left                    26 MiB
KV tier L1                213.6 GiB        the rest, all allocated at the start
                                           1,750,016 tokens, 175 documents of 10k
KV tier disk              398.0 GiB        500.0 GiB free (ext4, O_DIRECT), 102.0 GiB kept for \
other files
                                           3,260,416 tokens, 326 documents of 10k
                                           in /tmp/lmcache
KV tier shared                             redis://:***@cache
KV chunk                  256 tokens       a multiple of the engine's block of 16 tokens
KV tiers pay                               above 1,025,638 tokens in use, the engine's capacity
compile cache             none             OPTION_CACHE_FOLDER keeps it on a volume for the \
next start
port                      8080             default

options:
  model_id = org/model                                          HF_MODEL_ID
  tensor_parallel_degree = 2                                    SM_NUM_GPUS
  max_model_len = 8192                                          OPTION_MAX_MODEL_LEN
  lmcache_auto_config = True                                    OPTION_LMCACHE_AUTO_CONFIG
  kv_l2_url = (hidden)                                          OPTION_KV_L2_URL
  hf_token = (hidden)                                           SM_VLLM_HF_TOKEN
  served_model_name = org/model, lmi                            derived
  enable_prompt_tokens_details = True                           derived
  kv_transfer_config = {"kv_connector": "Connector", "kv_co...  derived
"""


def test_the_whole_text():
    environ = {
        "HF_MODEL_ID": "org/model",
        "SM_NUM_GPUS": "2",
        "OPTION_LMCACHE_AUTO_CONFIG": "true",
        "OPTION_KV_L2_URL": "redis://:hush@cache",
        "OPTION_MAX_MODEL_LEN": "8K",
        "SM_VLLM_HF_TOKEN": "hush",
    }
    found = planned(environ, machine(gpus=2), model(16))
    text = explain.as_text(found)
    table, _, commands = text.partition("\nvLLM, in this process:\n")
    assert table == TEXT
    assert "\nlmcache:\n  server --host=127.0.0.1 --port=5001 " in commands
    assert "hush" not in text + json.dumps(explain.as_json(found))


@pytest.mark.parametrize(
    ("gib", "layers", "heads", "gpus", "each", "tokens"),
    [
        (2.9, 28, 2, 1, "28 KiB", 2_600_000),
        (14.2, 28, 4, 1, "56 KiB", 1_100_000),
        (135.4, 80, 8, 4, "320 KiB", 480_000),
    ],
)
def test_from_how_many_tokens_on_tiers_pay(gib, layers, heads, gpus, each, tokens):
    """Qwen2.5 1.5B, 7B and 72B on GPUs of 80 GB: LMI publishes a KV of 28, 56 and 320 KB a token,
    and says from how many tokens offloading pays: 2.6 million for the first, 480,000 for the last.
    """
    shape = KvShape(heads=heads, full=2 * heads * 128 * layers)
    facts = model(gib, layers=layers, kv=shape, max_length=32_768)
    environ = {"OPTION_MODEL_ID": "m", "OPTION_LMCACHE_AUTO_CONFIG": "true"}
    found = planned(environ, machine(gpus=gpus, memory=1_000 * GIB), facts)
    rows = {name: (size, why) for name, size, why in explain.rows(found)}
    assert rows["KV per token"][0] == each
    pays = int(rows["KV tiers pay"][1].split()[1].replace(",", ""))
    assert pays == pytest.approx(tokens, rel=0.1)
    assert explain.as_json(found)["tiers"]["engine_tokens"] == pays


def test_as_json_every_option_has_its_origin():
    found = explain.as_json(planned({"OPTION_MAX_MODEL_LEN": "4096"}))
    options = {option["name"]: (option["value"], option["origin"]) for option in found["options"]}
    assert options["max_model_len"] == ("4096", "OPTION_MAX_MODEL_LEN")
    assert options["enforce_eager"] == ("True", "derived")
    assert options["predict_timeout"] == ("None", "default")
    assert found["model"]["kv_bytes_per_token"] == 131072
    assert found["memory"]["free"] > 0
    assert found["tiers"] is None


def test_what_is_secret_in_a_value_is_hidden():
    config = {
        "kv_connector": "X",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"key": "hush"},
    }
    environ = {"OPTION_KV_TRANSFER_CONFIG": json.dumps(config)}
    other = {
        "ec_connector": "X",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"a": {"password": "hush"}},
    }
    found = planned(environ | {"OPTION_EC_TRANSFER_CONFIG": json.dumps(other)})
    assert "hush" not in explain.as_text(found) + json.dumps(explain.as_json(found))
    assert found.engine("m", None)["kv_transfer_config"] == config


OVERRIDES = {
    "classifier_from_token": ["no", "yes"],
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "text_config": {"bos_token_id": 1, "pad_token": "<pad>"},
}


@pytest.mark.parametrize("name", ["OPTION_HF_OVERRIDES", "OPTION_DEFAULT_CHAT_TEMPLATE_KWARGS"])
def test_fields_of_a_models_configuration_are_no_secrets(name):
    found = planned({name: json.dumps(OVERRIDES)})
    shown = explain.as_text(found) + json.dumps(explain.as_json(found))
    assert "(hidden)" not in shown
    (words,) = (it for it in explain.as_json(found)["commands"].values())
    flag = name.replace("OPTION_", "--").lower().replace("_", "-")
    (given,) = (it.partition("=")[2] for it in words if it.startswith(f"{flag}="))
    assert json.loads(given) == OVERRIDES
    hush = {"api_key": "hush", "auth_token": "hush", "password": "hush", "a": "hf_" + "hush" * 5}
    found = planned({name: json.dumps({**hush, "text_config": hush})})
    assert "hush" not in explain.as_text(found) + json.dumps(explain.as_json(found))


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://me:hush@collector:4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hu/sh@collector:4317"},
    ],
)
def test_a_password_in_a_url_is_hidden(environ):
    found = planned(environ)
    shown = explain.as_text(found) + json.dumps(explain.as_json(found))
    assert "hush" not in shown
    assert "hu/sh" not in shown


def test_a_tokenizer_is_no_secret():
    found = planned({"OPTION_TOKENIZER": "Qwen/Qwen3-8B", "OPTION_SESSION_KEY": "session_id"})
    options = {it["name"]: it["value"] for it in explain.as_json(found)["options"]}
    assert options["tokenizer"] == "Qwen/Qwen3-8B"
    assert options["session_key"] == "session_id"


def test_a_template_in_the_variable_itself_is_shown_as_it_is():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = planned({"OPTION_CHAT_TEMPLATE": template})
    options = {it["name"]: it["value"] for it in explain.as_json(found)["options"]}
    assert options["chat_template"] == template
    assert found.engine("m", None)["chat_template"] == template


def test_a_length_that_vllm_chooses_is_no_number():
    text = explain.as_text(planned({"OPTION_MAX_MODEL_LEN": "auto"}))
    assert "longest request" in text
    assert "-1 tokens" not in text


@pytest.mark.parametrize(
    "name",
    [
        *("LMCACHE_CHUNK_SZIE", "SERVING_JOB_QUEUE_SZIE", "SERVING_PREDICT_TIMEOUTS"),
        *("MAX_ROLLING_BATCH_SIZE", "GPU_MEMORY_UTILIZATION"),
    ],
)
def test_a_variable_that_is_nearly_one_of_ours_is_noted(name):
    findings = planned({name: "5"}).findings
    assert any(f"{name} is unknown and has no effect; did you mean" in it for it in findings)


OLD = dataclasses.replace(H100, driver="550.54.15")
SMALL = dataclasses.replace(H100, memory=24 * GIB)


@pytest.mark.parametrize(
    ("environ", "here", "facts", "finding"),
    [
        (
            {},
            dataclasses.replace(machine(gpus=1), gpus=(OLD,)),
            None,
            "driver 550.54.15 is older than CUDA 13.0 wants (580); on SageMaker choose",
        ),
        (
            {"OPTION_TENSOR_PARALLEL_DEGREE": "1"},
            machine(gpus=4),
            None,
            "4 copies of the model, each on one GPU, as LMI starts them; OPTION_COPIES=1 has one",
        ),
        (
            {},
            machine(memory=GIB // 2),
            model(0.25),
            "the engine wants about 2.9 GiB of memory, and 0.5 GiB are free; give the container",
        ),
        (
            {},
            dataclasses.replace(machine(gpus=1), gpus=(SMALL,)),
            model(70),
            "each GPU's share of the weights is 70.0 GiB and vLLM may use 22.1 GiB of its memory; "
            "use at least 4 such GPUs (OPTION_TENSOR_PARALLEL_DEGREE=4) or a quantised model",
        ),
        (
            {"OPTION_GPU_MEMORY_UTILIZATION": "0.1"},
            dataclasses.replace(machine(gpus=1), gpus=(SMALL,)),
            model(70),
            "each GPU's share of the weights is 70.0 GiB and vLLM may use 2.4 GiB of its memory; "
            "use larger GPUs or a quantised model",
        ),
        (
            {},
            dataclasses.replace(machine(gpus=1), gpus=(SMALL,)),
            model(16),
            "the KV cache will hold about 25,231 tokens, less than the longest request of 131,072; "
            "set OPTION_MAX_MODEL_LEN=24576",
        ),
        (
            {},
            machine(memory=8 * GIB),
            model(1),
            "the KV cache will hold about 14,131 tokens, less than the longest request of 131,072; "
            "set OPTION_MAX_MODEL_LEN=13312",
        ),
        ({}, machine(gpus=2, shm=64 << 20), None, "/dev/shm has 64 MiB and 2 ranks talk through"),
        (
            {},
            machine(gpus=8, shm=GIB),
            None,
            "/dev/shm has 1.0 GiB and 8 ranks talk through it, which takes up to 2.0 GiB; give the "
            "container more (docker run --shm-size=2g,",
        ),
        (
            {},
            machine(shm=64 << 20, cpus=tuple(range(8))),
            None,
            "/dev/shm has 64 MiB, too little for a worker process",
        ),
        (
            {"OPTION_MAX_MODEL_LEN": "200k"},
            None,
            None,
            "max_model_len=200000 is more than the model's 131072; vLLM will refuse it unless",
        ),
        (
            {"OPTION_ROLLING_BATCH": "vllm"},
            None,
            None,
            "accepted, but without effect here: OPTION_",
        ),
        (
            {"OPTION_KV_EVENTS": "true", "OPTION_ENABLE_PREFIX_CACHING": "false"},
            None,
            None,
            "OPTION_KV_EVENTS=true, but there will be no events: prefix caching is off; leave",
        ),
    ],
)
def test_what_is_likely_to_go_wrong_is_told(environ, here, facts, finding):
    findings = planned(environ, here, facts).findings
    assert [found for found in findings if found.startswith(finding)], findings


@pytest.mark.parametrize(
    ("environ", "gpus", "fault"),
    [
        # 128 KiB a token: 1,023.9 tokens are 7 blocks of 128, and 63 of 16.
        ({}, 0, "hold 896 tokens, and the longest request has 131,072; set OPTION_MAX_MODEL_LEN="
         "896, or make it 17179869184 bytes"),
        ({"OPTION_MAX_MODEL_LEN": "1000"}, 0, "hold 896 tokens, and the longest request has 1,000"),
        ({"OPTION_MAX_MODEL_LEN": "1009"}, 1, "hold 1,008 tokens, and the longest request has"),
        ({"OPTION_MAX_MODEL_LEN": "896"}, 0, ""),
        ({"OPTION_MAX_MODEL_LEN": "1008"}, 1, ""),
        ({"OPTION_MAX_MODEL_LEN": "2016"}, 2, ""),  # each GPU has half of the heads
        ({"OPTION_MAX_MODEL_LEN": "auto"}, 0, ""),
        ({"OPTION_NUM_GPU_BLOCKS_OVERRIDE": "9999"}, 0, ""),
    ],
)  # fmt: skip
def test_a_kv_cache_that_is_too_small_for_the_longest_request_is_refused(environ, gpus, fault):
    size = {"OPTION_KV_CACHE_MEMORY_BYTES": str(1024 * 2**17 - 1)}
    if not fault:
        planned({**size, **environ}, machine(gpus))
        return
    with pytest.raises(SettingsError) as refused:
        planned({**size, **environ}, machine(gpus))
    (found,) = refused.value.faults
    assert found.startswith(f"OPTION_KV_CACHE_MEMORY_BYTES: {1024 * 2**17 - 1} bytes {fault}")


def test_a_kv_cache_without_room_for_one_block():
    with pytest.raises(
        SettingsError, match=r"bytes hold 0 tokens, .* has 131,072; make it \d+ bytes"
    ):
        planned({"OPTION_KV_CACHE_MEMORY_BYTES": "1000"})


GEMMA3_27B = KvShape(heads=16, full=10 * 4096, windowed=52 * 4096, window=1024)


def test_what_leaves_a_window_takes_no_room():
    # 80 KiB of a token for the whole request, 480 KiB for its last 1,023 and the 16,384 of two
    # steps, as 52 layers take six groups of 10: 8.0 of the 16.6 GiB for KV. The rest holds 113,137.
    facts, here = model(54, layers=62, kv=GEMMA3_27B), machine(gpus=1)
    (found,) = planned({}, here, facts).findings
    assert found.startswith("the KV cache will hold about 113,137 tokens, less than the longest")
    # Whole sequences take 496 KiB for each token.
    whole = planned({"OPTION_DISABLE_HYBRID_KV_CACHE_MANAGER": "true"}, here, facts).findings
    assert whole[0].startswith("the KV cache will hold about 35,093 tokens, less than the longest")
    other = {"OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"Other","kv_role":"kv_both"}'}
    assert planned(other, here, facts).findings == whole


def test_windows_are_shown():
    facts = model(54, layers=62, kv=GEMMA3_27B)
    text = explain.as_text(planned({"OPTION_MAX_MODEL_LEN": "32k"}, machine(gpus=1), facts))
    assert "496 KiB" in text
    assert "62 layers; 84% of it for the last 1,024 tokens only" in text
    assert "about 51,029 tokens in all" in text


SPREAD = {"OPTION_TENSOR_PARALLEL_DEGREE": "8", "OPTION_NNODES": "2"}


def test_workers_of_other_machines_take_nothing_here():
    alone = planned({}, machine(gpus=4), model(64))
    found = planned(SPREAD, machine(gpus=4), model(64))
    assert found.memory == alone.memory
    assert found.gpu
    assert alone.gpu
    assert found.gpu.weights == alone.gpu.weights // 2
    assert not [finding for finding in found.findings if "ranks talk" in finding]


def test_attention_heads_are_divided_among_all_ranks():
    nine = model(2, attention_heads=9, vocabulary=49152, kv=KvShape(heads=3, full=2 * 3 * 64 * 30))
    with pytest.raises(SettingsError) as refused:
        planned({"OPTION_TENSOR_PARALLEL_DEGREE": "8"}, machine(gpus=8), nine)
    assert refused.value.faults == (
        "OPTION_TENSOR_PARALLEL_DEGREE=8: the model's 9 attention heads cannot be divided by 8; "
        "use a degree that divides them, or max",
    )
    found = planned({}, machine(gpus=8), nine)
    assert found.parallelism.tensor == 3
    assert found.findings == (
        "2 copies of the model, each on 3 of 8 GPUs, as LMI starts them; OPTION_COPIES=1 has one "
        "copy",
        "2 of 8 GPUs will be idle; they are too few for another copy on 3",
    )


# Qwen2.5-7B has 28 heads, 4 of KV, and a vocabulary of 64 * 2376 tokens.
QWEN = {"attention_heads": 28, "vocabulary": 152064, "kv": KvShape(heads=4, full=2 * 4 * 128 * 28)}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (QWEN, "4 KV heads cannot be divided by 7, nor 7 by them"),
        ({**QWEN, "kv": None}, "vocabulary of 152064 cannot be divided by 7"),
    ],
)
def test_kv_heads_and_the_vocabulary_are_divided_too(more, why):
    qwen = model(6, **more)
    with pytest.raises(SettingsError) as refused:
        planned({"OPTION_TENSOR_PARALLEL_DEGREE": "7"}, machine(gpus=8), qwen)
    assert refused.value.faults == (
        f"OPTION_TENSOR_PARALLEL_DEGREE=7: the model's {why}; use a degree that divides them, "
        "or max",
    )
    found = planned({}, machine(gpus=8), qwen)
    assert (found.parallelism.tensor, len(found.copies)) == (4, 2)
    found = planned({"OPTION_ENABLE_EXPERT_PARALLEL": "true"}, machine(gpus=8), qwen)
    assert found.findings == (
        "one copy of the model, where 2 would fit: OPTION_ENABLE_EXPERT_PARALLEL: all GPUs share "
        "the experts of one server",
        "4 of 8 GPUs will be idle; 4 are the most that attention heads, KV heads and the "
        "vocabulary can be divided among",
    )


@pytest.mark.parametrize(
    ("environ", "quantization", "fault"),
    [
        (
            {"OPTION_QUANTIZE": "awq"},
            "fp8",
            "OPTION_QUANTIZE=awq: the model's files are quantised with fp8; leave it out",
        ),
        (
            {"OPTION_KV_CACHE_DTYPE": "fp8_e5m2"},
            "fp8",
            "OPTION_KV_CACHE_DTYPE=fp8_e5m2: vLLM refuses it for models in fp8; set it to fp8_e4m3",
        ),
    ],
)
def test_numbers_that_the_models_files_contradict_are_refused(environ, quantization, fault):
    with pytest.raises(SettingsError) as refused:
        planned(environ, machine(gpus=1), model(8, quantization=quantization))
    assert refused.value.faults == (fault,)


@pytest.mark.parametrize(
    ("environ", "quantization"),
    [
        ({"OPTION_QUANTIZE": "awq_marlin"}, "awq"),
        ({"OPTION_QUANTIZE": "fp8"}, None),
        ({"OPTION_KV_CACHE_DTYPE": "fp8_e5m2"}, "awq"),
    ],
)
def test_numbers_that_they_do_not_contradict_are_not(environ, quantization):
    planned(environ, machine(gpus=1), model(8, quantization=quantization))


def test_latent_attention_has_no_fp8_cache_on_older_gpus():
    environ = {"OPTION_KV_CACHE_DTYPE": "fp8"}
    latent = model(8, latent=True)

    def on(gpu):
        return dataclasses.replace(machine(gpus=1), gpus=(gpu,))

    a10g = dataclasses.replace(H100, name="NVIDIA A10G", capability=(8, 6))
    with pytest.raises(SettingsError) as refused:
        planned(environ, on(a10g), latent)
    assert refused.value.faults == (
        "OPTION_KV_CACHE_DTYPE=fp8: vLLM has latent attention with an fp8 cache only for GPUs "
        "newer than the NVIDIA A10G; leave it out",
    )
    l4 = dataclasses.replace(H100, name="NVIDIA L4", capability=(8, 9))
    planned(environ, on(l4), latent)
    planned(environ, on(a10g), model(8))


def test_a_draft_is_divided_like_the_model():
    folder = Memory(EAGLE3, EAGLE3_TENSORS)
    drafted = draft.look(folder)
    narrow = dataclasses.replace(drafted.facts, attention_heads=6, kv=None)
    drafted = dataclasses.replace(drafted, facts=narrow)
    environ = {"OPTION_SPECULATIVE_DRAFT_MODEL": "d"}
    assert planned(environ, machine(gpus=4), target(), drafted).parallelism.tensor == 2
    with pytest.raises(SettingsError) as refused:
        planned(
            environ | {"OPTION_TENSOR_PARALLEL_DEGREE": "4"}, machine(gpus=4), target(), drafted
        )
    assert refused.value.faults == (
        "OPTION_TENSOR_PARALLEL_DEGREE=4: the draft's 6 attention heads cannot be divided by 4; "
        "use a degree that divides them, or max",
    )
    alone = {"OPTION_SPECULATIVE_CONFIG": '{"model": "d", "draft_tensor_parallel_size": 1}'}
    assert planned(alone, machine(gpus=4), target(), drafted).parallelism.tensor == 4


def test_a_vocabulary_is_filled_up_before_it_is_divided():
    assert planned({}, machine(gpus=8), model(2, vocabulary=49155)).parallelism.tensor == 8


def test_gpus_that_idle_beside_other_machines_are_noticed():
    environ = {"OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_NNODES": "2"}
    assert planned(environ, machine(gpus=4), model(16)).findings == (
        "2 of 4 GPUs will be idle; set OPTION_TENSOR_PARALLEL_DEGREE=max to use them",
    )


def test_stages_keep_no_copies_of_each_others_kv():
    here = dataclasses.replace(machine(gpus=4), gpus=(SMALL,) * 4)
    environ = {"OPTION_PIPELINE_PARALLEL_DEGREE": "4"}
    facts = model(8, kv=KvShape(heads=1, full=2 * 128 * 32))
    staged = explain.as_text(planned(environ, here, facts))
    assert "about 4,477,419 tokens in all" in staged


def test_a_download_without_room_is_told():
    environ: dict[str, str] = {}
    found = plan.make(
        read(environ), machine(), TARGET, None, environ, PARTS, to_fetch=2 * GIB, room=GIB
    )
    assert found.findings == (
        "2.0 GiB have yet to be downloaded, and 1.0 GiB are free where they go; set "
        "SERVING_DOWNLOAD_DIR (S3) or HF_HOME (hub) to a larger disk",
    )


def test_a_plan_without_faults_has_no_findings():
    assert planned({}, machine(gpus=4), model(16)).findings == ()


DRAFTED = draft.look(Memory(EAGLE3, EAGLE3_TENSORS))
TARGET = target()


@pytest.mark.parametrize(
    ("environ", "config"),
    [
        (
            {"OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft"},
            {"model": "/there", "method": "eagle3", "num_speculative_tokens": 3},
        ),
        (
            {"OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft", "OPTION_NUM_SPECULATIVE_TOKENS": "5"},
            {"model": "/there", "method": "eagle3", "num_speculative_tokens": 5},
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"model": "org/draft", "num_speculative_tokens": 2}'},
            {"model": "/there", "method": "eagle3", "num_speculative_tokens": 2},
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"model": "org/draft", "method": "eagle3"}'},
            {"model": "/there", "method": "eagle3", "num_speculative_tokens": 3},
        ),
    ],
)
def test_how_to_speculate_is_read_from_the_draft(environ, config):
    assert speculation.draft_id(read(environ)) == "org/draft"
    found = planned(environ, machine(gpus=1), TARGET, DRAFTED)
    assert found.engine("m", "/there")["speculative_config"] == config


def test_a_drafts_kv_and_weights_are_part_of_the_budget():
    assert DRAFTED.facts.kv
    facts = target()
    with_draft = planned({"OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft"}, None, facts, DRAFTED)
    alone = planned({}, None, facts)
    (before, after) = (
        next(share.size for share in it.memory.shares if share.name == "weights")
        for it in (alone, with_draft)
    )
    assert after - before == DRAFTED.facts.weight_bytes
    assert with_draft.model.kv.full == alone.model.kv.full + DRAFTED.facts.kv.full
    assert "layers and the draft's" in explain.as_text(with_draft)


def test_without_a_draft_the_operators_word_is_passed_on():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    environ = {"OPTION_SPECULATIVE_CONFIG": json.dumps(config)}
    assert speculation.draft_id(read(environ)) is None
    assert planned(environ).engine("m", None)["speculative_config"] == config


@pytest.mark.parametrize(
    ("environ", "facts", "fault"),
    [
        (
            {"OPTION_NUM_SPECULATIVE_TOKENS": "3"},
            None,
            "there is no draft; set OPTION_SPECULATIVE_",
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"model": "org/draft", "num_speculative_tokens": 0}'},
            None,
            "num_speculative_tokens is 0",
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"model": "org/draft", "num_speculative_tokens": 100}'},
            None,
            "num_speculative_tokens is 100",
        ),
        (
            {"OPTION_SPECULATIVE_CONFIG": '{"model": "org/draft", "num_speculative_tokens": "x"}'},
            None,
            "num_speculative_tokens='x': should be a whole number, like 3",
        ),
        (
            {
                "OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft",
                "OPTION_SPECULATIVE_CONFIG": '{"model": "other"}',
            },
            None,
            "OPTION_SPECULATIVE_DRAFT_MODEL and the model in OPTION_SPECULATIVE_CONFIG differ",
        ),
        (
            {"OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft"},
            target(hidden_size=128),
            "org/draft: it is made for a hidden size of 64, and the model has 128",
        ),
        (
            {"OPTION_SPECULATIVE_DRAFT_MODEL": "org/draft"},
            target(num_hidden_layers=4),
            "eagle_aux_hidden_state_layer_ids",
        ),
    ],
)
def test_speculation_that_cannot_work_is_refused(environ, facts, fault):
    drafted = DRAFTED if speculation.draft_id(read(environ)) else None
    with pytest.raises(SettingsError) as refused:
        planned(environ, machine(gpus=1), facts or TARGET, drafted)
    assert fault in " ".join(refused.value.faults)


@pytest.mark.parametrize(
    ("environ", "ports"),
    [({}, (5557, 5558)), ({"OPTION_DATA_PARALLEL_SIZE": "3"}, (5557, 5560))],
)
def test_kv_events_and_their_log_have_ports_of_their_own(environ, ports):
    found = planned({"OPTION_KV_EVENTS": "true", **environ}, machine(gpus=4))
    assert found.engine("m", None)["kv_events_config"] == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    assert f"ports {ports[0]}, {ports[1]}" in explain.as_text(found)
    assert explain.as_json(found)["kv_events"] == {"port": ports[0], "log_port": ports[1]}


def test_without_being_asked_for_there_are_no_kv_events():
    found = planned({})
    assert "kv_events_config" not in found.engine("m", None)
    assert explain.as_json(found)["kv_events"] is None


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        ({"OPTION_KV_EVENTS_CONFIG": "{}"}, "EVENTS_CONFIG both set the address of events"),
        ({"OPTION_KV_EVENTS_PORT": "8079"}, "ports to 8080, and requests come in at 8080"),
        (
            {"OPTION_KV_EVENTS_PORT": "65534", "OPTION_DATA_PARALLEL_SIZE": "2"},
            "ports to 65537; choose a lower one",
        ),
    ],
)
def test_kv_events_that_cannot_be_published_are_refused(environ, fault):
    with pytest.raises(SettingsError) as refused:
        planned({"OPTION_KV_EVENTS": "true", **environ}, machine(gpus=2))
    assert fault in " ".join(refused.value.faults)


@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6),
    st.integers(0, 8),
    st.integers(1 << 20, 1 << 43),
    st.sampled_from(
        [model(2), TARGET, model(kv=None, max_length=None, architectures=(), layers=None)]
    ),
)
def test_any_environment_and_machine_give_a_plan_or_the_one_error(environ, gpus, memory, facts):
    with contextlib.suppress(SettingsError):
        drafted = DRAFTED if speculation.draft_id(read(environ)) else None
        found = planned(environ, machine(gpus=gpus, memory=memory), facts, drafted)
        explain.as_text(found)
        json.dumps(explain.as_json(found))


SPACE = "VLLM_CPU_KVCACHE_SPACE"


SHORT = {"OPTION_MAX_MODEL_LEN": "8k"}


def test_a_kv_cache_that_vllms_own_variable_sizes_is_planned_for():
    """vLLM lets the variable win over its option, so the plan uses it and reports which one
    decided.
    """
    found = planned({SPACE: "5", **SHORT})
    assert found.memory.kv == 5 * GIB
    assert found.engine("m", None)["kv_cache_memory_bytes"] == 5 * GIB
    (share,) = [it for it in found.memory.shares if it.name == "engine's KV cache"]
    assert (share.size, share.reason) == (5 * GIB, SPACE)
    assert planned({SPACE: ""}).memory.kv == planned({}).memory.kv
    assert planned({SPACE: "5"}, machine(gpus=1)).memory.kv is None  # of no meaning for GPUs


@pytest.mark.parametrize(
    ("environ", "fault"),
    [
        (
            {SPACE: "1", "OPTION_KV_CACHE_MEMORY_BYTES": "12M"},
            f"{SPACE}=1 and OPTION_KV_CACHE_MEMORY_BYTES=12582912 both size the engine's KV cache; "
            "keep one",
        ),
        ({SPACE: "many"}, f"{SPACE}='many': should be a whole number of GiB, like 4"),
        ({SPACE: "0"}, f"{SPACE}='0': should be a whole number of GiB, like 4"),
        ({SPACE: "-1"}, f"{SPACE}='-1': should be a whole number of GiB, like 4"),
    ],
)
def test_two_sizes_of_one_kv_cache_are_refused(environ, fault):
    with pytest.raises(SettingsError) as refused:
        planned(environ)
    assert refused.value.faults == (fault,)


def test_the_same_size_twice_is_one_size():
    found = planned({SPACE: "1", "OPTION_KV_CACHE_MEMORY_BYTES": "1G", **SHORT})
    assert found.memory.kv == GIB


@pytest.mark.parametrize(
    ("name", "environ", "said"),
    [
        ("guard", {}, ["in front of vLLM; where it answers the initialising call it is the whole"]),
        ("configured_formatter", {}, ["formatters; vLLM answers"]),
        (
            "globals_and_load",
            {"OPTION_MAX_MODEL_LEN": "8k", "OPTION_SEED": "5", "OPTION_PORT": "1"},
            [
                "its handle is the whole service; vLLM is not started",
                "vLLM's, which only the handle may read: OPTION_MAX_MODEL_LEN, OPTION_SEED",
            ],
        ),
    ],
)
def test_a_plan_says_whose_the_service_is(name, environ, said):
    folder = Path(__file__).parents[2] / "compat" / "public" / name
    text = explain.as_text(planned({"OPTION_MODEL_ID": str(folder), **environ}))
    assert [it for it in said if it not in text] == []
    assert ("which only the handle" in text) is bool(environ)


QWEN3 = Chat(Parser("hermes", "a mark"), Parser("qwen3", "another"))


@pytest.mark.parametrize(
    ("chat", "environ", "expected"),
    [
        (Chat(), {}, (None, None, None)),
        (QWEN3, {}, (True, "hermes", "qwen3")),
        (QWEN3, {"OPTION_TOOL_CALL_PARSER": "xlam"}, (True, "xlam", "qwen3")),
        (QWEN3, {"OPTION_TOOL_CALL_PARSER": "none"}, (None, None, "qwen3")),
        (QWEN3, {"OPTION_REASONING_PARSER": "none"}, (True, "hermes", None)),
        (QWEN3, {"OPTION_TOOL_CALL_PARSER": "hf"}, (True, "hf", None)),
        (QWEN3, {"OPTION_ENABLE_AUTO_TOOL_CHOICE": "false"}, (False, "hermes", "qwen3")),
        (QWEN3, {"OPTION_TASK": "text-embedding"}, (None, None, None)),
        (QWEN3, {"OPTION_RUNNER": "pooling"}, (None, None, None)),
        (Chat(), {"OPTION_TOOL_CALL_PARSER": "pythonic"}, (True, "pythonic", None)),
        (QWEN3, {"OPTION_ENABLE_AUTO_TOOL_CHOICE": "true"}, (True, "hermes", "qwen3")),
    ],
)
def test_parsers_follow_from_the_model(chat, environ, expected):
    options = planned({"HF_MODEL_ID": "org/model", **environ}, chat=chat).options
    names = ("enable_auto_tool_choice", "tool_call_parser", "reasoning_parser")
    assert tuple(map(options.get, names)) == expected


@pytest.mark.parametrize("parser", [{}, {"OPTION_TOOL_CALL_PARSER": "none"}])
def test_tool_choice_without_a_parser_is_refused(parser):
    environ = {"HF_MODEL_ID": "org/model", "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true", **parser}
    with pytest.raises(SettingsError, match=r"OPTION_ENABLE_AUTO_TOOL_CHOICE: .*_PARSER"):
        planned(environ)


def test_the_plan_says_which_parsers_and_why():
    found = planned({"HF_MODEL_ID": "org/model", "OPTION_REASONING_PARSER": "none"}, chat=QWEN3)
    rows = {name: (value, why) for name, value, why in explain.rows(found)}
    assert rows["tool calls"] == ("hermes", "a mark; OPTION_TOOL_CALL_PARSER overrides")
    assert rows["reasoning"] == ("none", "OPTION_REASONING_PARSER")


ONE_EACH = {"OPTION_TENSOR_PARALLEL_DEGREE": "1"}
MANUAL = {
    "OPTION_LMCACHE_CONFIG_FILE": "/x.yaml",
    "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}',
}


def shares(found):
    return {share.name: share.size / GIB for share in found.memory.shares}


@pytest.mark.parametrize("more", [{}, {"OPTION_LMCACHE_AUTO_CONFIG": "true"}])
def test_copies_on_this_machine_count_in_its_memory(more):
    def copies(count, local=None, **others):
        environ = {**ONE_EACH, **more, **others, "OPTION_DATA_PARALLEL_SIZE": str(count)}
        environ |= {"OPTION_COPIES": "1"}
        environ |= {"OPTION_DATA_PARALLEL_SIZE_LOCAL": str(local)} if local else {}
        return planned(environ, machine(8), model(16))

    one, eight = copies(1), copies(8)
    assert shares(eight)["8 workers"] == 24
    assert shares(eight)["weights being loaded"] == 16
    assert shares(eight)["server and 8 engine cores"] == 0.75 * 9
    assert "shared memory" not in shares(eight)
    assert one.memory.free - eight.memory.free == round((21 + 12 + 7 * 0.75) * GIB)
    if more:
        assert eight.tiers.l1 <= eight.memory.free
    assert copies(16, 8).memory == eight.memory
    assert copies(8, OPTION_DATA_PARALLEL_RANK="3").memory == one.memory


def test_copies_without_a_gpu_have_weights_of_their_own():
    here = machine(cpus=tuple(range(16)))
    found = planned({**ONE_EACH, "OPTION_DATA_PARALLEL_SIZE": "2"}, here, model(4))
    assert shares(found)["weights"] == 8
    assert shares(found)["weights being loaded"] == 2
    assert shares(found)["2 workers"] == 2
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.parametrize(("tensor", "copies"), [(4, 1), (1, 4), (2, 2)])
def test_lmcaches_sizes_are_for_each_rank_of_all_copies(tensor, copies):
    environ = {
        **MANUAL,
        "OPTION_TENSOR_PARALLEL_DEGREE": str(tensor),
        "OPTION_DATA_PARALLEL_SIZE": str(copies),
    }
    file = {"max_local_cpu_size": 20.0, "local_disk": "file:///tmp/d/", "max_local_disk_size": 5}
    tiers = planned(environ, machine(4), model(16), lmcache_file=file).tiers
    assert (tiers.l1, tiers.disk.size) == (80 * GIB, 20 * GIB)
    assert tiers.reasons["l1"] == "max_local_cpu_size for each of 4 ranks"


L4 = dataclasses.replace(SMALL, name="NVIDIA L4", capability=(8, 9))
H200 = dataclasses.replace(H100, name="NVIDIA H200", memory=141 * GIB)
EXPERTS = WeightParts(experts=608 * GIB, single=0, outer=4 * GIB)
COPIES = {**ONE_EACH, "OPTION_DATA_PARALLEL_SIZE": "8", "OPTION_ENABLE_EXPERT_PARALLEL": "true"}
MIXED = WeightParts(experts=0, single=4 * GIB, outer=4 * GIB)


@pytest.mark.parametrize(
    ("environ", "gpus", "facts", "weights"),
    [
        (COPIES, (H200,) * 8, model(640, quantization="fp8", parts=EXPERTS), 32 + 608 / 8),
        ({**COPIES, "OPTION_ENABLE_EXPERT_PARALLEL": "false"}, (H200,) * 8,
         model(640, quantization="fp8", parts=EXPERTS), 32 + 608 / 8),
        (COPIES, (H200,) * 8, model(640, quantization="fp8"), 80),
        ({**ONE_EACH, "OPTION_DATA_PARALLEL_SIZE": "8"}, (H200,) * 8, model(64), 64),
        ({}, (L4,), model(28, dtype="float32"), 14),
        ({"OPTION_DTYPE": "float32"}, (L4,), model(28, dtype="float32"), 28),
        ({"OPTION_DTYPE": "fp16"}, (L4,), model(28, dtype="float32"), 14),
        ({"OPTION_DTYPE": "float32"}, (H100,), model(28), 56),
        ({}, (L4,), model(28, parts=MIXED), 26),
        ({}, (L4,), model(28, dtype="float32", quantization="awq"), 28),
        ({"OPTION_QUANTIZE": "fp8"}, (L4,), model(28, parts=EXPERTS._replace(experts=0)), 16),
        ({"OPTION_QUANTIZE": "fp8"}, (L4,), model(28, quantization="fp8"), 28),
        ({"OPTION_QUANTIZE": "fp8"}, (L4,), model(28, dtype="float32"), 7.5),
        ({"OPTION_QUANTIZE": "mxfp4"}, (L4,), model(28), 8),
        ({"OPTION_QUANTIZE": "experts_int8"}, (H100,),
         model(28, parts=WeightParts(24 * GIB, 0, GIB)), 16),
    ],
)  # fmt: skip
def test_a_gpus_weights_are_those_that_it_will_hold(environ, gpus, facts, weights):
    here = dataclasses.replace(machine(len(gpus), memory=1500 * GIB), gpus=gpus)
    found = planned(environ, here, facts)
    assert found.gpu.weights / GIB == pytest.approx(weights, abs=1)


@pytest.mark.parametrize(
    ("environ", "gpus", "facts", "fix"),
    [
        (COPIES, 8, model(2000, quantization="fp8"),
         "use at least 29 such GPUs (OPTION_DATA_PARALLEL_SIZE=29)"),
        ({**ONE_EACH, "OPTION_DATA_PARALLEL_SIZE": "8"}, 8, model(160),
         "use OPTION_TENSOR_PARALLEL_DEGREE=4 with OPTION_DATA_PARALLEL_SIZE=2 or a quantised"),
        (ONE_EACH, 4, model(160), "use OPTION_TENSOR_PARALLEL_DEGREE=4 or a quantised model"),
        ({"OPTION_QUANTIZE": "fp8"}, 1, model(320), "(OPTION_TENSOR_PARALLEL_DEGREE=4)"),
    ],
)  # fmt: skip
def test_advice_never_proposes_what_is_there(environ, gpus, facts, fix):
    (found,) = [
        it for it in planned(environ, machine(gpus), facts).findings if it.startswith("each GPU's")
    ]
    assert fix in found
    assert ("quantised model" in found) == (
        not facts.quantization and "QUANTIZE" not in str(environ)
    )


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({"OPTION_DATA_PARALLEL_SIZE": "1", **ONE_EACH}, ""),
        ({"OPTION_COPIES": "1", **ONE_EACH}, "7 of 8 GPUs will be idle; OPTION_COPIES=8 uses 8"),
        ({"OPTION_DATA_PARALLEL_SIZE": "3"}, "2 of 8 GPUs will be idle; "
         "OPTION_DATA_PARALLEL_SIZE=4 uses 8"),
        ({"OPTION_DATA_PARALLEL_SIZE": "2", "OPTION_TENSOR_PARALLEL_DEGREE": "3"},
         "2 of 8 GPUs will be idle; set OPTION_TENSOR_PARALLEL_DEGREE=max"),
        ({"OPTION_DATA_PARALLEL_SIZE": "8", **ONE_EACH}, ""),
        ({"OPTION_DATA_PARALLEL_SIZE": "8", "OPTION_DATA_PARALLEL_RANK": "0", **ONE_EACH}, ""),
    ],
)  # fmt: skip
def test_idle_gpus_are_told_beside_data_parallel(environ, note):
    facts = model(2, attention_heads=48, kv=KvShape(heads=24, full=1), vocabulary=192 * 64)
    found = [it for it in planned(environ, machine(8), facts).findings if "will be idle" in it]
    assert bool(found) == bool(note)
    assert not note or found[0].startswith(note)


NATIVE = {"OPTION_KV_OFFLOADING_SIZE": "6"}
ROOMY = {"shm": 64 * GIB}
OWN = '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":%s}'


@pytest.mark.parametrize(
    "environ",
    [
        NATIVE,
        {**NATIVE, "OPTION_KV_OFFLOADING_BACKEND": "native"},
        {"OPTION_KV_TRANSFER_CONFIG": OWN % '{"cpu_bytes_to_use":6442450944}'},
        {"OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"MultiConnector","kv_role":"kv_both",'
         '"kv_connector_extra_config":{"connectors":[%s]}}'
         % (OWN % '{"cpu_bytes_to_use":6442450944}')},
    ],
)  # fmt: skip
@pytest.mark.parametrize("copies", [1, 2])
def test_vllms_own_kv_offload_counts(environ, copies):
    environ = {**environ, **ONE_EACH, "OPTION_DATA_PARALLEL_SIZE": str(copies)}
    environ |= {"OPTION_COPIES": "1"}
    found = planned(environ, machine(2, **ROOMY))
    assert shares(found)["vLLM's KV offload"] == 6 * copies


@pytest.mark.parametrize(
    ("environ", "here", "fault"),
    [
        (NATIVE, machine(), "OPTION_KV_OFFLOADING_SIZE: vLLM offloads KV from GPUs only"),
        ({"OPTION_KV_TRANSFER_CONFIG": OWN % '{"cpu_bytes_to_use":6}'}, machine(),
         "OPTION_KV_TRANSFER_CONFIG: vLLM offloads KV from GPUs only"),
        ({**NATIVE, "OPTION_LMCACHE_AUTO_CONFIG": "true"}, machine(1, **ROOMY), "two connectors"),
        ({**NATIVE, "OPTION_KV_L2_URL": "redis://h"}, machine(1, **ROOMY), "two connectors"),
        ({**NATIVE, **MANUAL}, machine(1, **ROOMY), "two connectors"),
        ({**NATIVE, "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"X","kv_role":"kv_both"}'},
         machine(1, **ROOMY), "replace the connector of OPTION_KV_TRANSFER_CONFIG"),
        ({**NATIVE, "OPTION_KV_OFFLOADING_BACKEND": "lmcache"}, machine(1, **ROOMY),
         "set OPTION_LMCACHE_AUTO_CONFIG=true, with OPTION_KV_L1_SIZE for its size"),
        ({"OPTION_KV_OFFLOADING_SIZE": "40"}, machine(1), "in /dev/shm, which has 8.0 GiB"),
        ({"OPTION_KV_OFFLOADING_SIZE": "40"}, machine(1, memory=24 * GIB, **ROOMY),
         "40.0 GiB, and 24.0 GiB of memory are free"),
    ],
)  # fmt: skip
def test_vllms_own_kv_offload_is_refused_where_it_cannot_be(environ, here, fault):
    with pytest.raises(SettingsError) as refused:
        planned(environ, here)
    assert [it for it in refused.value.faults if fault in it], refused.value.faults
