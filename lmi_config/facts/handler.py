# SPDX-License-Identifier: Apache-2.0
"""The facts about a model.py without running it: whether it or vLLM answers requests."""

import ast
from enum import StrEnum
from pathlib import Path

FILE = "model.py"


LARGEST = 2**20
"""Maximum bytes of a model.py; its syntax tree has many times as much."""


class Service(StrEnum):
    """The program that answers, by the functions of a model.py. The values appear in the plan."""

    OURS = "formatters; vLLM answers"
    ITS_OWN = "its handle is the whole service; vLLM is not started"
    IN_FRONT = "its handle is in front of vLLM"
    EITHER = (
        "its handle is in front of vLLM; where it answers the initialising call it is the whole "
        "service, and vLLM is not started"
    )


def there(folder: Path | None, entry_point: str | None) -> bool:
    """Whether a folder has a model.py, or the deployment needs one."""
    return entry_point == FILE or bool(folder and (folder / FILE).is_file())


def look(folder: Path, entry_point: str | None) -> Service | None:
    """Return the program that answers; None if the folder has no model.py, or one that cannot be
    read or is longer than LARGEST.

    entry_point: OPTION_ENTRYPOINT, which names this file or one of LMI's handlers. Imports and
    names that a file makes at run time are not visible here. The rules are those of
    docs/guides/formatters.md.
    """
    try:
        with (folder / FILE).open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            return None
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [
        it
        for it in tree.body
        if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef) and it.name == "handle"
    ]
    if not found:
        return Service.OURS
    if entry_point == FILE or isinstance(found[-1], ast.FunctionDef):
        return Service.ITS_OWN
    return Service.IN_FRONT if entry_point else Service.EITHER
