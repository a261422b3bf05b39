# SPDX-License-Identifier: Apache-2.0
"""vLLM without Slipway, which the benchmarks measure against."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lmi_config.plan import vllm
from lmi_config.plan.plan import Plan
from scripts.harness.process import NOTHING, Program
from serving.server.prepare import prepare


def planned(environ: Mapping[str, str]) -> Plan:
    """What Slipway decides with these options."""
    return prepare({**os.environ, **environ}).plan


def plain_vllm(
    plan: Plan,
    model: str,
    *more: str,
    log: Path,
    environ: Mapping[str, str] = NOTHING,
    processes: int = 1,
) -> Program:
    """It, with the arguments and the environment that Slipway gives it in this plan, and more.
    processes: that answer requests, in front of one engine.
    """
    module = ["vllm.entrypoints.openai.api_server"]
    if processes > 1:
        module = ["vllm.entrypoints.cli.main", "serve", f"--api-server-count={processes}"]
    return Program(
        *(sys.executable, "-m", *module, "--port={port}"),
        *vllm.arguments(plan.engine(model, None)),
        *more,
        environ={**plan.environment, **environ},
        log=log,
    )
