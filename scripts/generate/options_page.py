"""Write docs/reference/options.md from lmi_config's declarations; a test fails when it is stale."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATH = ROOT / "docs" / "reference" / "options.md"

INTRODUCTION = """\
# Options

<!-- Written by scripts/generate/options_page.py from lmi_config; do not edit. -->

Options are environment variables, or arguments of `serve`, `plan` and `route`, as in vLLM:
`OPTION_MAX_MODEL_LEN=8k` is `--max-model-len 8k`, `SERVING_JOB_QUEUE_SIZE=9` is
`--job-queue-size 9`, and the model may stand without a flag: `serve Qwen/Qwen3-0.6B`. Options that
are on or off need no value: `--enable-lora`, `--no-enable-prefix-caching`.

Each can also stand in a file in the model's folder, or in `/opt/ml/model` (`SERVING_MODEL_STORE`):

- `serving.properties`, as LMI has it: `option.max_model_len=8192` is `OPTION_MAX_MODEL_LEN`, and
  `job_queue_size=100` is `SERVING_JOB_QUEUE_SIZE`.
- `slipway.yaml`, or the file that `OPTION_CONFIG_FILE` names: `max_model_len: 8192`. Values may be
  mappings and lists, and longer than the 1,024 bytes that SageMaker allows a variable.

Where an option is given several times, this counts, first to last: arguments, `SAGEMAKER_*`
variables, YAML, `serving.properties`, `HF_*`, `OPTION_*`, the other names in their row from left to
right, the default. `OPTION_<NAME>` and `SM_VLLM_<NAME>`, with the name of the vLLM option that is
shown, are further names; what they say must agree with the rest. Empty variables count as not set.

Values that cannot be read, names that disagree and unknown names stop the start, all told at once.
`scripts/plan` shows every option that is set and where it was given.
"""

VLLM = """\

## vLLM's own options

Every other option of vLLM's works by its own name, as `OPTION_<NAME>` or `SM_VLLM_<NAME>`; switches
take `true` and `false`, lists are JSON or have commas:
"""

REFUSED_INTRODUCTION = """\

These are refused:
"""

UNUSED_INTRODUCTION = """\

## Names that do nothing

LMI's options that mean nothing here are accepted, with one warning at the start:
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def default(value: object, otherwise: str | None) -> str:
    if otherwise:
        return otherwise
    if value is None:
        return "none"
    return f"`{json.dumps(value) if isinstance(value, bool) else value}`"


def lines() -> Iterator[str]:
    from lmi_config.options.declared import OPTIONS, vllm_options
    from lmi_config.options.ignored import REFUSED, UNUSED

    yield INTRODUCTION
    for option in OPTIONS.values():
        if option.heading:
            yield f"\n## {option.heading}\n\n| option | default | |\n|---|---|---|\n"
        names = ", ".join(f"`{name}`" for name in (*option.names, *option.others))
        passed = f" (vLLM: `{option.vllm}`)" if option.vllm else ""
        told = default(option.default, option.otherwise)
        yield f"| {names}{passed} | {cell(told)} | {cell(option.help)} |\n"
    yield VLLM
    yield "\n" + ", ".join(f"`{name}`" for name in sorted(vllm_options())) + ".\n"
    for introduction, table in ((REFUSED_INTRODUCTION, REFUSED), (UNUSED_INTRODUCTION, UNUSED)):
        yield introduction + "\n| name | why |\n|---|---|\n"
        reasons: dict[str, list[str]] = {}
        for name, why in table.items():
            reasons.setdefault(why, []).append(f"`{name}`")
        for why, found in reasons.items():
            yield f"| {', '.join(found)} | {cell(why)} |\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PATH.write_text("".join(lines()))
