# SPDX-License-Identifier: Apache-2.0
"""The end of the process: its exit code, and a last line with the reason and a fix. The line is
short enough for SageMaker's failure reason. It is also written to the file that Kubernetes reads.
"""

import contextlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lmi_config.facts.machine import out_of_memory_kills
from lmi_config.options.settings import SettingsError
from serving.observability.logs import JsonFormatter, make_record
from serving.observability.redaction import redacted

log = logging.getLogger(__name__)

DIED = 1
"""The exit code of a server that became ready and then failed, and of errors of Slipway itself."""
USAGE_ERROR = 2
"""The exit code of a wrong call: a wrong verb or option, or a model that cannot be served."""
START_FAILED = 3
"""The exit code of a server that never became ready."""

MAX_LINE = 900
"""Most characters of the last line."""
TERMINATION_LOG = Path("/dev/termination-log")
"""The file whose content `kubectl describe pod` shows. It only exists on Kubernetes."""


class Exit(NamedTuple):
    """The end of the process."""

    code: int
    """The exit code; 0 after a signal to stop."""
    stage: str
    """The stage: options, start, serving, draining, routing or unforeseen."""
    reason: str = ""
    """Why it failed, in a sentence."""


_MEMORY = (
    "give the container more memory, or lower OPTION_KV_CACHE_MEMORY_BYTES, OPTION_MAX_MODEL_LEN "
    "or the KV cache tiers"
)
_OWN_DEVICE = (
    r"CUDA error(?!: out of memory)|CUDA-capable device|uncorrectable ECC|GPU is lost"
    r"|CUDA driver initialization failed|unexpected error from cuda"
)
"""The errors of CUDA about a device. Too little memory is the fault of the options, and so is not
among them.
"""
_REMEDIES = tuple(
    (re.compile(pattern, re.IGNORECASE), remedy)
    for pattern, remedy in (
        (r"cannot listen.*assign", "set OPTION_HOST to an address of this machine, or 0.0.0.0"),
        (r"cannot listen on port", "end the program that listens there, or set OPTION_PORT"),
        (
            r"does not fit (?:vLLM|LMCache|uvicorn|Starlette|OpenTelemetry|pydantic)",
            "install versions that docs/explanation/patches.md lists, or use Slipway's image",
        ),
        (r"OPTION_MODEL_LOADING_TIMEOUT", "raise it, or use a model that loads faster"),
        (
            r"/dev/shm|shm_open|shared memory|bus error|(?:exit code:?|':) -7\b",
            "give the container more shared memory: docker run --shm-size=2g, or in Kubernetes an "
            "emptyDir with medium Memory at /dev/shm",
        ),
        (
            r"no space left on device|disk quota exceeded",
            "use a larger volume, or set SERVING_DOWNLOAD_DIR (S3) or HF_HOME (hub) to one",
        ),
        (
            r"KV cache.*larger than the available|max seq len|to serve at least one request",
            "lower OPTION_MAX_MODEL_LEN, or give the KV cache more memory: "
            "OPTION_KV_CACHE_MEMORY_BYTES, or on a GPU OPTION_GPU_MEMORY_UTILIZATION",
        ),
        (
            r"has no attribute 'image_token_index'|target model does not have 'model' attribute",
            "leave the draft out: vLLM does not run this vision model with one",
        ),
        (
            r"max_model_len .* is greater than",
            "lower OPTION_MAX_MODEL_LEN to the model's own length",
        ),
        (
            r"free memory on device .* is less than desired",
            "end other programs that use the GPU, or lower OPTION_GPU_MEMORY_UTILIZATION",
        ),
        (
            r"CUDA out of memory|OutOfMemoryError|no available memory for the cache",
            "use more GPUs (OPTION_TENSOR_PARALLEL_DEGREE) or larger ones, a quantised model, or a "
            "lower OPTION_MAX_MODEL_LEN",
        ),
        (r"out of memory|(?:exit code:?|':) -9\b|cannot allocate memory|MemoryError", _MEMORY),
        # vLLM does not always know the code of a worker that was killed.
        (r"can't allocate memory|not enough memory|worker proc \S+ died", _MEMORY),
        (
            r"\bgated|unauthorized|forbidden|\b40[13]\b|access to model",
            "accept the model's terms on the hub, and set HF_TOKEN to a token that may read it",
        ),
        (
            r"trust_remote_code|contains custom code",
            "set OPTION_TRUST_REMOTE_CODE=true, if you trust the model's code",
        ),
        (
            r"does not support LoRA",
            "leave OPTION_ENABLE_LORA out: vLLM has no adapters for models like this one",
        ),
        (
            r"architectures? .*not supported|no vLLM implementation"
            r"|does not recognize this architecture",
            "use a model that vLLM supports: docs.vllm.ai lists them",
        ),
        (
            r"driver version is insufficient|no CUDA-capable|found no NVIDIA driver|CUDA error 803"
            r"|no GPU is visible|older than CUDA",
            "give the container its GPUs (docker run --gpus all) and the host a driver for the "
            "image's CUDA; on SageMaker InferenceAmiVersion chooses it",
        ),
        (
            r"\bNCCL\b|ProcessGroup",
            "check that the GPUs reach each other and that /dev/shm is large enough; "
            "NCCL_DEBUG=INFO tells more",
        ),
        (
            _OWN_DEVICE,
            "use another machine, or leave the GPU out with CUDA_VISIBLE_DEVICES; `nvidia-smi -q` "
            "and the host's kernel log tell more",
        ),
        (
            r"failed to be inspected|No module named 'torchvision'",
            "see the lines above; if they name torchvision, which the engine for CPUs lacks, "
            "serve the model on a GPU",
        ),
        (
            r"ModuleNotFoundError|ImportError|undefined symbol",
            "use the unchanged image; the reason names the missing part of this installation",
        ),
        (
            r"no such (?:file|folder)|FileNotFoundError|not found|there is no|there are no",
            "check that the name is right and that the model is complete",
        ),
    )
)


_WANTED = re.compile(
    r"CUDA out of memory.*allocate ([\d.]+) ([MG])iB.*total capacity of ([\d.]+) GiB", re.DOTALL
)
"""torch's message for an allocation that failed: the wanted memory, and the GPU's whole memory."""


def of_its_device(reason: str) -> bool:
    """Whether an engine ended because of its GPU, so that others with the same options may work."""
    return bool(re.search(_OWN_DEVICE, reason, re.IGNORECASE))


def remedy(reason: str, stage: str = "") -> str:
    """Return a fix that is likely to help."""
    if stage == "serving" and (found := _WANTED.search(reason)):
        wanted = float(found[1]) / (1024 if found[2] == "M" else 1)
        share = math.ceil(100 * wanted / float(found[3])) / 100
        return (
            f"lower OPTION_GPU_MEMORY_UTILIZATION by {share:.2f}, so that the KV cache leaves what "
            "this step wanted, or OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS, so that it wants less"
        )
    for pattern, helps in _REMEDIES:
        if pattern.search(reason):
            return helps
    if stage == "options":
        return "correct the option; docs/reference/options.md has them all"
    return "see the lines above"


_VAGUE = re.compile(
    r"engine core initialization failed|see (?:stack trace for )?root cause|EngineCore failed"
    r"|EngineDeadError|WorkerProc (?:initialization )?failed|^(?:SystemExit|KeyboardInterrupt)"
    r"|encountered an issue|Executor failed|an engine process ended unexpectedly$"
    r"|^Dumping (?:input data|scheduler)",  # the whole configuration, with words of many remedies
    re.IGNORECASE,
)


def root_cause(reason: str, causes: Sequence[str]) -> str:
    """Return the reason. If it is vague, return the first of the causes that is not."""
    if not _VAGUE.search(reason):
        return reason
    return next((cause for cause in causes if not _VAGUE.search(cause)), reason)


def memory_ran_out(before: int | None) -> str:
    """Return an addition to the reason if the kernel's out-of-memory killer ran, or "".

    before: the number of its kills at the start, or None if it cannot be known.
    """
    now = out_of_memory_kills()
    if before is None or now is None or now <= before:
        return ""
    return "; the container ran out of memory, and the kernel killed a process in it"


def failure(error: Exception) -> Exit:
    """Return the end of the process after an exception, and log the details that the last line has
    no room for.
    """
    if isinstance(error, SettingsError):
        if len(error.faults) > 1:
            for fault in error.faults:
                log.error("%s", fault)
        return Exit(USAGE_ERROR, "options", "; ".join(error.faults))
    log.error("an error of Slipway itself", exc_info=error)
    return Exit(DIED, "unforeseen", f"{type(error).__name__}: {error}")


def report(end: Exit) -> None:
    """Write the last line: "failed" with stage, reason and fix, or "stopped" with the stage."""
    if not end.code:
        log.info("stopped", extra={"facts": {"stage": end.stage}, "text": "stopped", "busy": False})
        return
    reason = redacted(" ".join(end.reason.split()))
    facts = {"stage": end.stage, "reason": reason, "fix": remedy(reason, end.stage)}
    while (excess := len(_line(facts)) - MAX_LINE) > 0:
        # JSON writes some characters as twelve.
        reason = facts["reason"] = reason[: -max(excess // 12, 1) - 3] + "..."
    fix = f"\nwhat helps: {facts['fix']}" if facts["fix"] else ""
    log.error("failed", extra={"facts": facts, "text": reason + fix, "busy": False})
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(_line(facts) + "\n")


def _line(facts: Mapping[str, str]) -> str:
    values = {"name": log.name, "msg": "failed", "facts": facts}
    return JsonFormatter().format(make_record(logging.ERROR, values))
