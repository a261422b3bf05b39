# SPDX-License-Identifier: Apache-2.0
"""Chaos's judge, with replicas that lie, and its ledger."""

import asyncio
import json
import math
import os
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.router.conftest import END, STREAM, FakeReplica, chunk
from tests.serving.router.conftest import whole as answered
from tests.support.harness.process import running
from tools.chaos.counted import TASKS_FILE
from tools.chaos.ledger import End, Ledger, Sample, Verdict, grown, shares, slope, slopes, table
from tools.chaos.parts import Kept
from tools.chaos.traffic import (
    CUT,
    ERRORS,
    Ask,
    Client,
    cases,
    chat,
    completion,
    drop,
    events,
    fresh,
    garbage,
    lines,
    lmi,
    records,
    send_garbage,
    whole,
)

pytestmark = pytest.mark.anyio

TEXT = {"generated_text": "right"}
ID = "THE-ID"


@pytest.fixture
def anyio_backend():
    return "asyncio"


def told(status, body, *more):
    """A replica's answer with a length."""

    async def answer(replica, asked, writer):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        number = asked.headers.get("x-request-id", "")
        data = data.replace(ID.encode(), number.encode())
        writer.write(answered(status, data, f"x-request-id: {number}", *more))

    return answer


async def hanging_up(replica, asked, writer):
    raise ConnectionError


async def misaddressed(replica, asked, writer):
    writer.write(answered(200, json.dumps(TEXT).encode(), "x-request-id: another"))


def streamed(*parts, end=END):
    """A replica's answer in chunks. end: the bytes after them; b"" cuts the connection."""

    async def answer(replica, asked, writer):
        number = asked.headers["x-request-id"].encode()
        writer.write(STREAM + b"".join(chunk(it.replace(ID.encode(), number)) for it in parts))
        writer.write(end)
        if not end:
            await writer.drain()
            raise ConnectionError

    return answer


@asynccontextmanager
async def client_of(answer, deadline=5.0):
    replica = FakeReplica()
    replica.answer = answer
    await replica.start()
    client = Client(replica.url, Ledger(), deadline)
    try:
        yield client, replica
    finally:
        await client.close()
        await replica.stop()


async def end_of(ask, expected, answer, fault=False, deadline=5.0, cuts=False, **more):
    """The ledger's verdict on an answer. fault: whether a fault may cause errors now. cuts: whether
    a fault may cut connections.
    """
    async with client_of(answer, deadline) as (client, _):
        if fault:
            client.ledger.fault("engine", ERRORS, forgets=True)
        if cuts:
            client.ledger.fault("own-router", {CUT})
        await client.judge(ask, expected, **more)
        ((_, end),) = client.ledger.ends
        assert client.ledger.good == (end not in (End.LOST, End.WRONG, End.UNEXPLAINED))
        assert str(end) in client.ledger.text()
        return end


def sse(*found, done=True):
    parts = [b"data: %b\n\n" % json.dumps(it).encode() for it in found]
    return [*parts, b"data: [DONE]\n\n"] if done else parts


def chunk_of(text, finish=None, model="m", number=ID):
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"id": f"cmpl-{number}", "model": model, "choices": [choice]}


def line_of(number, text, whole_text=None):
    token = {"id": number, "text": text, "log_prob": -0.1}
    return json.dumps({"index": 0, "token": token, "generated_text": whole_text}).encode() + b"\n"


LMI = Ask("LMI", "/invocations", json.dumps(lmi("a")).encode(), whole)
LINES = Ask("lines", "/invocations", json.dumps(lmi("a", stream=True)).encode(), lines)
SSE = Ask("SSE", "/v1/completions", json.dumps(completion("a")).encode(), events, unique=True)
CHAT = Ask("chat", "/v1/chat/completions", json.dumps(chat("a")).encode(), whole, unique=True)
RECORDS = Ask("records", "/invocations", b"{}\n{}", records)
LINE = {"text": "ab", "tokens": [1, 2]}
TOGETHER = {"text": "ab", "finish_reason": ["length"], "model": ["m"], "processed_by": [""]}
ERROR = {"code": 500, "error": "the engine failed"}
ERROR_V1 = {"error": {"message": "no", "type": "E", "param": None, "code": 503}}


@pytest.mark.parametrize(
    ("ask", "expected", "answer", "end"),
    [
        (LMI, TEXT, told(200, TEXT), End.RIGHT),
        (LMI, TEXT, told(200, {"generated_text": "another's"}), End.WRONG),
        (LMI, TEXT, told(200, b'{"generated_text": "ri'), End.WRONG),
        (LMI, TEXT, misaddressed, End.WRONG),
        (CHAT, {"model": "m"}, told(200, {"id": f"chatcmpl-{ID}", "model": "m"}), End.RIGHT),
        (CHAT, {"model": "m"}, told(200, {"id": "chatcmpl-other", "model": "m"}), End.WRONG),
        (CHAT, {"model": "m"}, told(200, {"id": f"chatcmpl-{ID}", "model": "n"}), End.WRONG),
        (CHAT, {}, told(200, {"id": f"chatcmpl-{ID}", "processed_by": "one"}), End.WRONG),
        (LINES, LINE, streamed(line_of(1, "a"), line_of(2, "b", "ab")), End.RIGHT),
        (LINES, LINE, streamed(line_of(1, "a"), line_of(2, "b", "ac")), End.WRONG),
        (LINES, LINE, streamed(line_of(1, "a"), line_of(3, "b", "ab")), End.WRONG),
        (LINES, LINE, streamed(line_of(1, "a")), End.LOST),
        (LINES, LINE, streamed(line_of(1, "a"), end=b""), End.LOST),
        (LINES, LINE, streamed(), End.LOST),
        (SSE, TOGETHER, streamed(*sse(chunk_of("a"), chunk_of("b", "length"))), End.RIGHT),
        (SSE, TOGETHER, streamed(*sse(chunk_of("ab", "length"))), End.RIGHT),
        (SSE, TOGETHER, streamed(*sse(chunk_of("b"), chunk_of("a", "length"))), End.WRONG),
        (SSE, TOGETHER, streamed(*sse(chunk_of("ab", "length", "n"))), End.WRONG),
        (SSE, TOGETHER, streamed(*sse(chunk_of("ab", "length", number="b"))), End.WRONG),
        (SSE, TOGETHER, streamed(*sse(chunk_of("ab", "length"), done=False)), End.LOST),
        (SSE, TOGETHER, streamed(*sse(chunk_of("a"))), End.LOST),
        (RECORDS, [TEXT, TEXT], told(200, b"\n".join([json.dumps(TEXT).encode()] * 2)), End.RIGHT),
        (RECORDS, [TEXT, TEXT], told(200, json.dumps(TEXT).encode()), End.WRONG),
        (LMI, TEXT, told(500, b"Internal Server Error"), End.UNEXPLAINED),
        (LMI, TEXT, told(500, {"code": 424, "error": "no"}), End.UNEXPLAINED),
        (LMI, TEXT, told(424, {"code": 424, "error": "no"}), End.UNEXPLAINED),
    ],
)
async def test_the_ledgers_verdict_on_an_answer(ask, expected, answer, end):
    assert await end_of(ask, expected, answer) is end


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (LMI, told(500, ERROR)),
        (CHAT, told(503, ERROR_V1, "retry-after: 1")),
        (LINES, streamed(line_of(1, "a"), json.dumps(ERROR).encode() + b"\n")),
        (SSE, streamed(*sse(chunk_of("a"), ERROR_V1))),
        (RECORDS, told(200, b"\n".join([json.dumps(it).encode() for it in (TEXT, ERROR)]))),
    ],
)
async def test_an_error_is_explained_while_there_is_a_fault(ask, answer):
    assert await end_of(ask, None, answer, fault=True) is End.EXPLAINED
    assert await end_of(ask, None, answer) is End.UNEXPLAINED


async def test_a_fault_excuses_no_wrong_or_lost_answer_and_no_busy_without_a_time():
    assert await end_of(LMI, None, told(200, TEXT), fault=True) is End.WRONG
    cut = streamed(line_of(1, "a"), end=b"")
    assert await end_of(LINES, LINE, cut, fault=True) is End.LOST
    assert await end_of(CHAT, None, told(503, ERROR_V1), fault=True) is End.UNEXPLAINED
    survivor = replace(SSE, survives=True)
    failed = streamed(*sse(chunk_of("a"), ERROR_V1))
    assert await end_of(survivor, None, failed, fault=True) is End.UNEXPLAINED


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (LMI, hanging_up),
        (LINES, streamed(line_of(1, "a"), end=b"")),
        (SSE, streamed(*sse(chunk_of("a"), done=False))),
    ],
)
async def test_a_cut_is_explained_by_a_fault_that_cuts(ask, answer):
    assert await end_of(ask, None, answer, cuts=True) is End.EXPLAINED
    assert await end_of(ask, None, answer, fault=True) is End.LOST
    assert await end_of(LMI, None, told(500, ERROR), cuts=True) is End.UNEXPLAINED


async def test_no_answer_and_one_that_never_ends_are_lost():
    async def for_ever(replica, asked, writer):
        writer.write(STREAM)
        await writer.drain()
        await asyncio.Event().wait()

    assert await end_of(LMI, TEXT, hanging_up) is End.LOST
    assert await end_of(LMI, TEXT, for_ever, deadline=0.2) is End.LOST


async def test_after_it_was_asked_to_stop_a_server_may_refuse_but_not_lie():
    async with client_of(told(200, {"generated_text": "wrong"})) as (client, replica):
        client.stopped_at = time.monotonic()
        await client.judge(LMI, TEXT)
        replica.answer = told(503, ERROR, "retry-after: 1")
        await replica.stop()
        await client.judge(LMI, TEXT)
        assert [*client.ledger.ends] == [("LMI", End.WRONG), ("LMI", End.REFUSED)]


async def test_calls_without_a_text():
    async with client_of(told(424, {"code": 424, "error": "no"})) as (client, _):
        sent = await client.send("POST", "/invocations")
        assert client.expect("gone", lambda it: it.status == 424, sent)
        assert not client.expect("there", lambda it: it.status == 200, sent)
        client.ledger.fault("engine", ERRORS, forgets=True).began = sent.began
        assert not client.expect("excused", lambda it: it.status == 200, sent, also={424})
        assert {**client.ledger.ends} == {
            ("gone", End.RIGHT): 1,
            ("there", End.UNEXPLAINED): 1,
            ("excused", End.EXPLAINED): 1,
        }


async def test_garbage_is_to_be_refused():
    async with client_of(told(400, {"code": 400, "error": "no"})) as (client, replica):
        it = ("empty", answered_as_request(b"{}"), frozenset((400,)))
        await send_garbage(client, replica.port, it)
        replica.answer = told(200, TEXT)
        await send_garbage(client, replica.port, it)
        replica.answer = told(500, ERROR)
        await send_garbage(client, replica.port, it)
        replica.answer = hanging_up
        await send_garbage(client, replica.port, it)
        found = {end: count for (_, end), count in client.ledger.ends.items()}
        assert found == {End.EXPLAINED: 1, End.WRONG: 1, End.UNEXPLAINED: 1, End.LOST: 1}


def answered_as_request(body):
    return b"POST /invocations HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def test_clients_that_leave_bring_nothing_down():
    async with client_of(told(200, TEXT)) as (client, replica):
        drawn = random.Random(0)
        for _ in range(20):
            await drop(replica.port, drawn)
        await client.judge(LMI, TEXT)
        assert [*client.ledger.ends] == [("LMI", End.RIGHT)]


CHILD = "import subprocess; p = subprocess.Popen(['sleep', '99']); p.wait()"


async def test_what_ends_is_started_again_and_how_it_ended_is_told(tmp_path):
    ledger = Ledger()
    program = Kept("server", [sys.executable, "-c", CHILD], {}, tmp_path, ledger)

    async def child():
        while not (found := program.children("sleep")):
            await asyncio.sleep(0.02)
        return found[0]

    program.start()
    keeping = asyncio.create_task(program.keep())
    try:
        first, of_first = program.process, await child()
        program.exits = -9
        first.kill()
        while program.process is first:
            await asyncio.sleep(0.02)
        assert not ledger.problems
        second, of_second = program.process, await child()
        second.kill()
        while program.process is second:
            await asyncio.sleep(0.02)
        assert ledger.problems == ["server ended with exit code -9: it logged nothing"]
        last = await child()
        for left in (of_first, of_second):
            left.kill()
    finally:
        program.end()
    while running(last):
        await asyncio.sleep(0.02)
    await keeping


def test_every_kind_of_request_is_there_and_the_same_each_time():
    asks = cases(1, ["one", "two"], "formatted")
    assert asks == cases(1, ["one", "two"], "formatted")
    assert asks != cases(2, ["one", "two"], "formatted")
    bodies = [(it.path, it.body, *it.headers.items()) for it in asks]
    assert len({*bodies}) == len(asks) > 60
    assert fresh("1", "one").headers
    assert len({name for name, _, _ in garbage()}) == len(garbage()) > 25


def test_errors_are_excused_from_a_faults_beginning_to_a_moment_after_its_end():
    ledger = Ledger()
    engine = ledger.fault("engine", ERRORS, forgets=True)
    harmless, stop = ledger.fault("store"), ledger.fault("stop", forgets=True)
    harmless.began, engine.began, stop.began = 0.0, 100.0, 300.0
    assert ledger.allowed(1, 2, {424}) == set()
    assert ledger.allowed(90, 99) == set()
    assert ledger.allowed(90, 101) == ERRORS
    assert ledger.allowed(250, 251) == ERRORS
    engine.over = 200.0
    assert ledger.allowed(201, 202, {424}) == {424, *ERRORS}
    assert ledger.allowed(203, 204, {424}) == set()
    assert ledger.allowed(300, 301) == set()
    assert ledger.allowed(300, 301, {424}) == {424}


def test_the_ledger_as_it_is_printed():
    ledger = Ledger()
    for number in range(3):
        ledger.count("LMI", Verdict(End.EXPLAINED, f"500 request '{number}' failed"))
    ledger.count("chat", Verdict(End.WRONG, "got this, not that"))
    fault = ledger.fault("engine", ERRORS, forgets=True)
    fault.recovered = 12.5
    ledger.fault("engine", ERRORS, forgets=True)
    text = ledger.text()
    assert "3  500 request … failed" in text
    assert text.splitlines()[3].split() == ["all", "4", "-", "3", "-", "-", "-", "1", "-"]
    assert (
        "engine                                      2                     12.5      12.5" in text
    )
    assert "chat: wrong: got this, not that" in text
    assert not ledger.good


def test_processes_that_have_grown_are_reported():
    before = {"server": Sample(500, 50), "router": Sample(30, 20), "other": Sample(1, 1)}
    before["engine worker of server"] = Sample(800, 50)
    after = {"server": Sample(570, 70), "router": Sample(93, 44), "new": Sample(1, 1)}
    after["engine worker of server"] = Sample(1300, 50)
    assert grown(before, after) == []
    after = {"server": Sample(580, 50), "router": Sample(30, 45)}
    assert grown(before, after) == [
        "router had 20 file descriptors, and has 45",
        "server grew from 500 to 580 MiB",
    ]
    assert "server                                  500.0          580.0" in table(before, after)


def test_slopes_are_those_of_an_hour():
    times = [float(it) for it in range(0, 600, 10)]
    rise, error = slope(times, [100 + it / 3600 for it in times])
    assert rise == pytest.approx(1)
    assert error == pytest.approx(0, abs=1e-6)
    drawn = random.Random(1)
    covered = 0
    for _ in range(200):
        rise, error = slope(times, [5 * it / 3600 + drawn.gauss(0, 1) for it in times])
        covered += abs(rise - 5) < error
    assert 180 <= covered < 200
    assert math.isfinite(error)


def test_slopes_of_a_process_that_only_warms_up():
    times = [float(it) for it in range(0, 3600, 60)]
    warms_up = [Sample(100 + min(it, 1800) / 180, 40) for it in times]
    text = slopes(times, {"server": warms_up, "one that ended": warms_up[:9]})
    heads, row = text.splitlines()
    assert heads.count("in 2nd half") == 3
    assert row.startswith("server ")
    whole, *others = [float(it) for it in row.replace("±", "").split()[1::2]]
    assert 5 < whole < 20
    assert others == [0] * 5


def test_what_grows_by_more_than_it_may_in_an_hour_is_told():
    times = [float(it) for it in range(0, 3600, 300)]
    steady = [Sample(100, 40, 20) for _ in times]
    leaks = [Sample(100 + it / 360, 40, 20) for it in times]
    text, problems = shares(times, {"server": leaks, "router": steady, "engine core": leaks})
    assert len(text.splitlines()) == 4
    assert len(problems) == 1
    assert problems[0].startswith("memory of server grow")


KEEPS = """
import asyncio, pathlib, sys, time, weakref

async def main(file):
    async def waits():
        await asyncio.sleep(60)

    task = asyncio.create_task(waits())
    while not file.exists() or file.read_text() != "2":  # main's task and this
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    gone = weakref.ref(task)
    del task
    while file.read_text() != "1":
        await asyncio.sleep(0.01)
    print("kept" if gone() else "gone")

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


def test_counting_tasks_keeps_none_of_them(tmp_path):
    """If the count kept a list of tasks, it would keep the finished ones: a leak."""
    (tmp_path / "keeps.py").write_text(KEEPS)
    count = tmp_path / "count"
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos.counted", "-P", "-m", "keeps", str(count)],
        env={
            **os.environ,
            TASKS_FILE: str(count),
            "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "gone\n", done.stderr
