# SPDX-License-Identifier: Apache-2.0
"""Which of a model's files serving needs."""

import pytest

from serving.sources.model_files import needed


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["config.json", "model-1.safetensors", "tokenizer.model", "vocab.txt"], "all"),
        (["config.json", "chat_template.jinja", "modeling_x.py", "README.md"], "all"),
        (["config.json", "model.safetensors", "pytorch_model.bin", "x.pt"], [0, 1]),
        (["config.json", "pytorch_model.bin", "x.pt", "x.gguf"], [0, 1]),
        (["config.json", "x.gguf"], "all"),
        (["config.json", "model.safetensors", "adapters/a/adapter_model.bin"], "all"),
        (["config.json", "a.onnx", "tf_model.h5", "flax_model.msgpack", "onnx/a.json"], [0]),
        (["config.json", ".gitattributes", ".cache/a", "a/.b/c"], [0]),
        (["params.json", "original/consolidated.00.pth", "my/original/a.json"], [0, 2]),
        (["config.json", "a.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth"], [0, 1]),
        (["config.json", "checkpoint-500/model.safetensors", "adapters/checkpoint-5/a"], [0, 2]),
    ],
)
def test_only_what_serving_reads_is_needed(given, kept):
    wanted = given if kept == "all" else [given[place] for place in kept]
    assert needed(dict.fromkeys(given, 7)) == dict.fromkeys(wanted, 7)
