"""A stream of steps as the package formats them, from a handler that is async."""

from djl_python import Output


async def handle(inputs):
    if inputs.is_empty():
        return None
    words = inputs.get_as_json()["inputs"].split()
    return Output().add_stream_content([word] for word in words)
