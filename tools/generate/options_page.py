# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference/options.md from lmi_config's declarations, or check that it is fresh."""

import json
from collections.abc import Iterator

from lmi_config.options.declared import OPTIONS, VLLM_UNTRUSTED, Section, sections, vllm_options
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from tools.generate.files import ROOT, written

MIB = 1024**2
PATH = ROOT / "docs" / "reference" / "options.md"

INTRODUCTION = """\
# Options

<!-- Written by tools/generate/options_page.py from lmi_config; do not edit. -->

Options are environment variables, or arguments of `serve`, `plan`, `tune` and `route`, as in vLLM:
`OPTION_MAX_MODEL_LEN=8k` is `--max-model-len 8k`, and `SERVING_JOB_QUEUE_SIZE=9` is
`--job-queue-size 9`. The model needs no flag: `serve Qwen/Qwen3-0.6B`. Switches need no value:
`--enable-lora`, `--no-enable-prefix-caching`.

Files in the model's folder, or in `/opt/ml/model` (`SERVING_MODEL_STORE`), can also set options:

- `serving.properties`, as in LMI: `option.max_model_len=8192` is `OPTION_MAX_MODEL_LEN`, and
  `job_queue_size=100` is `SERVING_JOB_QUEUE_SIZE`.
- `slipway.yaml`, or the file in `OPTION_CONFIG_FILE`: `max_model_len: 8192`. Values may be mappings
  and lists, and longer than SageMaker's limit of 1,024 bytes for a variable.

If several places set an option, the first of these counts: arguments, `SAGEMAKER_*` variables,
YAML, `serving.properties`, `HF_*`, `OPTION_*`, the other names in its row from left to right, the
default. `OPTION_<NAME>` and `SM_VLLM_<NAME>`, with the vLLM name in the row, are further names;
their values must agree with the rest. Empty variables count as not set, except that an empty
`SM_VLLM_<NAME>` enables a switch of vLLM's, as in AWS's vLLM container.

`OPTION_` names are in capitals, or exactly as LMI spells them (`OPTION_max_model_len`,
`OPTION_entryPoint`). `SM_VLLM_<NAME>` also works for each `OPTION_<NAME>`, in any case.

**Slipway refuses an option if ignoring it would change the answers, and only logs a note if
ignoring it changes nothing.** The start stops, with all faults at once, for invalid values, values
that disagree, and the unknown names that `OPTION_STRICT` refuses. `scripts/plan` shows every option
that is set, and the place that set it.
"""

UNTRUSTED = """\

An option file in an untrusted channel may name a model and a draft in an untrusted channel, and set
"""

VLLM = """\

## vLLM's own options

Every other vLLM option works under its own name, as `OPTION_<NAME>` or `SM_VLLM_<NAME>`. Switches
take `true` and `false`; lists are JSON or comma-separated:
"""

REFUSED_INTRODUCTION = """\

These are refused:
"""

REMOVED_INTRODUCTION = """\

## Names that were removed

Slipway accepts options of LMI and of older versions of vLLM, each with a warning that names the
alternative:
"""

UNUSED_INTRODUCTION = """\

## Names without effect

Slipway accepts LMI's options that have no effect here, with one warning at the start:
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
