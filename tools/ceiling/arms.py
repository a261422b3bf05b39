# SPDX-License-Identifier: Apache-2.0
"""The servers over an engine without a model, and their requests."""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.harness import stub_replica
from tests.support.harness.process import ROOT, SERVE, Program
from tests.support.models import formatter, tiny
from tools.bench.overhead import plain_vllm, planned

PLAIN, SLIPWAY, FORMATTER, BEFORE = "plain", "slipway", "formatter", "before"
PLAIN_TWICE, RUST = "plain-twice", "rust"
KEYS, STATISTICS, TRACED = "keys", "statistics", "traced"
"""The servers. The last two keep vLLM's statistics, which traces need."""
CHAT, COMPLETIONS, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/invocations"
PROMPT = "The import statement is"
SEQUENCES = 1024
KEY = "the-key-of-the-benchmark"
AMPLE = 10**9
"""A limit that is counted and never reached."""


def completion(tokens: int, stream: bool) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": True} if stream else body


def chat(tokens: int, stream: bool) -> dict[str, Any]:
    body = completion(tokens, stream)
    del body["prompt"]
    return body | {"messages": [{"role": "user", "content": PROMPT}]}


def logprobs(tokens: int, stream: bool) -> dict[str, Any]:
    return completion(tokens, stream) | {"logprobs": 0, "return_token_ids": True}


def lmi(tokens: int, stream: bool) -> dict[str, Any]:
    parameters = {"max_new_tokens": tokens, "do_sample": False, "ignore_eos_token": True}
    body: dict[str, Any] = {"inputs": PROMPT, "parameters": parameters}
    return body | {"stream": True} if stream else body


class Arm(NamedTuple):
    """base: the arm that it is compared with. key: what its requests have; "" is none."""

    name: str
    server: str
    path: str
    body: Callable[[int, bool], dict[str, Any]]
    base: str
    key: str = ""


VLLM, VLLM_CHAT, VLLM_LOGPROBS = "plain vLLM", "plain vLLM, chat", "plain vLLM, logprobs"
ARMS = (
    Arm(VLLM, PLAIN, COMPLETIONS, completion, VLLM),
    Arm(VLLM_CHAT, PLAIN, CHAT, chat, VLLM_CHAT),
    Arm(VLLM_LOGPROBS, PLAIN, COMPLETIONS, logprobs, VLLM),
    Arm("plain vLLM, 2 processes", PLAIN_TWICE, COMPLETIONS, completion, VLLM),
    Arm("/v1/completions", SLIPWAY, COMPLETIONS, completion, VLLM),
    Arm("/v1/chat/completions", SLIPWAY, CHAT, chat, VLLM_CHAT),
    Arm("/v1/completions, logprobs", SLIPWAY, COMPLETIONS, logprobs, VLLM_LOGPROBS),
    Arm("/invocations, OpenAI body", SLIPWAY, INVOCATIONS, completion, VLLM),
    Arm("/invocations, LMI body", SLIPWAY, INVOCATIONS, lmi, VLLM),
    Arm("/invocations, formatter", FORMATTER, INVOCATIONS, completion, VLLM),
    Arm("/v1/completions, statistics", STATISTICS, COMPLETIONS, completion, VLLM),
    Arm(
        *("/v1/completions, traces", TRACED, COMPLETIONS, completion, "/v1/completions, statistics")
    ),
    Arm("/v1/completions, key with limits", KEYS, COMPLETIONS, completion, "/v1/completions", KEY),
)


RUST_ARMS = (
    Arm("vLLM in Rust", RUST, COMPLETIONS, completion, VLLM),
    Arm("vLLM in Rust, chat", RUST, CHAT, chat, VLLM_CHAT),
    Arm("vLLM in Rust, logprobs", RUST, COMPLETIONS, logprobs, VLLM_LOGPROBS),
)


def rust(asked: Path | None) -> Path | None:
    """Return the program of vLLM's front end in Rust: the asked one, or else that of the installed
    vLLM, or None if that has none. Exits if the asked one cannot be run.
    """
    if asked:
        if not os.access(asked, os.X_OK) or asked.is_dir():
            sys.exit(f"--rust={asked}: there is no such program")
        return asked
    vllm = importlib.util.find_spec("vllm")
    found = Path(vllm.origin).with_name("vllm-rs") if vllm and vllm.origin else None
    return found if found and found.exists() else None


def again(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """The same, of another checkout."""
    ours = [arm for arm in arms if arm.server == SLIPWAY]
    return tuple(arm._replace(name=f"before: {arm.name}", server=BEFORE) for arm in ours)


def keys_file(path: Path) -> Path:
    """One key, whose requests, tokens and requests at once are all counted."""
    limits = dict.fromkeys(
        ("requests_per_minute", "tokens_per_minute", "concurrent_requests"), AMPLE
    )
    row = {"name": "benchmark", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), **limits}
    path.write_text(json.dumps({"keys": [row]}))
    return path


def servers(
    stack: ExitStack,
    folder: Path,
    names: set[str],
    before: Path | None,
    more: Mapping[str, str] = MappingProxyType({}),
    front_end: Path | None = None,
) -> dict[str, Program]:
    """The arms of these names, started together. more: options that all of them have besides.
    front_end: vLLM's front end in Rust.
    """
    model = str(tiny.make())
    asked = {
        "OPTION_MODEL_ID": model,
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_MAX_NUM_SEQS": str(SEQUENCES),
        "OPTION_KV_CACHE_MEMORY_BYTES": "512M",
        "OPTION_DISABLE_LOG_STATS": "true",
        "OPTION_LOG_LEVEL": "warning",
        "OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "tools.ceiling.engine.NoModel",
        "PYTHONPATH": str(ROOT),
        **more,
    }

    def start(name: str) -> Program:
        log = folder / name
        if name in (PLAIN, PLAIN_TWICE, RUST):
            quiet = "--disable-uvicorn-access-log"
            count = 2 if name == PLAIN_TWICE else 1
            plan = planned(asked)
            program = front_end if name == RUST else None
            return plain_vllm(
                plan, model, quiet, log=log, environ=asked, processes=count, rust=program
            )
        if name == FORMATTER:
            formatted = folder / "model"
            if not formatted.exists():
                shutil.copytree(model, formatted)
                formatter.write(formatted)
            return Program(*SERVE, environ=asked | {"OPTION_MODEL_ID": str(formatted)}, log=log)
        if name in (STATISTICS, TRACED):
            kept = {key: value for key, value in asked.items() if not key.endswith("LOG_STATS")}
            return Program(*SERVE, environ=kept | (collector if name == TRACED else {}), log=log)
        if name == KEYS:
            limited = asked | {"OPTION_API_KEYS_FILE": str(keys_file(folder / "keys.json"))}
            return Program(*SERVE, environ=limited, log=log)
        root = before.resolve() if before and name == BEFORE else ROOT
        return Program(*SERVE, environ=asked, log=log, root=root)

    collector: dict[str, str] = {}
    if TRACED in names:
        stub = Program(sys.executable, stub_replica.__file__, "{port}", log=folder / "collector")
        stack.enter_context(stub).ready()
        collector = stub_replica.collects(stub.url)
    found = {name: stack.enter_context(start(name)) for name in sorted(names)}
    for server in found.values():
        server.ready()
    return found
