"""Which adapters are worked on at once, by a clock that the tests set."""

import asyncio
import random

import httpx
import pytest

from lmi_config import options
from serving.errors import NoSlot
from serving.places import QUANTUM_S, Places
from tests.serving.conftest import running
from tests.serving.test_adapters import ask, register, registry, write
from tests.serving.test_app import until

pytestmark = pytest.mark.anyio


class House:
    """Places, and who has one. The clock stands still."""

    def __init__(self, number):
        self.number = number
        self.now = 0.0
        self.places = Places[str](lambda: self.number, lambda: self.now)
        self.inside: list[str] = []
        self.requests: list[asyncio.Task[None]] = []

    async def request(self, name, until=None):
        async with self.places.held(name):
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
async def house(anyio_backend):
    house = House(2)
    yield house
    for request in house.requests:
        request.cancel()
    await asyncio.gather(*house.requests, return_exceptions=True)
    assert not house.places._taken
    assert not house.places._waiting


async def test_as_many_as_there_are_places(house):
    first = [await house.come(name) for name in "abab"]
    others = [await house.come(name) for name in "cdc"]
    assert house.inside == [*"abab"]
    await gone(first[0])
    assert "c" not in house.inside  # a has another request
    await gone(first[2])
    assert house.inside == [*"bbcc"]
    for request in (others[0], others[2]):
        await gone(request)
    assert house.inside == [*"bbd"]


async def test_a_place_is_kept_for_a_time_only_while_others_wait(house):
    first = [await house.come(name) for name in "ab"]
    house.now = 100
    await house.come("a")
    assert house.inside == [*"aba"]
    await house.come("c")
    await house.come("a")  # c has only just come
    assert house.inside == [*"abaa"]
    house.now += QUANTUM_S
    await house.come("a")
    await house.come("b")
    assert house.inside == [*"abaab"]  # the one that came first gives way
    house.now += QUANTUM_S
    await house.come("b")
    assert house.inside == [*"abaab"]  # and now either of them
    await gone(first[1])
    assert house.inside == [*"aaab"]


async def test_one_that_has_only_just_got_its_place_keeps_it(house):
    """Or those that wait would pass one request of each on to the next."""
    first = [await house.come(name) for name in "ab"]
    await house.come("c")
    await house.come("d")
    house.now = 100
    await gone(first[0])
    assert house.inside == [*"bc"]
    await house.come("c")
    assert house.inside == [*"bcc"]
    house.now += QUANTUM_S
    await house.come("c")
    assert house.inside == [*"bcc"]


async def test_when_nobody_waits_any_more_all_go_on(house):
    for name in "ab":
        await house.come(name)
    other = await house.come("c")
    house.now = 100
    await house.come("a")
    assert house.inside == [*"ab"]
    await gone(other)
    assert house.inside == [*"aba"]


async def test_where_there_are_none_any_more_that_is_told(house):
    await house.come("a")
    await house.come("b")
    waiting = await house.come("c")
    house.number = 0
    house.places.changed()
    with pytest.raises(NoSlot, match="OPTION_MAX_LORAS"):
        await waiting
    with pytest.raises(NoSlot):
        await house.request("d")


@pytest.mark.parametrize("seed", range(20))
async def test_everybody_has_a_turn_and_no_place_is_lost(house, seed):
    """Requests come all the time for all of them, take their time, and some give up."""
    chance = random.Random(seed)
    served = dict.fromkeys("abcdef", 0)
    requests = []
    for step in range(600):
        house.now += 0.1
        name = chance.choice("aaaabbbbcdef")
        over = asyncio.Event()
        requests.append((house.now + chance.uniform(0.1, 5), over, await house.come(name, over)))
        assert len(set(house.inside)) <= 2
        for end, over, request in requests:
            if chance.random() < 0.002:
                request.cancel()
            if end <= house.now:
                over.set()
        if step % 10 == 0:
            await settled()
        for name in set(house.inside):
            served[name] = step
    assert min(served.values()) > 300  # in the last half of the time


async def test_a_new_one_is_answered_although_others_never_cease(monkeypatch, tmp_path):
    monkeypatch.setattr("serving.places.QUANTUM_S", 0.2)
    async with running() as served:
        engine = served.engine
        root = tmp_path / "adapters"
        engine.adapters = registry(engine, root, slots=(2, 3))
        for number, name in enumerate(("one", "two", "three")):
            await register(served, name, write(root / name, number))
        over = False

        async def never_ceasing(name):
            while not over:
                await ask(served, name)

        others = [asyncio.create_task(never_ceasing(name)) for name in ("one", "two") * 3]
        await until(lambda: len(engine.loaded) == 2)
        # By a client of its own: httpx's pool has no turns, and the others are always quicker.
        async with httpx.AsyncClient(base_url=served.url, timeout=20) as client:
            answer = await client.post("/invocations", json={"prompt": "a", "model": "three"})
            assert (answer.status_code, answer.json()["model"]) == (200, "three")
        over = True
        await asyncio.gather(*others)


async def test_its_deadline_and_its_client_end_a_wait(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "SAGEMAKER_WHOLE_S", 1)
    async with running(interactive=True) as served:
        engine = served.engine
        root = tmp_path / "adapters"
        adapters = engine.adapters = registry(engine, root, slots=(1, 1))
        for number, name in enumerate(("one", "two")):
            await register(served, name, write(root / name, number))
        stream = {"inputs": "wait a", "stream": True, "adapters": "one"}  # which has more time
        held = asyncio.create_task(served.invoke(stream))
        await until(lambda: engine.running == 1)
        assert (await served.invoke({"inputs": "a", "adapters": "two"})).status_code == 504
        gone = asyncio.create_task(served.invoke({"inputs": "a", "adapters": "two"}))
        await until(lambda: adapters.waiting == 1)
        gone.cancel()
        await until(lambda: adapters.waiting == 0)
        engine.gate.set()
        assert (await held).status_code == 200
        assert (await served.invoke({"inputs": "a", "adapters": "two"})).status_code == 200
