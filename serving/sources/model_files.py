# SPDX-License-Identifier: Apache-2.0
"""The model files that serving needs, by their names."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from serving.sources.source import SourceError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # the first one in a folder is used
_FOREIGN = (".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite")
_ASIDE = re.compile(r"original|onnx|openvino|coreml|runs|checkpoint-\d+|global_step\d+")
_TRAINING = re.compile(r"(optimizer|scheduler|scaler|rng_state.*|training_args)\.(bin|pt|pth)")


def needed(sizes: Mapping[str, int]) -> dict[str, int]:
    """Leave out the files that serving does not read, by name.

    These are hidden files, leftovers of training, formats without a loader in vLLM, and weights
    that a folder also has in a better format. sizes: file name → bytes.
    """
    left = {
        name: size
        for name, size in sizes.items()
        if not any(part.startswith(".") for part in name.split("/"))
        and not _ASIDE.fullmatch(name.split("/")[0])
        and not _TRAINING.fullmatch(PurePosixPath(name).name)
        and not name.endswith(_FOREIGN)
    }
    best: dict[PurePosixPath, int] = {}
    for path in map(PurePosixPath, left):
        if path.suffix in _WEIGHTS:
            rank = _WEIGHTS.index(path.suffix)
            best[path.parent] = min(rank, best.get(path.parent, rank))
    return {
        name: size
        for name, size in left.items()
        if (path := PurePosixPath(name)).suffix not in _WEIGHTS
        or path.suffix == _WEIGHTS[best[path.parent]]
    }


def needed_of_remote(model_id: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the needed files of a remote model, whose names are not trusted.

    Raises SourceError for a name that leads out of the model's folder.
    """
    for name in sizes:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise SourceError(model_id, f"the name {name!r} leads out of its folder", "rename it")
    return needed(sizes)
