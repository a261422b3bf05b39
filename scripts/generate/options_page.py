# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/options.md from lmi_config's declarations, or check that it is fresh."""

import json
from collections.abc import Iterator

from lmi_config.options.declared import OPTIONS, VLLM_UNTRUSTED, Section, sections, vllm_options
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from scripts.generate.files import ROOT, written

MIB = 1024**2
PATH = ROOT / "docs" / "reference" / "options.md"

INTRODUCTION = """\
# Options

<!-- Written by scripts/generate/options_page.py from lmi_config; do not edit. -->

Options are environment variables, or arguments of `serve`, `plan`, `tune` and `route`, as in vLLM:
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
A switch of vLLM's is on by an empty `SM_VLLM_<NAME>`, as in AWS's vLLM container.

`OPTION_` names are in capitals, or exactly as LMI spells them (`OPTION_max_model_len`,
`OPTION_entryPoint`); `SM_VLLM_<NAME>` also stands for each `OPTION_<NAME>`, in any case.

**What would silently serve something else than asked is refused; what only does nothing is noted.**
Values that cannot be read, names that disagree and unknown names, as far as `OPTION_STRICT` refuses
them, stop the start, all reported at once. `scripts/plan` shows every option that is set and where
it was given.
"""

UNTRUSTED = """\

An option file in an untrusted channel may name a model and a draft that are in one, and set
"""

VLLM = """\

## vLLM's own options

Every other option of vLLM's works by its own name, as `OPTION_<NAME>` or `SM_VLLM_<NAME>`; switches
take `true` and `false`, lists are JSON or have commas:
"""

REFUSED_INTRODUCTION = """\

These are refused:
"""

REMOVED_INTRODUCTION = """\

## Names that were removed

Options of LMI's and of older versions of vLLM are accepted, each with a warning that says what to
do instead:
"""

UNUSED_INTRODUCTION = """\

## Names that do nothing

LMI's options that mean nothing here are accepted, with one warning at the start:
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def default(value: object) -> str:
    """A default as an operator would write it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    shown = f"`{json.dumps(value) if isinstance(value, bool) else value}`"
    if isinstance(value, int) and value >= MIB:
        for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("GB", 10**9)):
            if value % size == 0:
                return f"{shown} ({value // size} {unit})"
    return shown


def lines() -> Iterator[str]:
    yield INTRODUCTION
    for section, options in sections().items():
        yield f"\n## {section.value}\n\n| option | default | |\n|---|---|---|\n"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.all_names)
            passed = f" (vLLM: `{option.vllm}`)" if option.vllm else ""
            unset = option.default_text or default(option.default)
            yield f"| {names}{passed} | {cell(unset)} | {cell(option.help)} |\n"
        if section is Section.SECURE:
            allowed = {it.name for it in OPTIONS.values() if it.untrusted}
            allowed |= {f"OPTION_{name.upper()}" for name in VLLM_UNTRUSTED}
            yield UNTRUSTED + ", ".join(f"`{name}`" for name in sorted(allowed)) + ".\n"
    yield VLLM
    yield "\n" + ", ".join(f"`{name}`" for name in sorted(vllm_options())) + ".\n"
    for introduction, table, about in (
        (REFUSED_INTRODUCTION, REFUSED, "why"),
        (REMOVED_INTRODUCTION, REMOVED, "instead"),
        (UNUSED_INTRODUCTION, UNUSED, "why"),
    ):
        yield introduction + f"\n| name | {about} |\n|---|---|\n"
        reasons: dict[str, list[str]] = {}
        for name, why in table.items():
            reasons.setdefault(why, []).append(f"`{name}`")
        for why, found in reasons.items():
            yield f"| {', '.join(found)} | {cell(why)} |\n"


def main(*, check: bool) -> int:
    return written({PATH: "".join(lines()).encode()}, check=check)
