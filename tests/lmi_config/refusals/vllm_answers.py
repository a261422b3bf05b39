# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.lmi_config.refusals.vllm_answers KEY...` prints what the installed vLLM, on
CPUs, answers to the situations of these rows, as JSON: key → its refusal, or null if it accepts the
options.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lmi_config.plan.vllm import arguments
from tests.lmi_config.refusals.situations import DRAFTS, MODELS, ROWS

# Otherwise, a new process imports vLLM to inspect each class of models.
registry._run_in_subprocess = lambda inspect: inspect()


class Parser(FlexibleArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> Any:
        raise ValueError(message)


PARSER = AsyncEngineArgs.add_cli_args(Parser())


def folder(within: str, name: str, config: dict[str, Any]) -> str:
    made = Path(within, name)
    made.mkdir()
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def answer(row: dict[str, Any]) -> str | None:
    with tempfile.TemporaryDirectory() as within:
        config = MODELS[row.get("model", "llama")] | row.get("config", {})
        model = folder(within, "model", config)
        draft = folder(within, "other", DRAFTS[row.get("draft", "llama")])
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row["options"].items()
        }
        if speculative := given.get("speculative_config"):
            named = {"model": draft} if speculative.get("model") else {}
            given["speculative_config"] = {**speculative, **named}
        kept = {"model": model, "load_format": "dummy", "skip_tokenizer_init": True, **given}
        before = dict(os.environ)
        os.environ.update(row.get("environ", {}))
        try:
            parsed = PARSER.parse_args(arguments(kept))
            AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            os.environ.clear()
            os.environ.update(before)
    return None


if __name__ == "__main__":
    # One option of vLLM's stays set in a default that all configurations share.
    keys = sorted(sys.argv[1:], key=lambda it: "routed_experts" in str(ROWS[it]["options"]))
    sys.stdout.write(json.dumps({key: answer(ROWS[key]) for key in keys}) + "\n")
