# SPDX-License-Identifier: Apache-2.0
"""Hostile requests to the real engine, and secure mode around it."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from lmi_config.options.declared import PICKLE_FILES, REMOTE_CODE, REQUIREMENTS, SCRIPTS, TEMPLATE
from serving.protocol import ENGINE_PATHS
from tests.e2e.conftest import ROOT, serving
from tests.support.models import tiny_lora

PROMPT = {"prompt": "An import", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

ROUTES = """
import json, warnings
warnings.simplefilter("ignore")
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
app = build_app(args, ("generate", "transcription", "embed", "score", "classify", "render"))

def routes(router, prefix=""):
    for route in router.routes:
        if hasattr(route, "methods"):
            yield from ((method, prefix + route.path) for method in route.methods or ())
        elif hasattr(route, "routes"):
            yield from routes(route, prefix + getattr(route, "path", ""))

print("ROUTES" + json.dumps(sorted(set(routes(app)))))
"""
OURS = {
    *(("POST", path) for path in ENGINE_PATHS),
    *(("GET", "/v1/models"), ("GET", "/kv_event_sources"), ("GET", "/metrics")),
    *(("HEAD", "/metrics"), ("POST", "/invocations"), ("GET", "/health"), ("HEAD", "/health")),
    *((method, "/ping") for method in ("GET", "POST", "HEAD")),
}
BY_METHOD = {"/adapters", "/adapters/{adapter_name}"}  # which are Slipway's own


def test_nothing_else_of_vllms_app_is_there(server):
    """Routes for administration and development, and all others that vLLM serves with every switch
    on.
    """
    environ = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    environ |= {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "VLLM_LOGGING_LEVEL": "ERROR"}
    ended = subprocess.run(
        [sys.executable, "-c", ROUTES],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "ROUTES[" in ended.stdout, ended.stderr
    found = {tuple(it) for it in json.loads(ended.stdout.split("ROUTES")[1])}
    assert {("POST", "/v1/load_lora_adapter"), ("POST", "/tokenize")} <= found
    assert len(found) > 30
    for method, path in sorted(found - OURS):
        if path not in BY_METHOD:
            status = server.client.request(method, path, json={}).status_code
            assert status == 404 or (status == 405 and method == "HEAD"), (method, path, status)


ELSEWHERE = "http://169.254.169.254/latest"
HOSTILE = [
    (CHAT | {"chat_template": "{{ 7 * 7 }}"}, "template"),
    (CHAT | {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "template"),
    (CHAT | {"mm_processor_kwargs": {"images": ELSEWHERE}}, "mm_processor_kwargs"),
    (CHAT | {"mm_processor_kwargs": {"size": 10**9}}, "mm_processor_kwargs"),
    (CHAT | {"media_io_kwargs": {"video": {"num_frames": 10**9}}}, "media_io_kwargs"),
    (PROMPT | {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    (PROMPT | {"vllm_xargs": {"kv_cache_report_mode": "full"}}, "vllm_xargs"),
    (
        PROMPT | {"prompt": None, "prompt_embeds": "gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOU"},
        "embeds",
    ),
    (PROMPT | {"n": 5000}, "n times the prompts"),
    (PROMPT | {"prompt": ["a"] * 5000}, "inputs"),
    (PROMPT | {"prompt": ["a"] * 1500}, "n times the prompts"),
    (PROMPT | {"logprobs": 5000}, "logprobs"),
    (PROMPT | {"prompt_logprobs": 5000}, "logprobs"),
    (PROMPT | {"logprobs": 5000, "logprob_token_ids": [*range(2000)]}, "logprob_token_ids"),
    (PROMPT | {"use_beam_search": True, "n": 500}, "logprobs"),
    (PROMPT | {"max_tokens": 10**9}, "max"),
    (PROMPT | {"min_tokens": 10**9}, "min_tokens"),
    (PROMPT | {"stop": ["x"] * 5000}, "stop"),
    (PROMPT | {"bad_words": [f"w{n}" for n in range(1000)]}, "bad"),
    (PROMPT | {"logit_bias": {str(n): 1 for n in range(100_000)}}, "logit_bias"),
    (PROMPT | {"allowed_token_ids": [*range(100_000)]}, "allowed_token_ids"),
    (PROMPT | {"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
]
DEEP: dict[str, object] = {"type": "string"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}


def of_properties(count):
    properties = {f"p{n}": {"type": "string"} for n in range(count)}
    return PROMPT | {"structured_outputs": {"json": {"type": "object", "properties": properties}}}


# These are answered or refused at once.
GRAMMARS = [
    PROMPT | {"response_format": SCHEMA},
    PROMPT | {"structured_outputs": {"regex": "((a+)+)+b" * 20}},
    PROMPT | {"structured_outputs": {"regex": "((a{0,200}){0,200}){0,200}"}},
    PROMPT | {"structured_outputs": {"grammar": 'root ::= ("a"{1,1000}){1,1000}'}},
    of_properties(400),
    # As many as the limit allows: the engine works on it for a minute.
    pytest.param(of_properties(1800), marks=pytest.mark.nightly),
    PROMPT | {"structured_outputs": {"choice": [f"word {n}" for n in range(4000)]}},
]


class Pings:
    """Asks /ping again and again, as SageMaker does. slowest: seconds."""

    def __init__(self, url: str) -> None:
        self.slowest = 0.0
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._over.wait(0.05):
                began = time.monotonic()
                assert client.get("/ping").status_code == 200
                self.slowest = max(self.slowest, time.monotonic() - began)

    def __enter__(self) -> "Pings":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize(("body", "names"), HOSTILE)
def test_hostile_requests_are_refused(server, body, names):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert names in answer.json()["error"]["message"]
    assert server.invoke({"inputs": "next"}).status_code == 200


@pytest.mark.parametrize("body", GRAMMARS)
def test_costly_grammars_hold_nobody_up(server, body):
    with Pings(server.url) as pings:
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text[:500]
        assert server.invoke({"inputs": "next"}).status_code == 200
    assert pings.slowest < 2  # what SageMaker allows it


def test_errors_have_no_stack(server):
    for path in ("/invocations", "/v1/completions"):
        for body in (b'{"prompt": {"a": 1}}', b'{"prompt": "x", "stop": 1}', b'{"prompt": [[]]}'):
            headers = {"content-type": "application/json"}
            answer = server.client.post(path, content=body, headers=headers)
            assert answer.status_code in (400, 424)
            assert "Traceback" not in answer.text
            assert "/site-packages/" not in answer.text
            assert 'File "' not in answer.text


@pytest.fixture(scope="module")
def secured(tiny_options, tmp_path_factory):
    """The tiny model in an untrusted channel under all controls, with code that must not run."""
    folder = tmp_path_factory.mktemp("secured")
    model = shutil.copytree(tiny_options["OPTION_MODEL_ID"], folder / "model")
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    (model / "serving.properties").write_text("option.async_mode=true\noption.enable_lora=true\n")
    tiny_lora.write(folder / "adapters" / "one", 1)
    environ = {
        **tiny_options,
        "OPTION_MODEL_ID": str(model),
        "OPTION_ADAPTER_ROOTS": str(folder / "adapters"),
        "SERVING_DOWNLOAD_DIR": str(folder / "store"),
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": ",".join(
            (REQUIREMENTS, PICKLE_FILES, REMOTE_CODE, SCRIPTS, TEMPLATE)
        ),
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(model),
    }
    with serving(folder / "log", **environ) as it:
        it.ready()
        yield it, folder


def test_what_is_usual_is_served_in_secure_mode(secured):
    served, folder = secured
    assert served.invoke({"inputs": "An import"}).status_code == 200
    assert not (folder / "ran").exists()
    adapter = folder / "adapters" / "one"
    parameters = {"name": "one", "src": str(adapter)}
    (adapter / "chat_template.jinja").touch()
    answer = served.client.post("/adapters", params=parameters)
    assert answer.status_code == 400
    assert f"{adapter}/chat_template.jinja: {TEMPLATE} forbids" in answer.json()["message"]
    (adapter / "chat_template.jinja").unlink()
    assert served.client.post("/adapters", params=parameters).status_code == 200
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "one"}
    assert served.invoke({"inputs": "An import"}, **header).status_code == 200
    answer = served.invoke({"messages": [{"role": "user", "content": "Hello"}]})
    assert "template" in answer.json()["error"]


def test_it_is_reached_from_this_machine_alone(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)
