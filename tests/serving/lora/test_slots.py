# SPDX-License-Identifier: Apache-2.0
"""Which adapters are in the batch at once, by a clock that the tests set."""

import asyncio
import random

import httpx
import pytest

from lmi_config.options import declared
from serving.errors import NoSlot
from serving.lora.slots import QUANTUM_S, BatchSlots
from tests.serving.conftest import running
from tests.serving.lora.test_registry import ask, register, registry, write
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio


class Batch:
    """A batch's slots and their adapters, by a clock that the tests set."""

    def __init__(self, number):
        self.number = number
        self.now = 0.0
        self.slots = BatchSlots[str](lambda: self.number, lambda: self.now)
        self.inside: list[str] = []
        self.requests: list[asyncio.Task[None]] = []

    async def request(self, name, until=None):
        async with self.slots.acquire(name):
            self.inside.append(name)
            try:
                await (until or asyncio.Event()).wait()
            finally:
                self.inside.remove(name)

    async def come(self, name, until=None):
        request = asyncio.create_task(self.request(name, until))
        self.requests.append(request)
        await settled()
        return request


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def gone(request):
    request.cancel()
    await settled()


@pytest.fixture
async def batch(anyio_backend):
    batch = Batch(2)
    yield batch
    for request in batch.requests:
        request.cancel()
    await asyncio.gather(*batch.requests, return_exceptions=True)
    assert not batch.slots._slots
    assert not batch.slots._waiting


async def test_as_many_as_there_are_slots(batch):
    first = [await batch.come(name) for name in "abab"]
    others = [await batch.come(name) for name in "cdc"]
    assert batch.inside == [*"abab"]
    await gone(first[0])
    assert "c" not in batch.inside  # a has another request
    await gone(first[2])
    assert batch.inside == [*"bbcc"]
    for request in (others[0], others[2]):
        await gone(request)
    assert batch.inside == [*"bbd"]


async def test_a_slot_is_kept_for_a_time_only_while_others_wait(batch):
    first = [await batch.come(name) for name in "ab"]
    batch.now = 100
    await batch.come("a")
    assert batch.inside == [*"aba"]
    await batch.come("c")
    await batch.come("a")  # c has only just arrived
    assert batch.inside == [*"abaa"]
    batch.now += QUANTUM_S
    await batch.come("a")
    await batch.come("b")
    assert batch.inside == [*"abaab"]  # the one that came first loses its slot
    batch.now += QUANTUM_S
    await batch.come("b")
    assert batch.inside == [*"abaab"]  # now both lose theirs
    await gone(first[1])
    assert batch.inside == [*"aaab"]


async def test_one_that_has_only_just_got_its_slot_keeps_it(batch):
    """Otherwise the waiting adapters would replace each other after one request each."""
    first = [await batch.come(name) for name in "ab"]
    await batch.come("c")
    await batch.come("d")
    batch.now = 100
    await gone(first[0])
    assert batch.inside == [*"bc"]
    await batch.come("c")
    assert batch.inside == [*"bcc"]
    batch.now += QUANTUM_S
    await batch.come("c")
    assert batch.inside == [*"bcc"]


async def test_when_nobody_waits_any_more_all_go_on(batch):
    for name in "ab":
        await batch.come(name)
    other = await batch.come("c")
    batch.now = 100
    await batch.come("a")
    assert batch.inside == [*"ab"]
    await gone(other)
    assert batch.inside == [*"aba"]


async def test_a_request_without_any_slot_is_refused_with_the_option(batch):
    await batch.come("a")
    await batch.come("b")
    waiting = await batch.come("c")
    batch.number = 0
    batch.slots.assign()
    with pytest.raises(NoSlot, match="OPTION_MAX_LORAS"):
        await waiting
    with pytest.raises(NoSlot):
        await batch.request("d")


@pytest.mark.parametrize("seed", range(20))
async def test_everybody_has_a_turn_and_no_slot_is_lost(batch, seed):
    """Requests keep coming for all adapters, take some time, and some give up."""
    chance = random.Random(seed)
    served = dict.fromkeys("abcdef", 0)
    requests = []
    for step in range(600):
        batch.now += 0.1
        name = chance.choice("aaaabbbbcdef")
        over = asyncio.Event()
        requests.append((batch.now + chance.uniform(0.1, 5), over, await batch.come(name, over)))
        assert len(set(batch.inside)) <= 2
        for end, over, request in requests:
            if chance.random() < 0.002:
                request.cancel()
            if end <= batch.now:
                over.set()
        if step % 10 == 0:
            await settled()
        for name in set(batch.inside):
            served[name] = step
    assert min(served.values()) > 300  # in the last half of the time


async def test_a_new_one_is_answered_although_others_never_cease(monkeypatch, tmp_path):
    monkeypatch.setattr("serving.lora.slots.QUANTUM_S", 0.2)
    async with running() as served:
        engine = served.engine
        root = tmp_path / "adapters"
        served.pipeline.adapters = registry(engine, root, slots=(2, 3))
        for number, name in enumerate(("one", "two", "three")):
            await register(served, name, write(root / name, number))
        over = False

        async def never_ceasing(name):
            while not over:
                await ask(served, name)

        others = [asyncio.create_task(never_ceasing(name)) for name in ("one", "two") * 3]
        await until_async(lambda: len(engine.loaded) == 2)
        # With a separate client: httpx's pool has no turns, and the others are always quicker.
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
            answer = await client.post("/invocations", json={"prompt": "a", "model": "three"})
            assert (answer.status_code, answer.json()["model"]) == (200, "three")
        over = True
        await asyncio.gather(*others)


async def test_its_deadline_and_its_client_end_a_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(declared, "SAGEMAKER_WHOLE_S", 1)
    async with running(interactive=True) as served:
        engine = served.engine
        root = tmp_path / "adapters"
        adapters = served.pipeline.adapters = registry(engine, root, slots=(1, 1))
        for number, name in enumerate(("one", "two")):
            await register(served, name, write(root / name, number))
        stream = {"inputs": "wait a", "stream": True, "adapters": "one"}  # this one has more time
        held = asyncio.create_task(served.invoke(stream))
        await until_async(lambda: engine.running == 1)
        assert (await served.invoke({"inputs": "a", "adapters": "two"})).status_code == 504
        gone = asyncio.create_task(served.invoke({"inputs": "a", "adapters": "two"}))
        await until_async(lambda: adapters.waiting == 1)
        gone.cancel()
        await until_async(lambda: adapters.waiting == 0)
        engine.gate.set()
        assert (await held).status_code == 200
        assert (await served.invoke({"inputs": "a", "adapters": "two"})).status_code == 200
