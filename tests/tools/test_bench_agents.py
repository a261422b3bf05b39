# SPDX-License-Identifier: Apache-2.0
"""The sessions of agents' bench, and its output."""

import argparse
import asyncio
import json
import sys

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from tests.support.models import tiny
from tools.bench.agents import __main__ as bench
from tools.bench.agents import documents, engines
from tools.bench.agents.fleet import Arm
from tools.bench.agents.sessions import CHUNK, PUBLISHED, Maker, figures, ideal, read, write


def test_sessions_have_the_published_medians():
    found = figures(Maker(1, 20).sessions(300), 20)
    for name, published in PUBLISHED.items():
        assert found[name] == pytest.approx(published, rel=0.1), name
    assert found["with sub-agents"] == pytest.approx(0.44, abs=0.06)


def test_sessions_are_those_of_their_seed_and_are_read_as_they_were_written(tmp_path):
    made, again = Maker(7, 20).sessions(4), Maker(7, 20).sessions(4)
    assert write(made, tmp_path / "a", 20) == write(again, tmp_path / "b", 20)
    found = read(tmp_path / "a", 20)
    assert ideal(found) == ideal(made)
    for one, other in zip(found, made, strict=True):
        assert one.name == other.name
        for turn, own in zip(one.turns, other.turns, strict=True):
            assert (turn.tokens // CHUNK, turn.chain) == (own.tokens // CHUNK, own.chain)
            assert turn.ends == own.ends
    assert any(turn.agent for it in found for turn in it.turns)


def test_every_arm_has_a_row(capsys, monkeypatch):
    given = ["--sessions", "4", "--live", "2", "--sizes", "1", "--one-shots", "0", "2"]
    monkeypatch.setattr(sys, "argv", ["agents", *given])
    with pytest.raises(SystemExit):  # the exit code shows whether the gates hold
        bench.main()
    printed = capsys.readouterr().out
    rows = [it for it in printed.splitlines() if it.startswith(("| 0 | 1 |", "| 2 | 1 |"))]
    assert len(rows) == 2 * len(bench.STRATEGIES) + 2
    assert "hints at 2, 1:" in printed


# Real engines

PLAIN, HINTED = Arm("prefixaware", False, 1, 2), Arm("prefixaware", True, 1, 2)


def written(arm, sessions=2):
    maker = Maker(3, 60)
    made = maker.sessions(sessions)
    writer = engines.Writer(tiny.make_long())
    return made, [[*writer.requests(it, arm, maker)] for it in made]


def test_a_prompt_has_a_turns_tokens_and_equal_chunks_are_equal_tokens():
    tokenizer = Tokenizer.from_file(str(tiny.make_long() / "tokenizer.json"))
    _, scripts = written(PLAIN)
    known, seen = {}, set()
    for it in scripts[0][:40] + scripts[1][:40]:
        ids = tokenizer.encode("<|user|>" + it.body["messages"][0]["content"]).ids
        assert len(ids) == it.turn.tokens
        assert tuple(ids) not in seen
        seen.add(tuple(ids))
        for number, link in enumerate(it.turn.chain):
            chunk = ids[number * CHUNK : (number + 1) * CHUNK]
            assert known.setdefault(link, chunk) == chunk


def test_one_shots_come_between_turns_and_only_hinted_turns_have_hints():
    made, plain = written(PLAIN)
    _, hinted = written(HINTED)
    for session, script, other in zip(made, plain, hinted, strict=True):
        assert [it.turn for it in script if it.conversation] == [*session.turns]
        assert not any(it.headers or "session_id" in it.body for it in script)
        for it, one in zip(other, script, strict=True):
            names = {"session_id", "nvext"}
            assert {k: v for k, v in it.body.items() if k not in names} == one.body
            assert it.body.get("session_id", "") == it.conversation
            assert ("nvext" in it.body) == it.turn.ends
            assert ("x-parent-session-id" in it.headers) == bool(it.turn.agent)
    shots = sum(it.turn.tokens for script in plain for it in script if not it.conversation)
    turns = sum(it.turn.tokens for script in plain for it in script if it.conversation)
    assert 0 < shots < turns


def test_each_answer_counts_for_its_own_turn():
    """A stub answers with as many cached tokens as the trace has in an endless cache."""
    made, scripts = written(HINTED)
    known, answers = set(), {}
    for script in scripts:
        for it in script:
            text = it.body["messages"][0]["content"]
            hits = next((n for n, link in enumerate(it.turn.chain) if link not in known), None)
            answers[text] = CHUNK * (len(it.turn.chain) if hits is None else hits)
            known.update(it.turn.chain)

    async def answer(request):
        body = await request.json()
        cached = answers[body["messages"][0]["content"]]
        events = [
            {"choices": [{"delta": {"content": "hi"}}]},
            {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}},
        ]
        text = "".join(f"data: {json.dumps(it)}\n\n" for it in events) + "data: [DONE]\n\n"
        route = {"x-slipway-route": "prefixaware: one of 7 tokens"}
        return web.Response(text=text, headers=route, content_type="text/event-stream")

    async def replayed():
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        options = argparse.Namespace(speed=1e9, live=2)
        found = await engines.replayed(f"http://127.0.0.1:{port}", scripts, options)
        await runner.cleanup()
        return found

    answered = asyncio.run(replayed())
    found = engines.counted(scripts, answered)
    assert found.turns == sum(len(it.turns) for it in made)
    assert found.moves == 0
    assert found.figures(made, 60).of_ideal == pytest.approx(1)


# The order of documents


def test_a_cache_has_beginnings_only_and_forgets_ends_first():
    cache = documents.Cache([1, 2, 4, 8], room=15)
    assert [cache.computed(it) for it in ([0, 1, 2], [0, 1, 3], [1, 0], [3])] == [7, 8, 3, 8]
    assert cache.computed([0, 1, 3]) == 8
    endless = documents.Cache([1, 2, 4, 8], room=None)
    assert [endless.computed(it) for it in ([0, 1, 2], [0, 1, 3], [0, 1, 2])] == [7, 8, 0]


def test_every_scenario_has_a_row_and_together_canonical_computes_each_set_once(capsys):
    documents.main(60)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(documents.SCENARIOS)
    together = documents.Scenario(5, 200, kind="together")
    given, canonical, popular = documents.shares(together, 0, 400)
    assert canonical == popular < 0.5 * given
    growing = documents.Scenario(3, 200, kind="more each turn")
    given, canonical, _ = documents.shares(growing, 0, 400)
    assert given < canonical
