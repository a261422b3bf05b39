"""The answer's text alone, for whole answers and for streams."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
async def final(output):
    if isinstance(output, str):
        data = output.removeprefix("data: ").strip()
        if data == "[DONE]":
            return ""
        return {"piece": json.loads(data)["choices"][0]["text"]}
    return {"custom_final": output.choices[0].text, "by": output.model}
