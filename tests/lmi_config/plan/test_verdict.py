# SPDX-License-Identifier: Apache-2.0
"""KV cache tiers for each kind of attention: right, refused by name, or left out and said so."""

import pytest

from lmi_config.facts.model import configuration, facts
from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import explain, plan
from lmi_config.plan.attention.verdict import HYBRID
from lmi_config.plan.kv_tiers import NoTiers, Tiers
from tests.lmi_config.examples import PARTS, machine
from tests.lmi_config.facts.test_model import Memory, encoded

AUTO = {"OPTION_LMCACHE_AUTO_CONFIG": "true"}
NAMED = {"OPTION_KV_L2_URL": "redis://cache"}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
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
    return plan.make(read(variables), machine(gpus), model(config), draft, variables, PARTS)


KINDS = [
    # kind, configuration, tiers without and with a GPU, whether windows are kept whole
    ("full", LLAMA, True, True, False),
    ("latent", DEEPSEEK, True, True, False),
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
    assert "; " in fault  # with what works instead
