"""Server-sent events edited as text."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def edit(chunk):
    if not isinstance(chunk, str):
        chunk.edited = True
        return chunk
    if chunk.startswith("data: {"):
        event = json.loads(chunk[6:])
        event["edited"] = True
        return "data: " + json.dumps(event) + "\n"
    return chunk
