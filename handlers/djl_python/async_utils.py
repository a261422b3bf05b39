# SPDX-License-Identifier: Apache-2.0
"""Answers of a custom handler, whole and streamed."""

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from typing import Any

from .outputs import FAILED, Output, encoded


def create_non_stream_output(
    data: Any,
    properties: Mapping[str, Any] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """A whole answer, with a newline after it.

    data: text as it is, anything else becomes JSON. properties: headers. code: the HTTP status, 200
    or, with an error, 424. error: why it failed, which is sent where data is empty.
    """
    output = _output(data, "application/json", error, code)
    for name, value in (properties or {}).items():
        output.add_property(name, value)
    return output


def create_stream_chunk_output(
    data: Any, last_chunk: bool = False, error: str | None = None, code: int | None = None
) -> Output:
    """A piece of an answer, as a line of it. The rest is as in create_non_stream_output."""
    output = _output(data, "application/jsonlines", error, code)
    output.last = last_chunk
    return output


def _output(data: Any, content_type: str, error: str | None, code: int | None) -> Output:
    code = code or (FAILED if error else 200)
    if error and not data:
        data = {"code": code, "error": error}
    content = encoded(data)
    output = Output(code, error or "OK").add_property("Content-Type", content_type)
    return output.add(content + b"\n" if content else b"")


async def handle_streaming_response(
    response: AsyncIterable[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **kwargs: Any,
) -> AsyncGenerator[Output, None]:
    """A streamed answer from chunks, each put through stream_output_formatter.

    It is called with the chunk and kwargs, and returns (data, whether it is the last). With
    accumulate_chunks it is also called with `history`, a list at first, and returns it third.
    """
    history: Any = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, last, history = stream_output_formatter(chunk, history=history, **kwargs)
            else:
                data, last = stream_output_formatter(chunk, **kwargs)
        except Exception as failure:
            logging.getLogger(__name__).exception("stream_output_formatter failed")
            yield create_stream_chunk_output("", True, str(failure), FAILED)
            return
        yield create_stream_chunk_output(data, last)
        if last:
            return
