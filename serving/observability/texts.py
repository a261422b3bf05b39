# SPDX-License-Identifier: Apache-2.0
"""Lines of libraries that handle what was asked and answered, without a text of either.

vLLM (0.32) logs what its parsers make nothing of, which is the model's answer, and exceptions that
repeat requests. Of such a line the template stays, which is in the library's code, and where an
exception was raised; what was put in, and what the exception says, is left out.
"""

import logging
import sys
import traceback

READERS = (
    *("vllm.tool_parsers", "vllm.reasoning", "vllm.parser", "vllm.renderers", "vllm.tokenizers"),
    *("vllm.entrypoints.anthropic", "vllm.entrypoints.generate", "vllm.entrypoints.pooling"),
    *("vllm.entrypoints.openai.chat_completion", "vllm.entrypoints.openai.completion"),
    *("vllm.entrypoints.openai.responses", "vllm.entrypoints.openai.parser"),
    *("vllm.entrypoints.serve.engine", "vllm.entrypoints.serve.exception_handling"),
    *("vllm.entrypoints.serve.tokenize", "vllm.entrypoints.speech_to_text", "vllm.inputs"),
    *("vllm.multimodal", "vllm.v1.structured_output", "vllm.v1.engine.async_llm"),
    *("vllm.logging_utils.dump_input", "vllm.v1.engine.detokenizer", "vllm.v1.engine.logprobs"),
    *("vllm.v1.engine.output_processor", "vllm.v1.engine.input_processor"),
    *("transformers", "tokenizers", "mistral_common", "openai", "openai_harmony", "xgrammar"),
    *("llguidance", "outlines", "lmformatenforcer", "jinja2", "PIL", "fastapi", "pydantic"),
)
"""Loggers, with those below them, whose lines may have a text of a request or of an answer."""
_READERS = tuple(f"{name}." for name in READERS)
_OF_ONE_REQUEST = ("vllm.v1.engine.core", "Unexpected error pre-processing request")
"""A logger that also says why the engine has ended, and what it says of one request."""
LEFT_OUT = "(left out: it may be of a request)"


def leave_out(record: logging.LogRecord) -> bool:
    """A filter of handlers that lets every record pass, without what it may have of a request.

    What another process has written has been filtered there.
    """
    if not record.pathname or not _is_of_a_reader(record):
        return True
    template = record.msg if _is_in_the_code(record) else LEFT_OUT
    record.msg, record.args = str(template), None
    if isinstance(record.exc_info, tuple) and (kind := record.exc_info[0]):
        frames = "".join(traceback.format_tb(record.exc_info[2]))
        facts = {**getattr(record, "facts", {}), "exception": f"{frames}{kind.__name__}"}
        record.facts, record.exc_info, record.exc_text = facts, None, None
    return True


def _is_of_a_reader(record: logging.LogRecord) -> bool:
    if f"{record.name}.".startswith(_READERS):
        return True
    name, message = _OF_ONE_REQUEST
    return record.name == name and str(record.msg).startswith(message)


def _is_in_the_code(record: logging.LogRecord) -> bool:
    """Whether a record's template stands as it is in the function that logs, or beside it."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        code = frame.f_code
        if (code.co_filename, code.co_name) == (record.pathname, record.funcName):
            kept = (it for it in frame.f_globals.values() if isinstance(it, str))
            return record.msg in code.co_consts or any(record.msg is it for it in kept)
    return False
