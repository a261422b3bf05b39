"""The wire's pieces made by hand, as handlers for LMI's async mode did at first."""

import json

from djl_python import Output


def piece(text, last):
    output = Output()
    output.add_property("Content-Type", "application/jsonlines")
    output.add(Output.binary_encode({"data": json.dumps({"text": text}) + "\n", "last": last}))
    return output


def failure(why):
    output = Output()
    output.add(Output.binary_encode({"data": "", "last": True, "error": why, "code": 429}))
    return output


async def handle(inputs):
    if inputs.is_empty():
        return None
    request = inputs.get_as_json()
    if request.get("full"):
        return failure("too many")

    async def pieces():
        for word in request["inputs"].split():
            yield piece(word, word == "end")

    return pieces()
