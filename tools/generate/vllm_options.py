# SPDX-License-Identifier: Apache-2.0
"""Write vllm_options.json of lmi_config/options: what the pinned vLLM's options take; and beside it
vllm_environment.json: which variables it reads.

Settings are checked without importing vLLM (that takes many seconds), so its option names and kinds
are kept as data. Run with the environment's Python whenever the pin moves; a test fails when the
file is stale.
"""

import argparse
import json
import re
from pathlib import Path

from serving.engine.versions import moved

PATH = Path(__file__).parent.parent.parent / "lmi_config" / "options" / "vllm_options.json"
ENVIRONMENT = PATH.with_name("vllm_environment.json")
_READ = re.compile(r"""environ(?:\.get|\.setdefault|\.pop)?[(\[]\s*["'](VLLM_[A-Z0-9_]+)["']""")


def kind(action: argparse.Action) -> str:
    """The kind of values that an option takes, found by offering it some."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean"
    if action.nargs == 0:
        return "switch"
    if action.nargs in ("+", "*"):
        return "list"
    if action.choices is not None:
        return "choice"

    def takes(value: str) -> bool:
        try:
            action.type(value) if callable(action.type) else None
        except Exception:  # whatever a foreign parser raises means that it refuses the value
            return False
        return True

    if takes("words"):
        return "text"
    if takes("{}"):
        return "json"
    if takes("1.5"):
        return "number"
    return "size" if takes("8k") else "integer"


def options() -> dict[str, dict[str, object]]:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.transformers_utils.chat_templates.registry import CHAT_TEMPLATES_DIR
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: dict[str, dict[str, object]] = {}
    for action in moved.cli_args().make_arg_parser(FlexibleArgumentParser())._actions:
        if not action.option_strings or action.dest == "help":
            continue
        found[action.dest] = {"kind": kind(action)}
        if found[action.dest]["kind"] == "choice":
            choices = [str(choice) for choice in action.choices or () if choice is not None]
            found[action.dest]["choices"] = sorted(choices)
        if short := [it for it in action.option_strings if not it.startswith("--")]:
            found[action.dest]["short"] = short[0]
    # A plugin can bring more, so these are no choices; files may have any name.
    found["tool_call_parser"]["known"] = sorted(ToolParserManager.list_registered())
    found["reasoning_parser"]["known"] = sorted(ReasoningParserManager.list_registered())
    found["chat_template"]["known"] = sorted(it.name for it in CHAT_TEMPLATES_DIR.glob("*.jinja"))
    return dict(sorted(found.items()))


def variables() -> list[str]:
    """The names of its variables: those that it declares, and those that it reads past that."""
    import vllm
    from vllm.envs import environment_variables

    found = {name for name in environment_variables if name.startswith("VLLM_")}
    for file in Path(vllm.__file__).parent.rglob("*.py"):
        found |= {*_READ.findall(file.read_text(errors="ignore"))}
    return sorted(found)


def text() -> str:
    rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in options().items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(text())
    ENVIRONMENT.write_text(json.dumps(variables(), indent=1) + "\n")
