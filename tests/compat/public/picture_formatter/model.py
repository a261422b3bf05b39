"""An input formatter for pictures: what it gets is decoded."""

from djl_python.input_parser import input_formatter


@input_formatter
def describe(decoded_payload, **kwargs):
    given = decoded_payload["inputs"]
    if isinstance(given, list):  # text/plain, or arrays
        return {"inputs": f"{len(given)} of {type(given[0]).__name__}"}
    return {"inputs": f"{given.width} by {given.height} {given.format}"}
