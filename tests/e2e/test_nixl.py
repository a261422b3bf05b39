# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on separate servers without a store: of two real engines, one fetches by NIXL
the KV that the other has computed. Without a GPU it goes from memory to memory.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.e2e.conftest import Served, serving
from tests.e2e.test_prefill import GREEDY, LEAST, ask, handed_over, prompt
from tests.serving.access.test_access import ADMIN, SECRET, bearer
from tests.support.harness import metrics, ports
from tests.support.harness.wait import until
from tests.support.models import tiny_lora

CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": 60},  # for busy machines
}
FETCHED = 400
"""The minimum of a prompt()'s tokens that are fetched."""
USAGE = "vllm:kv_cache_usage_perc"
SOURCES = "vllm:prompt_tokens_by_source_total"


class Fleet:
    """One server of each role, and the router."""

    def __init__(self, stack: ExitStack, folder, options) -> None:
        self._stack, self.folder, self._options = stack, folder, options
        self.replicas = folder / "replicas"
        self.prefills, self.decodes = self.start("prefill"), self.start("decode")
        self.prefills.ready()
        self.decodes.ready()
        self.list_both()
        for served in (self.prefills, self.decodes):
            # The first chat and the first adapter may take longer than KV is kept for.
            ask(served, "Hi", "/v1/chat/completions")
            source = {"name": "one", "src": str(folder / "adapters" / "one")}
            assert served.client.post("/adapters", params=source).status_code == 200
            for tenant in ({}, {"x-tenant": "a"}):
                ask(served, "Hi", **{"x-amzn-sagemaker-adapter-identifier": "one"}, **tenant)
        self.routed = stack.enter_context(
            serving(
                folder / "route",
                *("./entrypoint.sh", "route"),
                OPTION_ROUTER_REPLICAS=f"file://{self.replicas}",
                OPTION_ROUTER_PREFILL_TOKENS=LEAST,
                OPTION_ROUTER_SECRET=SECRET,
                OPTION_CACHE_SALT_HEADER="X-Tenant",
            )
        )
        self.routed.ready()
        self.both_ready()

    def start(self, role: str) -> Served:
        log = self.folder / f"{role}-{ports.free()}"
        served = self._stack.enter_context(
            serving(
                log,
                **self._options,
                OPTION_SERVER_ROLE=role,
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(ports.free()),
            )
        )
        served.client.headers.update(bearer(ADMIN))
        return served

    def list_both(self) -> None:
        self.replicas.write_text(f"{self.prefills.url}\n{self.decodes.url}")

    def both_ready(self) -> None:
        until(lambda: self.routed.total("slipway_router_replica_ready") == 2)

    def adapters(self) -> list[int]:
        """How many adapters the router knows of each server."""
        rows = self.routed.client.get("/replicas").json()["replicas"]
        return [row["adapters"] for row in rows]

    def handed_over(self) -> float:
        return handed_over(self.routed)

    def fetched(self) -> float:
        """Tokens that the decoding server has fetched."""
        self.decodes.counted()
        found = metrics.samples(self.decodes.client.get("/metrics").text, SOURCES)
        return sum(it.value for it in found if it.labels["source"] == "external_kv_transfer")


@pytest.fixture(scope="module")
def fleet(tiny_options, tmp_path_factory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("nixl")
    for number, name in enumerate(("one", "two"), 1):
        tiny_lora.write(folder / "adapters" / name, number)
    with ExitStack() as stack:
        options = {
            **tiny_options,
            "OPTION_DTYPE": "float32",  # in 16 bits, how a prompt is split decides near ties
            "OPTION_KV_TRANSFER_CONFIG": json.dumps(CONNECTOR),
            "OPTION_CACHE_SALT_HEADER": "X-Tenant",
            "OPTION_ROUTER_SECRET": SECRET,
            "OPTION_ADMIN_API_KEY": ADMIN,
            "OPTION_ENABLE_LORA": "true",
            "OPTION_ADAPTER_ROOTS": str(folder / "adapters"),
        }
        yield Fleet(stack, folder, options)


def test_an_answer_is_that_of_one_server_and_its_prompt_is_fetched(fleet):
    """In every API, with tenants and adapters. The prefilling server's own answer is also
    compared.
    """
    asked = [
        ("/v1/completions", {}),
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"x-tenant": "a"}),
        ("/v1/completions", {"x-amzn-sagemaker-adapter-identifier": "one"}),
    ]
    texts = set()
    for path, headers in asked:
        before, fetched = fleet.handed_over(), fleet.fetched()
        text, _ = ask(fleet.routed, prompt("equal"), path, **headers)
        assert fleet.handed_over() == before + 1
        assert fleet.fetched() > fetched + FETCHED, fleet.decodes.log.read_text()[-5000:]
        assert ask(fleet.prefills, prompt("equal"), path, **headers)[0] == text
        texts.add(text)
    assert len(texts) > 1
    fetched = fleet.fetched()
    said = [{"role": "user", "content": prompt("a message")}]
    message = {"model": "lmi", "max_tokens": 24, "temperature": 0, "messages": said}
    first, second = (
        served.client.post("/v1/messages", json=message, timeout=120).json()
        for served in (fleet.routed, fleet.prefills)
    )
    assert first["content"] == second["content"]
    assert not first.get("kv_transfer_params")
    assert fleet.fetched() > fetched + FETCHED
    fetched = fleet.fetched()
    body = {"inputs": prompt("streamed"), "parameters": GREEDY, "stream": True}
    lines = fleet.routed.lines(body)
    (answer,) = fleet.prefills.lines({**body, "stream": False})
    assert "".join(it["token"]["text"] for it in lines) == answer["generated_text"]
    assert fleet.fetched() > fetched + FETCHED


def test_kv_of_another_adapter_with_the_same_name_is_not_fetched(fleet):
    known = fleet.adapters()
    for served, files in ((fleet.prefills, "one"), (fleet.decodes, "two")):
        source = {"name": "named", "src": str(fleet.folder / "adapters" / files)}
        assert served.client.post("/adapters", params=source).status_code == 200
    until(lambda: all(now > then for now, then in zip(fleet.adapters(), known, strict=True)))
    headers = {"x-amzn-sagemaker-adapter-identifier": "named"}
    before, fetched = fleet.handed_over(), fleet.fetched()
    text, _ = ask(fleet.routed, prompt("named"), **headers)
    assert (fleet.handed_over(), fleet.fetched()) == (before + 1, fetched)
    assert ask(fleet.decodes, prompt("named"), **headers)[0] == text
    assert ask(fleet.prefills, prompt("named"), **headers)[0] != text


def test_several_sequences_are_computed_where_they_are_generated(fleet):
    fetched = fleet.fetched()
    body = {"model": "lmi", "prompt": prompt("several"), "max_tokens": 4, "n": 3}
    answer = fleet.routed.client.post("/v1/completions", json=body, timeout=120)
    assert len(answer.json()["choices"]) == 3
    assert fleet.fetched() == fetched


def test_nobody_else_can_have_kv_fetched_or_kept(fleet):
    for params in ({"do_remote_decode": True}, {"do_remote_prefill": True}):
        for served in (fleet.routed, fleet.prefills, fleet.decodes):
            body = {"model": "lmi", "prompt": prompt("own"), "kv_transfer_params": params}
            answer = served.client.post("/v1/completions", json=body)
            assert answer.status_code == 400
            assert "kv_transfer_params is not for clients" in answer.text


@pytest.mark.nightly
def test_kv_that_nobody_fetches_is_given_up(fleet):
    """The prefilling server keeps the KV while the other server is suspended and does not
    answer.
    """
    until(lambda: fleet.prefills.metric(USAGE) == 0)
    before = fleet.handed_over()
    with ThreadPoolExecutor(1) as pool:
        with fleet.decodes.held():
            asked = pool.submit(ask, fleet.routed, prompt("left alone"))
            until(lambda: fleet.handed_over() == before + 1)
            assert fleet.prefills.metric(USAGE) > 0
            until(lambda: fleet.prefills.metric(USAGE) == 0, seconds=100)
        text, _ = asked.result()
    assert text == ask(fleet.prefills, prompt("left alone"))[0]


@pytest.mark.nightly
def test_a_prefill_server_that_is_killed_loses_nothing(fleet):
    prompts = [prompt(f"killed {number}") for number in range(12)]
    before = fleet.handed_over()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, fleet.routed, it) for it in prompts]
        until(lambda: fleet.handed_over() > before + 1)
        fleet.prefills.end()
        texts = [it.result()[0] for it in asked]
    fleet.prefills = fleet.start("prefill")
    fleet.prefills.ready()
    fleet.list_both()
    fleet.both_ready()
    assert texts == [ask(fleet.prefills, it)[0] for it in prompts]
    fetched = fleet.fetched()
    ask(fleet.routed, prompt("again"))
    assert fleet.fetched() > fetched + FETCHED
