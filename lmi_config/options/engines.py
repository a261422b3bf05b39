# SPDX-License-Identifier: Apache-2.0
"""Options that choose an engine other than vLLM in LMI. Each stops the start."""

from collections.abc import Iterator, Mapping

_ENGINES: Mapping[str, str] = {
    "trtllm": "TensorRT-LLM",
    "tensorrt": "TensorRT-LLM",
    "neuron": "Neuron",
    "deepspeed": "DeepSpeed",
    "fastertransformer": "FasterTransformer",
    "stable-diffusion": "Stable Diffusion",
    "sklearn": "scikit-learn",
    "xgboost": "XGBoost",
}
"""Part of the value → its owner."""
_NAMES = (
    *("OPTION_ROLLING_BATCH", "OPTION_ENGINE", "SERVING_ENGINE"),
    *("OPTION_ENTRYPOINT", "DJL_ENTRY_POINT"),
)


def others(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the options that choose another engine: a variable's name, and the chosen engine.

    MPI chooses none: LMI also ran lmi-dist and its Hugging Face handler with it.

    given: variable's name → its value.
    """
    for name in _NAMES:
        value = given.get(name, "").lower()
        if engine := next((whose for part, whose in _ENGINES.items() if part in value), None):
            yield name, engine
