# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers for each kind of attention: right, refused by name, or left out with a note."""

import dataclasses
from typing import Any

import pytest

from lmi_config.facts import draft as drafts
from lmi_config.facts.model import configuration, facts, look
from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import explain, plan
from lmi_config.plan.attention.verdict import CHUNKED, HYBRID
from lmi_config.plan.kv_tiers import NoTiers, Tiers
from tests.lmi_config.examples import PARTS, machine
from tests.lmi_config.facts.test_model import GEMMA3_27B, Memory, encoded, safetensors

AUTO = {"OPTION_LMCACHE_AUTO_CONFIG": "true"}
NAMED = {"OPTION_KV_L2_URL": "redis://cache"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "torch_dtype": "bfloat16",
}


def of(architecture, **more):
    model_type = more.pop("model_type", architecture.partition("For")[0].lower())
    return LLAMA | {"architectures": [architecture], "model_type": model_type} | more


MAMBA = of("Mamba2ForCausalLM", model_type="mamba2")
WHISPER = of("WhisperForConditionalGeneration", is_encoder_decoder=True)
BERT = of("BertForSequenceClassification", model_type="bert")
JAMBA = of("JambaForCausalLM", attn_layer_period=8, attn_layer_offset=4)
PHI3 = of("Phi3ForCausalLM", model_type="phi3", sliding_window=2047)
GEMMA2 = of("Gemma2ForCausalLM", model_type="gemma2", max_position_embeddings=8192)
GPT_OSS = of("GptOssForCausalLM", model_type="gpt_oss", head_dim=64)
LLAMA4 = of("Llama4ForCausalLM", model_type="llama4_text", attention_chunk_size=8192)
GEMMA4 = of("Gemma4ForCausalLM", model_type="gemma4_text", head_dim=256, global_head_dim=512)
DEEPSEEK = of(
    "DeepseekV3ForCausalLM", model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64
)
DEEPSEEK_V32 = DEEPSEEK | {
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    **{"index_head_dim": 128, "index_topk": 2048},
}
NEMOTRON = of("DeciLMForCausalLM", model_type="nemotron-nas", block_configs=[{"attention": {}}])
REMOTE = of("MyOwnForCausalLM", model_type="my_own", auto_map={"AutoConfig": "a.B"})


def model(config):
    return facts(configuration(Memory({"config.json": encoded(config)})), {"a": 1 << 30})


def planned(config, gpus=0, environ=AUTO, draft=None, variables=None):
    variables = {**environ, **(variables or {})}
    if config is REMOTE:
        variables["OPTION_TRUST_REMOTE_CODE"] = "true"
    return plan.make(read(variables), machine(gpus), model(config), draft, variables, PARTS)


KINDS = [
    # kind, configuration, tiers without and with a GPU, whether windows are kept whole
    ("full", LLAMA, True, True, False),
    ("latent", DEEPSEEK, False, True, False),
    ("encoder_decoder", WHISPER, False, False, False),
    ("pooling", BERT, False, False, False),
    ("state", MAMBA, False, False, False),
    ("state", JAMBA, False, False, False),
    ("windows_only", PHI3, True, False, False),
    ("windows_and_full", GEMMA2, True, True, True),
    ("windows_and_full", GPT_OSS, True, True, True),
    ("windows_and_full", LLAMA4, True, True, True),
    ("layers_differ", GEMMA4, False, True, True),
    ("layers_differ", DEEPSEEK_V32, False, True, False),
    ("unknown", NEMOTRON, False, False, False),
    ("unknown", REMOTE, False, False, False),
]
ROWS = [
    (kind, config, gpus, whole and tiers[gpus], tiers[gpus])
    for kind, config, *tiers, whole in KINDS
    for gpus in (0, 1)
]


@pytest.mark.parametrize(("kind", "config", "gpus", "whole", "tiers"), ROWS)
def test_automatic_tiers_never_stop_a_start(kind, config, gpus, whole, tiers):
    found = planned(config, gpus)
    assert isinstance(found.tiers, Tiers) is tiers
    assert found.options.get(HYBRID, False) is whole
    assert ("kv_transfer_config" in found.options) is tiers
    if tiers:
        return
    assert isinstance(found.tiers, NoTiers)
    assert (found.tiers.word, found.verdict.kind) == ("attention", kind)
    assert f"no KV cache tiers: {found.tiers.reason}" in found.findings
    assert found.tiers.reason in explain.as_text(found)


@pytest.mark.parametrize(("kind", "config", "gpus", "whole", "tiers"), ROWS)
def test_tiers_that_are_asked_for_by_name_are_right_or_refused(kind, config, gpus, whole, tiers):
    if tiers:
        assert isinstance(planned(config, gpus, NAMED).tiers, Tiers)
        return
    with pytest.raises(SettingsError) as refused:
        planned(config, gpus, NAMED)
    (fault,) = refused.value.faults
    assert fault.startswith("OPTION_KV_L2_URL: no KV cache tiers: ")
    assert "; " in fault  # with the alternative that works


def drafted(config, method="eagle", **more):
    """The facts of a draft of the same family."""
    own = config | {"num_hidden_layers": 1} | more
    files = {"config.json": encoded(own), "model.safetensors": safetensors({})}
    found = drafts.look(Memory(files))
    return dataclasses.replace(found, method=method, tokens=3)


DRAFT = {"OPTION_SPECULATIVE_DRAFT_MODEL": "draft"}


def test_a_draft_like_the_model_changes_nothing():
    found = planned(LLAMA, draft=drafted(LLAMA), variables=DRAFT)
    assert isinstance(found.tiers, Tiers)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_draft_with_other_heads_is_another_group(gpus):
    """vLLM keeps both in one special group, and LMCache sees two."""
    draft = drafted(LLAMA, num_key_value_heads=4)
    found = planned(LLAMA, gpus, draft=draft, variables=DRAFT)
    assert isinstance(found.tiers, Tiers) is bool(gpus)
    assert found.verdict.kind == ("full" if gpus else "layers_differ")


def test_a_draft_with_a_window_makes_a_model_of_both_kinds():
    draft = drafted(LLAMA, "draft_model", sliding_window=1024)
    found = planned(LLAMA, draft=draft, variables=DRAFT)
    assert found.verdict.kind == "windows_and_full"
    assert found.options[HYBRID] is True


@pytest.mark.parametrize("config", [GEMMA2, PHI3])
def test_a_draft_with_another_window_leaves_tiers_out(config):
    draft = drafted(LLAMA, "draft_model", sliding_window=1024)
    found = planned(config, draft=draft, variables=DRAFT)
    assert found.verdict.kind == "windows_differ"
    assert isinstance(found.tiers, NoTiers)


@pytest.mark.parametrize("method", ["dflash", "dspark", "extract_hidden_states"])
def test_drafts_of_which_nothing_is_known_leave_tiers_out(method):
    speculative = encoded({"model": "m", "method": method, "num_speculative_tokens": 3}).decode()
    found = planned(LLAMA, variables={"OPTION_SPECULATIVE_CONFIG": speculative})
    assert isinstance(found.tiers, NoTiers)
    assert method in found.tiers.reason


@pytest.mark.parametrize(
    ("config", "tiers"), [(LLAMA, True), (DEEPSEEK, True), (GEMMA2, True), (PHI3, False)]
)
def test_layers_that_predict_further_are_like_the_models(config, tiers):
    speculative = encoded({"method": "mtp", "num_speculative_tokens": 1}).decode()
    found = planned(
        config, int(config is DEEPSEEK), variables={"OPTION_SPECULATIVE_CONFIG": speculative}
    )
    assert isinstance(found.tiers, Tiers) is tiers


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ({"sliding_window": 512, "layer_types": ["sliding_attention"] * 32}, "windows_only"),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16},
            "windows_and_full",
        ),
        ({"architectures": ["JambaForCausalLM"]}, "state"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "pooling"),
        ({"is_causal": False}, "pooling"),
        ({"use_bidirectional_attention": True}, "pooling"),
        ({"architectures": ["MyOwnForCausalLM"]}, "unknown"),
        ({"num_key_value_heads": [8, 4]}, "unknown"),
    ],
)
def test_what_overrides_the_configuration_counts(overrides, kind):
    config = configuration(Memory({"config.json": encoded(LLAMA)}), overrides)
    found = plan.make(read(AUTO), machine(1), facts(config, {"a": 1 << 30}), None, AUTO, PARTS)
    assert found.verdict.kind == kind


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("GptOssForCausalLM", {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 32}),
        ("MistralForCausalLM", {"sliding_window": 512, "sliding_window_pattern": 4}),
        ("MiniMaxM2ForCausalLM", {"model_type": "minimax_m2", "attn_window_size": 512}),
        ("LlamaForCausalLM", {"layer_types": ["full_attention", "of_another_kind"] * 16}),
        ("LlamaForCausalLM", {"per_layer_config": {"0": {"head_dim": 64}}}),
        ("Exaone4ForCausalLM", {"sliding_window": 512, "sliding_window_pattern": "LLLG"}),
    ],
)
def test_windows_that_vllm_would_read_otherwise_are_not_known(architecture, more):
    found = planned(of(architecture, **more), 1)
    assert found.verdict.kind == "unknown"
    assert isinstance(found.tiers, NoTiers)


def test_overrides_of_the_language_model_go_into_it():
    """As in vLLM: fields outside of the language model's own part do not change its values."""
    seeing = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**GEMMA2, "model_type": "gemma3_text", "sliding_window": 512},
    }
    files = Memory({"config.json": encoded(seeing)})
    outside = facts(configuration(files, {"sliding_window": 64}), {}).kept
    inside = facts(configuration(files, {"text_config": {"sliding_window": 64}}), {}).kept
    assert [*outside.windows, *inside.windows] == [512, 64]
    assert outside.full == inside.full == 5
    assert outside.windowed == inside.windowed == 27


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"OPTION_KV_CACHE_DTYPE": "fp8"}, "full"),
        ({"OPTION_KV_CACHE_DTYPE": "nvfp4"}, "format"),
        ({"OPTION_KV_CACHE_DTYPE": "int8_per_token_head"}, "format"),
        ({"OPTION_KV_CACHE_DTYPE_SKIP_LAYERS": '["0"]'}, "unknown"),
        ({"OPTION_HF_CONFIG_PATH": "elsewhere"}, "unknown"),
        ({"OPTION_MODEL_IMPL": "transformers"}, "unknown"),
        ({"OPTION_TASK": "embed"}, "pooling"),
        ({"OPTION_RUNNER": "pooling"}, "pooling"),
        ({"OPTION_CONVERT": "embed"}, "pooling"),
    ],
)
def test_options_that_change_what_is_kept_count(options, kind):
    found = planned(LLAMA, 1, variables=options)
    assert found.verdict.kind == kind
    assert isinstance(found.tiers, Tiers) is (kind == "full")


def test_a_format_of_the_models_own_counts():
    own = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}
    assert planned(LLAMA | {"quantization_config": own}, 1).verdict.kind == "format"


def test_the_hybrid_manager_that_is_asked_for_comes_before_automatic_tiers():
    asked = {f"OPTION_{HYBRID.upper()}": "false"}
    found = planned(GEMMA2, 1, variables=asked)
    assert isinstance(found.tiers, NoTiers)
    assert "OPTION_DISABLE_HYBRID_KV_CACHE_MANAGER=false" in found.tiers.reason
    with pytest.raises(SettingsError, match="leave OPTION_DISABLE_HYBRID_KV_CACHE_MANAGER out"):
        planned(GEMMA2, 1, NAMED, variables=asked)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(("length", "plain"), [(2047, True), (2048, False)])
def test_a_window_that_nothing_leaves_is_none(gpus, length, plain):
    found = planned(PHI3, gpus, variables={"OPTION_MAX_MODEL_LEN": str(length)})
    assert isinstance(found.tiers, Tiers) is (plain or not gpus)
    if plain:
        assert not found.verdict.tell


def test_without_windows_all_layers_keep_all_tokens():
    found = planned(GEMMA2, variables={"OPTION_DISABLE_SLIDING_WINDOW": "true"})
    assert found.verdict.kind == "full"
    assert HYBRID not in found.options


def test_the_price_of_keeping_all_tokens_is_told():
    text: Any = GEMMA3_27B["text_config"]
    big = text | {"architectures": ["Gemma3ForCausalLM"]}
    found = planned(big, 8, variables={"OPTION_MAX_MODEL_LEN": "131072"})
    (told,) = (it for it in found.findings if HYBRID in it)
    assert "a request of 131,072 tokens takes 62.0 GiB of the engine's KV cache" in told
    assert "18.0 GiB without KV cache tiers" in told
    assert f"{HYBRID} = True" in explain.as_text(found)
    assert found.settings.engine[HYBRID] is True  # so it counts in the size of the engine's cache
    (_, _, origin) = next(row for row in explain.options(found) if row[0] == HYBRID)
    assert origin == "derived"


def test_tiers_that_the_longest_request_would_not_fit_with_are_left_out():
    small = {"OPTION_KV_CACHE_MEMORY_BYTES": str(1 << 30), "OPTION_MAX_MODEL_LEN": "8192"}
    config = GEMMA2 | {"sliding_window": 512}
    found = planned(config, variables=small)
    assert isinstance(found.tiers, NoTiers)
    assert HYBRID not in found.options
    assert "tokens of the longest request of 8,192; set OPTION_MAX_MODEL_LEN=" in found.tiers.reason
    with pytest.raises(SettingsError, match="would have to keep all tokens"):
        planned(config, environ=NAMED, variables=small)


def test_a_cache_server_that_does_not_start_takes_its_settings_along():
    found = planned(GEMMA2).without_tiers("the cache server did not start")
    assert HYBRID not in found.options
    assert HYBRID not in found.settings.engine
    own = planned(GEMMA2, variables={f"OPTION_{HYBRID.upper()}": "true"})
    assert own.without_tiers("it did not").options[HYBRID] is True


def test_prompt_embeddings_are_told_to_go_past_the_tiers():
    found = planned(LLAMA, variables={"OPTION_ENABLE_PROMPT_EMBEDS": "true"})
    assert isinstance(found.tiers, Tiers)
    assert any("prompt embeddings neither use" in it for it in found.findings)


@pytest.mark.parametrize(
    ("variables", "speculative", "whole"),
    [({}, None, False), ({CHUNKED: "0"}, None, True), ({}, DRAFT, True)],
)
def test_chunks_are_kept_whole_where_vllm_does_so_by_itself(variables, speculative, whole):
    """Without tiers. The planned use of the engine's cache follows."""
    draft = drafted(LLAMA4) if speculative else None
    variables = {**variables, **(speculative or {})}
    found = plan.make(read(variables), machine(1), model(LLAMA4), draft, variables, PARTS)
    assert found.settings.engine.get(HYBRID, False) is whole


def test_sentence_transformers_pool_whatever_they_are_called():
    files = {"config.json": encoded(LLAMA), "modules.json": b"[]", "a.bin": b"a"}
    found = plan.make(read(AUTO), machine(), look(Memory(files)), None, AUTO, PARTS)
    assert found.verdict.kind == "pooling"


@pytest.mark.parametrize(
    ("windows", "kind"), [(None, "full"), (512, "unknown"), ([None, 512], "unknown")]
)
def test_two_configurations_have_to_tell_the_same_layers(windows, kind):
    """vLLM reads Mistral's own configuration if Mistral's weights are also there."""
    params = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    config = of("MistralForCausalLM", sliding_window=None)
    files = {"config.json": encoded(config), "consolidated.safetensors": safetensors({})}
    found = look(Memory(files | {"params.json": encoded(params | {"sliding_window": windows})}))
    assert plan.make(read(AUTO), machine(1), found, None, AUTO, PARTS).verdict.kind == kind


def test_a_chunk_that_is_no_multiple_of_the_engines_block_is_refused():
    variables = {"OPTION_LMCACHE_CONFIG_FILE": "f.yaml"}
    file = {"chunk_size": 100, "max_local_cpu_size": 1}
    with pytest.raises(SettingsError, match="set it to 128"):
        plan.make(read(variables), machine(), model(LLAMA), None, variables, PARTS, file)


LMCACHES = {
    "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'
}
SEVERAL = {
    "OPTION_KV_TRANSFER_CONFIG": encoded(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [{"kv_connector": "LMCacheMPConnector"}]},
        }
    ).decode()
}
EMBEDS = {"OPTION_ENABLE_PROMPT_EMBEDS": "true"}


@pytest.mark.parametrize("connector", [LMCACHES, SEVERAL])
def test_a_connector_of_lmcaches_own_is_no_way_round(connector):
    assert HYBRID not in planned(LLAMA, environ=connector).options
    assert planned(GEMMA2, environ=connector).options[HYBRID] is True
    for config, variables in ((PHI3, {}), (JAMBA, {}), (LLAMA, EMBEDS)):
        with pytest.raises(SettingsError, match="no connector of LMCache's: "):
            planned(config, environ=connector, variables=variables)


FEW = {"num_key_value_heads": 2}  # so that some ranks can share a context


@pytest.mark.parametrize(
    ("config", "ranks", "chunk"),
    [(LLAMA | FEW, "4", 256), (DEEPSEEK, "1", 256), (DEEPSEEK, "8", 1024)],
)
def test_a_chunk_is_a_multiple_of_what_ranks_share(config, ranks, chunk):
    found = planned(config, 8, variables={"OPTION_DECODE_CONTEXT_PARALLEL_SIZE": ranks})
    assert found.tiers.chunk_size == chunk


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_engine_copies_where_all_layers_have_a_window(gpus):
    """Without a GPU, the engine copies, whatever the value of LMCACHE_MP_TRANSFER_MODE."""
    for config, pinned in ((PHI3, not gpus), (GEMMA2, False), (LLAMA, False)):
        found = planned(config, gpus)
        connector = found.options.get("kv_transfer_config", {}).get("kv_connector_extra_config", {})
        assert ("engine_driven" in connector.values()) is pinned


@pytest.mark.parametrize("environ", [AUTO, {}])
@pytest.mark.parametrize(
    ("chunk", "gpus", "block", "fix"),
    [
        (8192, 0, None, None),
        (8192, 1, None, None),
        (192, 0, None, "set OPTION_BLOCK_SIZE=96"),
        (160, 0, None, "set OPTION_BLOCK_SIZE=32"),
        (64, 0, None, "set OPTION_BLOCK_SIZE=64"),
        (192, 0, 64, None),
        (200, 0, None, "no block divides them (of 32 tokens or more)"),
        (200, 1, None, "no block divides them (of 16 tokens or more)"),
        (8192, 1, 48, "set OPTION_BLOCK_SIZE=32"),
    ],
)
def test_chunks_that_blocks_do_not_divide_are_refused(chunk, gpus, block, fix, environ):
    """Otherwise vLLM ends at the first request."""
    config = LLAMA4 | {"attention_chunk_size": chunk}
    options = environ | ({"OPTION_BLOCK_SIZE": str(block)} if block else {})
    if not fix:
        planned(config, gpus, options)
        return
    with pytest.raises(SettingsError, match=f"chunks of {chunk:,} tokens") as found:
        planned(config, gpus, options)
    assert fix in str(found.value)


@pytest.mark.parametrize(
    ("config", "gpus", "block", "fix"),
    [
        (LLAMA, 0, 16, "OPTION_BLOCK_SIZE=16: attention on CPUs needs a multiple of 32"),
        (LLAMA, 0, 48, "OPTION_BLOCK_SIZE=48: attention on CPUs needs a multiple of 32"),
        (LLAMA, 0, 96, None),
        (LLAMA, 1, 16, None),
        (GEMMA2, 0, 16, "set 32"),
        (LLAMA4, 0, 16, "set 32"),
        (BERT, 0, 16, None),
        (MAMBA, 0, 16, None),
        (JAMBA, 0, 16, None),
    ],
)
def test_blocks_that_attention_on_cpus_cannot_use_are_refused(config, gpus, block, fix):
    """Otherwise vLLM ends while it starts: "No common block size for 16"."""
    options = {"OPTION_BLOCK_SIZE": str(block)}
    if not fix:
        planned(config, gpus, options)
        return
    with pytest.raises(SettingsError) as found:
        planned(config, gpus, options)
    assert fix in str(found.value)


@pytest.mark.parametrize(
    ("config", "gpus", "environ", "expected"),
    [
        (JAMBA, 0, {}, False),
        (JAMBA, 1, {}, None),
        (JAMBA, 0, {"OPTION_ENABLE_PREFIX_CACHING": "true"}, True),
        (MAMBA, 0, {}, False),
        (LLAMA, 0, {}, None),
    ],
)
def test_prefix_caching_is_off_where_it_ends_the_engine(config, gpus, environ, expected):
    """Without a GPU, in models that keep a state."""
    found = planned(config, gpus, environ)
    assert found.options.get("enable_prefix_caching") is expected
    assert any("prefix caching is off" in it for it in found.findings) == (expected is False)
