"""A gate before the engine: it refuses some prompts, and leaves the others to vLLM."""

from djl_python import Output
from djl_python.async_utils import create_non_stream_output

BLOCKED = ("forbidden",)


async def handle(inputs):
    if inputs.is_empty():
        return None
    assert inputs.get_function_name() == "handle"
    text = inputs.get_as_string()
    if any(word in text for word in BLOCKED):
        return create_non_stream_output("", error="the prompt is not allowed", code=400)
    if "teapot" in text:
        return Output(code=418, message="short and stout").add("no coffee")
    return None
