"""A handler of one's own. It leaves what it does not know to the engine."""

from djl_python import Input, Output
from djl_python.encode_decode import decode


async def handle(inputs: Input):
    if inputs.is_empty():
        return None  # the initialising call
    batch = inputs.get_batches()
    content_type = inputs.get_property("Content-Type")
    request = decode(batch[0], content_type)
    if "custom" not in request:
        return None
    output = Output()
    output.add_property("x-made-by", "handle")
    if "header" in request:
        output.add_property("x-more", request["header"])
    output.add_as_json({"custom_handler_used": True, "echo": request["custom"], "model": inputs.get_properties().get("model_id")})
    return output
