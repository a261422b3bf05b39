# SPDX-License-Identifier: Apache-2.0
"""The situations of classified.json: options that vLLM refuses with a model on a machine.

Each row has a state:

- "told": the plan refuses `options`, and `says` why.
- "unknowable": it cannot be known before the start, and `why`.
- "open": the plan could refuse it, and does not.

A row with the state "told" has these fields:

- options: vLLM's, by its names
- model, config: a model of MODELS, and additions to its configuration
- draft: a draft of DRAFTS
- gpus, capability, cpus: those of the machine
- missing: modules that are not installed there
- environ: variables
- loose: vLLM's own types refuse the value before the row's line does
- elsewhere: another line of vLLM refuses it
- package: without this module vLLM does not reach the line
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from lmi_config.facts import draft
from lmi_config.facts.model import Checkpoint, look
from lmi_config.options.settings import SettingsError, read
from lmi_config.plan import plan
from lmi_config.plan.plan import Plan
from lmi_config.plan.refusals import named_files
from tests.lmi_config.examples import GIB, H100, PARTS, machine
from tests.lmi_config.facts.test_draft import Memory

FOLDER = Path(__file__).parent
ROWS: dict[str, dict[str, Any]] = json.loads((FOLDER / "classified.json").read_text())
TOLD = {key: row for key, row in ROWS.items() if row["state"] == "told"}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma2": LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "mixtral": LLAMA
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
    "deepseek": LLAMA
    | _DEEPSEEK
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "v_head_dim": 16},
    "sees": {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": LLAMA,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        "image_token_id": 255,
        "scale_factor": 2,
        "torch_dtype": "bfloat16",
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_hidden_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "vocab_size": 256,
        "num_mel_bins": 80,
    },
}
DRAFTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "smaller": LLAMA | {"vocab_size": 128},
    "mtp": MODELS["deepseek"] | {"num_nextn_predict_layers": 2},
    "dspark": LLAMA | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"},
    "gemma_dspark": LLAMA | {"architectures": ["Gemma4DSparkModel"], "model_type": "qwen3"},
}


def checkpoint(row: dict[str, Any]) -> Checkpoint:
    return Memory(MODELS[row.get("model", "llama")] | row.get("config", {}), where="org/model")


def environment(options: dict[str, Any]) -> dict[str, str]:
    """The variables that give these options."""
    return {f"OPTION_{name.upper()}": _text(value) for name, value in options.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def planned(row: dict[str, Any]) -> Plan:
    """Raises SettingsError."""
    gpu = dataclasses.replace(H100, capability=tuple(row.get("capability", (9, 0))))
    count = row.get("gpus", 0)
    here = machine(
        gpus=count,
        cpus=tuple(range(row.get("cpus", 4))),
        memory=100 * GIB,
        missing=tuple(row.get("missing", ())),
    )
    here = dataclasses.replace(here, gpus=(gpu,) * count)
    environ = {**environment(row["options"]), **row.get("environ", {})}
    drafted = None
    if kind := row.get("draft"):
        drafted = draft.look(Memory(DRAFTS[kind], where="org/draft"))
    facts = look(checkpoint(row))
    made = plan.make(read(environ), here, facts, drafted, environ, PARTS)
    if faults := named_files.faults(made.settings, made.options, made.model, made.lora_modules):
        raise SettingsError(faults)
    return made
