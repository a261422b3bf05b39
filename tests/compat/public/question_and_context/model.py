"""A schema of its own to a chat and back, whole and streamed."""

import json

from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter


@input_formatter
def to_chat(payload, **kwargs):
    messages = [
        {"role": "system", "content": f"Answer from: {payload['context']}"},
        {"role": "user", "content": payload["question"]},
    ]
    return {"messages": messages, "max_tokens": payload.get("length", 16), "temperature": payload.get("temperature", 1), "stream": payload.get("stream", False)}


@output_formatter
def from_chat(output):
    if isinstance(output, str):
        if not output.startswith("data: ") or output.strip() == "data: [DONE]":
            return ""
        delta = json.loads(output[len("data: ") :])["choices"][0]["delta"]
        return {"delta": delta.get("content") or ""}
    message = output.choices[0].message
    return {"answer": message.content, "usage": output.usage.model_dump() if hasattr(output, "usage") else None}
