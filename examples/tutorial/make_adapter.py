# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of random weights with a formatter, for the tutorial.

    python -m examples.tutorial.make_adapter FOLDER

It fits the model in OPTION_MODEL_ID, a folder, or by default the default model of scripts/serve.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.models import default, tiny_lora

FORMATTER = """\
from djl_python.output_formatter import output_formatter


@output_formatter
def shout(answer):
    if isinstance(answer, str):  # an event of a stream
        return answer
    return {"shout": answer.choices[0].text.upper()}
"""


def make(folder: Path, model: Path) -> None:
    """Write the adapter's weights, its configuration and its model.py."""
    config = json.loads((model / "config.json").read_text())
    wide, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or wide // heads
    out = {"q_proj": size * heads, "v_proj": size * config.get("num_key_value_heads", heads)}
    modules = {
        f"model.layers.{layer}.self_attn.{name}": (wide, out[name])
        for layer in range(config["num_hidden_layers"])
        for name in out
    }
    tiny_lora.write_modules(folder, modules, seed=1, rank=8)
    (folder / "model.py").write_text(FORMATTER)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(os.environ.get("OPTION_MODEL_ID") or default.make()))
