# SPDX-License-Identifier: Apache-2.0
"""Load on endpoints with known delays and faults."""

import asyncio
import contextlib
import http.server
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import uvloop

from tests.support.harness import ports, stub_replica
from tests.support.harness.process import ROOT, Program
from tools.bench import endpoint

LOAD = endpoint.Load(
    url="",
    model="stub",
    context=50,
    documents=3,
    shared=0.5,
    output=4,
    concurrency=3,
    rate=None,
    warm_up=0.0,
    duration=0.2,
    processes=1,
    timeout=10.0,
    ignore_eos=False,
    seed=0,
    run="run",
)


def stub(rate, first):
    command = (sys.executable, stub_replica.__file__, f"--rate={rate}", f"--first={first}")
    return Program(*command, "{port}")


def bench(*words):
    """Exit code, rows of the table as name → cells, stderr."""
    command = [sys.executable, "-m", "tools.bench.endpoint", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = {line[:34].strip(): line[34:].split() for line in done.stdout.splitlines()}
    return done.returncode, rows, done.stderr


def test_known_delays_are_found():
    delays = [(50, 0.1), (20, 0.25)]
    with stub(*delays[0]) as quick, stub(*delays[1]) as slow:
        quick.ready()
        slow.ready()
        code, rows, told = bench(
            *(quick.url, f"{slow.url}/v1/", "--context=1k", "--output=4", "--concurrency=4"),
            *("--duration=1.2", "--warm-up=0.2", "--processes=2", "--price-per-hour", "36", "18"),
        )
    assert (code, told) == (0, "")
    found = [[float(cell) for cell in rows[url.url][:-1]] for url in (quick, slow)]
    for (rate, first), price, cells in zip(delays, (36, 18), found, strict=True):
        requests, failed, p50, p90, gap50, _, tokens, dollars = cells
        assert requests > 4
        assert failed == 0
        # Streams step together, so that a first token waits for the next step. A busy machine adds
        # to all measured times.
        assert first <= p50 <= p90
        assert p50 < 4 * (first + 1 / rate)
        assert 0.7 < gap50 / (1000 / rate) < 3
        assert dollars == pytest.approx(price / 3600 / tokens * 1e6, rel=0.01)
    assert rows[quick.url][-1] == "-"  # the stub reports no cached tokens
    ratios = [float(cell) for cell in rows["second ÷ first"][:-1]]
    expected = [slow / quick for quick, slow in zip(*(cells[2:] for cells in found), strict=True)]
    assert ratios == pytest.approx(expected, rel=0.05, abs=0.01)


class Locked(http.server.BaseHTTPRequestHandler):
    """Serves the model m to clients with the key."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": "m"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.path.startswith("/v1/") and body["model"] == "m"
        self.reply(200 if known else 404, {} if known else {"error": "no such model"})

    def reply(self, status, body):
        if self.headers["Authorization"] != "Bearer sk-right":
            status, body = 401, {"error": "no key"}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


class Tired(Locked):
    """Answers the first request, without a stream."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(503 if body.get("stream") else 200, {"error": "tired"})


@contextlib.contextmanager
def served(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def locked():
    with served(Locked) as url:
        yield url


def test_an_endpoint_that_answers_errors(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    with served(Tired) as url:
        code, rows, told = bench(url, "--duration=0.2", "--processes=2", "--price-per-hour=0")
    assert code == 1
    requests, failed, *figures = rows[url]
    assert requests == failed != "0"
    assert figures == ["-", "-", "-", "-", "0.0", "-", "-"]
    assert f'{failed} x HTTP 503: {{"error": "tired"}}' in told
    assert "none was answered" in told


@pytest.mark.parametrize(
    ("key", "path", "words", "told"),
    [
        (None, "", [], '/v1/models: HTTP 401: {"error": "no key"}; OPENAI_API_KEY has to be'),
        ("sk-wrong", "", ["--model=m"], "for the model m: HTTP 401: "),
        ("sk-right", "", ["--model=x"], 'for the model x: HTTP 404: {"error": "no such model"}'),
        ("sk-right", "/elsewhere", ["--model=m"], "a URL is what stands before /v1, and --model"),
    ],
)
@pytest.mark.parametrize("workload", [False, True])
def test_what_the_first_request_meets_ends_it(
    monkeypatch, tmp_path, locked, key, path, words, told, workload
):
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    file = tmp_path / "workload.yaml"
    file.write_text("{isl: 9, osl: 9, concurrency: 1}")
    more = ["--workload", str(file)] if workload else []
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, locked + path, *words, *more)
    assert str(ended.value).startswith(f"{locked}{path}/v1/")
    assert told in str(ended.value)
    assert "sk-" not in str(ended.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{isl: 9, osl: 9, concurency: 1}", "concurency: no such key; did you mean concurrency?"),
        ("{isl: 9, osl: 9, concurrency: 1}", "tokenizer: is missing, and m is no hub id"),
    ],
)
def test_bad_workloads_put_no_load_on_an_endpoint(monkeypatch, tmp_path, locked, content, told):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    file = tmp_path / "workload.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, locked, "--workload", str(file))
    assert str(ended.value).startswith(f"{file}: {told}")


def called(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["endpoint", *words])
    endpoint.main()


def test_nobody_is_there():
    url = f"http://127.0.0.1:{ports.free()}"
    code, _, told = bench(url)
    assert code == 1
    assert f"{url}/v1/models: Cannot connect" in told
    assert "is the URL right?" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["127.0.0.1:80"], "127.0.0.1:80: a URL begins with http:// or https://"),
        (["http://x", "--price-per-hour=-1"], "invalid price value: '-1'"),
        (["http://x", "--context=8kk"], "invalid count value: '8kk'"),
        (["http://x", "--shared=2"], "invalid share value: '2'"),
        (["http://x", "--rate=0"], "invalid positive value: '0'"),
        (["http://x", "--warm-up=60"], "--warm-up 60: takes less than --duration"),
        (["http://x", "--price-per-hour", "1", "2"], "one price, or one for each URL"),
        (["http://x", "http://y", "http://z"], "one or two URLs"),
        (["http://x", "--workload=w", "--context=1k"], "--context: --workload says what the load"),
        (["http://x", "--slo-ttft-ms=9"], "are for the goodput of a --workload"),
    ],
)
def test_bad_options(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["endpoint", *words])
    with pytest.raises(SystemExit):
        endpoint.parsed()
    assert told in capsys.readouterr().err


def loaded(load=LOAD, connection=stub_replica.Connection, rate=200.0, first=0.0):
    """A client's findings, and the stub in this process that answered it."""

    async def run():
        port = ports.free()
        replica = stub_replica.Replica(port, rate, first)
        server = await replica.loop.create_server(lambda: connection(replica), "127.0.0.1", port)
        client = endpoint.Client(replace(load, url=f"http://127.0.0.1:{port}"), 0)
        async with server:
            await asyncio.wait_for(client.run(), 30)
        return client.found, replica

    return uvloop.run(run())


def test_events_count_as_tokens_where_there_is_no_usage():
    found, replica = loaded()
    assert found.requests == replica.requests == len(found.ttfts) > 3
    assert len(found.gaps) == 3 * found.requests
    # The last requests' tokens came after the end of the time.
    assert 4 * (found.requests - LOAD.concurrency) <= found.tokens <= 4 * found.requests
    assert found.cached is None


class Counted(stub_replica.Connection):
    """Each event has two tokens, and a quarter of a prompt is cached."""

    def event(self, *, last):
        if last:
            details = {"prompt_tokens_details": {"cached_tokens": 16}}
            usage = {"prompt_tokens": 64, "completion_tokens": 8, **details}
            self.say({"choices": [], "usage": usage})
        super().event(last=last)

    def say(self, event):
        data = b"data: %b\n\n" % json.dumps(event).encode()
        self.transport.write(stub_replica.chunk(data))


def test_an_endpoints_own_count_of_tokens():
    found, _ = loaded(connection=Counted)
    # The stub sends an event with text after that of usage.
    assert 8 * (found.requests - LOAD.concurrency) <= found.tokens <= 8 * found.requests
    assert found.cached == found.prompt / 4 == 16 * found.requests
    assert endpoint.figures(found, 0.2, None)["cached"] == 0.25


class Busy(stub_replica.Connection):
    """Every second request is refused."""

    def on_message_complete(self):
        if self.replica.requests % 2:
            self.replica.requests += 1
            self.transport.write(self.replica.answer(b"too  many", 503))
        else:
            super().on_message_complete()


class Breaks(Counted):
    def event(self, *, last):
        self.say({"error": {"message": "out of memory"}})


class Strange(Counted):
    def event(self, *, last):
        self.say({"choices": None})


class Cut(stub_replica.Connection):
    def event(self, *, last):
        self.transport.close()


class Silent(stub_replica.Connection):
    def event(self, *, last):
        if last:
            self.transport.write(stub_replica.chunk(stub_replica.DONE) + b"0\r\n\r\n")


class Textless(stub_replica.Connection):
    """It sends tokens that have no text, as a model with random weights may."""

    def event(self, *, last):
        if last:
            usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
            self.transport.write(stub_replica.chunk(usage + stub_replica.DONE) + b"0\r\n\r\n")


def test_tokens_without_text_are_an_answer():
    found, _ = loaded(connection=Textless)
    assert not found.faults
    assert found.ttfts


@pytest.mark.parametrize(
    ("connection", "told"),
    [
        (Breaks, 'in a stream: {"error": {"message": "out of memory"}}'),
        (Strange, "events that are none of a chat completion"),
        (Cut, "payload is not completed"),
        (Silent, "an answer without any text"),
    ],
)
def test_what_is_no_answer_is_counted(connection, told):
    found, _ = loaded(connection=connection)
    assert found.faults.total() == found.requests
    assert all(told in fault for fault in found.faults)
    assert not found.ttfts


def test_some_are_refused():
    found, _ = loaded(connection=Busy)
    assert 0 < found.faults["HTTP 503: too many"] < found.requests
    assert len(found.ttfts) == found.requests - found.faults.total()


def test_a_rate_does_not_wait_for_answers():
    load = replace(LOAD, rate=100.0, concurrency=0)
    found, _ = loaded(load, first=0.4)  # when all requests have been sent
    rng, at, expected = random.Random("0 0"), 0.0, 0
    while (at := at + rng.expovariate(100.0)) < load.duration:
        load.body(rng)
        expected += 1
    assert len(found.ttfts) == found.requests == expected > 5


def test_users_of_all_processes_are_as_many_as_asked(monkeypatch):
    users = []

    async def user(self, session, rng):
        users.append(rng.random())

    monkeypatch.setattr(endpoint.Client, "_user", user)
    for number in range(3):
        asyncio.run(endpoint.Client(replace(LOAD, concurrency=7, processes=3), number).run())
    assert len(set(users)) == 7


def documents(shared):
    """The texts of requests, without their questions."""
    rng = random.Random(0)
    bodies = [json.loads(replace(LOAD, shared=shared).body(rng)) for _ in range(200)]
    return [body["messages"][0]["content"].partition(" hi")[0] for body in bodies]


def test_documents():
    assert len(set(documents(1.0))) == 3
    assert len(set(documents(0.0))) == 200
    half = documents(0.5)
    assert 80 < sum(half.count(it) > 1 for it in half) < 120


def test_a_body():
    body = json.loads(replace(LOAD, ignore_eos=True).body(random.Random(0)))
    assert body["messages"][0]["content"].count(" hi") == 50
    assert body["max_tokens"] == 4
    assert body["ignore_eos"] is True
    assert "ignore_eos" not in json.loads(LOAD.body(random.Random(0)))


def test_a_key_is_sent_and_not_told(monkeypatch):
    keys = []

    class Asked(stub_replica.Connection):
        def on_header(self, name, value):
            if name == b"Authorization":
                keys.append(value)

        def on_message_complete(self):
            self.transport.write(self.replica.answer(b"no", 401))

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    found, _ = loaded(connection=Asked)
    assert set(keys) == {b"Bearer sk-secret"}
    assert set(found.faults) == {"HTTP 401: no"}
