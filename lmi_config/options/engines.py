# SPDX-License-Identifier: Apache-2.0
"""Options by which LMI chooses an engine other than vLLM. Each stops the start."""

from collections.abc import Iterator, Mapping

_VLLM = ("vllm", "lmi-dist")  # for the second LMI itself takes vLLM by now
_ENGINES: Mapping[str, str] = {
    "trtllm": "TensorRT-LLM",
    "tensorrt": "TensorRT-LLM",
    "neuron": "Neuron",
    "deepspeed": "DeepSpeed",
    "fastertransformer": "FasterTransformer",
    "stable-diffusion": "Stable Diffusion",
}
"""What is in the value → whose it is."""
_NAMES = (
    *("OPTION_ROLLING_BATCH", "OPTION_ENGINE", "SERVING_ENGINE"),
    *("OPTION_ENTRYPOINT", "DJL_ENTRY_POINT"),
)
_MPI: Mapping[str, str] = {
    "OPTION_ENGINE": "mpi",
    "SERVING_ENGINE": "mpi",
    "OPTION_MPI_MODE": "true",
}
"""Names and values by which LMI runs TensorRT-LLM, and ran lmi-dist."""


def others(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The options that choose another engine: a variable's name, and the engine that it chooses.

    given: variable's name → its value.
    """
    values = {name: text.lower() for name, text in given.items()}
    for name in _NAMES:
        value = values.get(name, "")
        if engine := next((whose for part, whose in _ENGINES.items() if part in value), None):
            yield name, engine
    if values.get("OPTION_ROLLING_BATCH") not in _VLLM:
        yield from ((name, "TensorRT-LLM") for name, it in _MPI.items() if values.get(name) == it)
