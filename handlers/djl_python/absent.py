# SPDX-License-Identifier: Apache-2.0
"""The names of LMI's djl_python that this package lacks. Importing one raises an error that names
the alternative.

docs/reference/djl_python.md lists every name; a test compares that page with this file.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "djl_python"

_HANDLERS = (
    "it is a handler of LMI's own, and here the server does that work; remove the import and serve "
    "the model without a handler, or write `handle(inputs)` with an engine of your own"
)
_BATCHING = (
    "it batches requests for LMI's engines, which vLLM does by itself; change requests with an "
    "input_formatter and answers with an output_formatter, or write `handle(inputs)`"
)
_INSIDE = (
    "it is a part of LMI's server, which is not here; `inputs.get_properties()` has the options, "
    "and docs/guides/formatters.md has what a model.py can do"
)
_OLDER = "LMI 0.36 does not have it either, or it was never LMI's; remove the import"

_MODULES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("deepspeed", "fastertransformer", "huggingface", "lmi_trtllm", "lmi_vllm"),
            *("neuron_utils", "sagemaker", "sklearn_handler", "stable_diffusion_inf2"),
            *("tensorrt_llm", "tensorrt_llm_python", "transformers_neuronx", "ts_service_loader"),
            "xgboost_handler",
        ),
        _HANDLERS,
    ),
    **dict.fromkeys(
        ("chat_completions", "multimodal", "request", "rolling_batch", "scheduler", "three_p"),
        _BATCHING,
    ),
    **dict.fromkeys(
        (
            *("adapter_formatter_mixin", "adapter_manager_mixin", "arg_parser", "aws"),
            *("custom_formatter_handling", "custom_handler_service", "import_utils"),
            *("lmcache_utils", "properties_manager", "python_async_engine", "python_sync_engine"),
            *("service_loader", "session_manager", "session_utils", "sm_log_filter", "telemetry"),
            *("test_model", "utils"),
        ),
        _INSIDE,
    ),
}
"""Missing module or package → the reason, and the alternative."""

_FORMATTING = (
    "it formats tokens of LMI's rolling batch; here an output_formatter gets the engine's answer "
    "in OpenAI's shape, and a stream's events as text"
)
_PARSING = (
    "it parses requests for LMI's rolling batch; here an input_formatter gets the decoded body, "
    "and `decode` of djl_python.encode_decode reads an Input"
)
_SOCKETS = "it reads and writes the connection to LMI's server, which is not here"
_ARRAYS = "from_nd_list and to_nd_list do all of it"

NAMES: Mapping[str, Mapping[str, str]] = {
    "": dict.fromkeys(
        ("Session", "SessionManager"),
        "sessions are the server's, by SageMaker's header; remove the import",
    ),
    "input_parser": dict.fromkeys(
        (
            *("ParsedInput", "add_server_maintained_params", "format_input", "get_batch_start_id"),
            *("get_req_id_counter", "parse_adapters", "parse_input_with_formatter"),
            *("parse_lmi_default_request_rolling_batch", "parse_text_inputs_params"),
        ),
        _PARSING,
    ),
    "inputs": dict.fromkeys(
        ("retrieve_buffer", "retrieve_int", "retrieve_short", "retrieve_utf8"), _SOCKETS
    ),
    "np_util": dict.fromkeys(
        (
            *("MAGIC_NUMBER", "VERSION", "get_byte_as_int", "get_bytes", "get_char", "get_int"),
            *("get_long", "get_str", "set_char", "set_int", "set_long", "set_str"),
        ),
        _ARRAYS,
    ),
    "output_formatter": dict.fromkeys(
        (
            *("adapt_legacy_output_formatter", "get_details_dict", "get_generated_text"),
            *("get_output_formatter", "get_sequence_details", "sse_response_formatter"),
        ),
        _FORMATTING,
    ),
}
"""Existing module → name that it lacks → the reason, and the alternative."""


def reason(module: str) -> str:
    """Return why a module of the package is missing. module: its name below the package."""
    return _MODULES.get(module.partition(".")[0], _OLDER)


def looked_up(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of an existing module."""

    def look_up(name: str) -> Any:
        whole = f"{PACKAGE}.{module}".rstrip(".")
        if why := NAMES[module].get(name):
            raise ImportError(f"{whole}.{name} is not here: {why}")
        raise AttributeError(f"module {whole} has no {name}")

    return look_up


class _Finder:
    """Raises an error with the reason for each missing module of the package."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        if package == PACKAGE and module:
            raise ModuleNotFoundError(f"{name} is not here: {reason(module)}", name=name)
        return None


def explain() -> None:
    """Make imports of missing names raise an error with the reason."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
