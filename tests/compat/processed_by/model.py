"""As files for adapters do it: every answer says who has processed it."""

import json

from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

NAME = "base"


@input_formatter
def count(decoded_payload, tokenizer=None, **kwargs):
    if decoded_payload.pop("fail", False):
        raise KeyError("asked to fail")
    count.tokens = len(tokenizer.encode("import", add_special_tokens=False))
    return decoded_payload


@output_formatter
def stamp(output):
    if hasattr(output, "model_dump"):
        output.processed_by = NAME
        output.prompt_tokens_by_formatter = getattr(count, "tokens", 1)
        return output
    if isinstance(output, str) and output.startswith("data: {"):
        event = json.loads(output[6:])
        event["processed_by"] = NAME
        return "data: " + json.dumps(event) + "\n\n"
    return output
