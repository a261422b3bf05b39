# SPDX-License-Identifier: Apache-2.0
"""A user's output formatter that parses each event of a stream and writes it again."""

from pathlib import Path

NAME = "formatted"
"""The stamp on answers."""

CODE = f'''"""Says who has processed an answer."""

import json

from djl_python.output_formatter import output_formatter


@output_formatter
def stamp(output):
    if hasattr(output, "model_dump"):
        output.processed_by = "{NAME}"
        return output
    if isinstance(output, str) and output.startswith("data: {{"):
        event = json.loads(output[6:])
        event["processed_by"] = "{NAME}"
        return "data: " + json.dumps(event) + "\\n\\n"
    return output
'''


def write(folder: Path) -> Path:
    """Write the formatter beside a model or an adapter, as its model.py."""
    file = folder / "model.py"
    file.write_text(CODE)
    return file
