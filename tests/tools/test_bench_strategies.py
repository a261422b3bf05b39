# SPDX-License-Identifier: Apache-2.0
"""The requests and the report of `bench strategies --tiers`, with stubs for the servers."""

import asyncio
import json
import random
import sys
from collections import Counter

import pytest

from tests.support.harness import stub_replica
from tests.support.harness.process import Program
from tools.bench import strategies
from tools.bench.strategies import ARMS, Measured, ask_all, parsed, questions, table, tiers_of

FOUND = {
    "baseline": Measured([0.1 * n for n in range(11)], 20.0, 4000, {"computed": 9000.0}),
    "all": Measured([0.02 * n for n in range(11)], 10.0, 4000, {"computed": 900.0}),
}
for _it in FOUND.values():
    _it.prompts |= {"tiers": 10000 - _it.prompts["computed"], "engines": 0.0}


def rows(price):
    """Name of the arm -> its cells."""
    lines = (line.removesuffix(" |").split(" | ") for line in table(FOUND, price))
    return {name.removeprefix("| "): cells for name, *cells in lines}


def test_the_table_has_figures_and_changes_against_the_baseline():
    found = rows(36.0)
    assert found["baseline"] == [
        *("0.500", "0.900", "200.0", "0.150", "9,000", "1,000", "0"),
        *[""] * 5,
    ]
    assert found["all"] == [
        *("0.100", "0.180", "400.0", "0.075", "900", "9,100", "0"),
        *("-80%", "-80%", "+100%", "-90%", "-50%"),
    ]


def test_a_price_of_zero():
    found = rows(0.0)
    assert found["baseline"][3] == found["all"][3] == "0.000"
    assert found["all"][-1] == "-50%"


def test_every_arm_gets_the_same_questions_about_documents_of_its_own():
    asked = [questions(arm.name, 6, 3, 10, random.Random("0 0")) for arm in ARMS]
    for arm, texts in zip(ARMS, asked, strict=True):
        assert {*Counter(text.partition(":")[0] for text in texts).values()} == {3}
        assert len({*texts}) == len(texts) == 18
        assert [text.removeprefix(arm.name) for text in texts] == [
            text.removeprefix(ARMS[0].name) for text in asked[0]
        ]
    orders = [questions("x", 6, 3, 10, random.Random(seed)) for seed in ("0 0", "0 1")]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        ("none", set()),
        ("L1", {"OPTION_LMCACHE_CONFIG_FILE"}),
        ("L1 + L2", {"OPTION_LMCACHE_CONFIG_FILE", "OPTION_KV_L2_URL"}),
    ],
)
def test_an_engine_holds_a_sixth_of_the_documents_and_memory_half(tmp_path, tiers, names):
    options = parsed(["--tiers", "--documents=24", "--length=1000"])
    options.kv_per_token = 4096
    environ = tiers_of(tiers, options, tmp_path, 6379)
    assert {name for name in environ if "LMCACHE" in name or "L2" in name} == names
    document = int(environ["OPTION_MAX_MODEL_LEN"]) * 4096
    assert int(environ["OPTION_KV_CACHE_MEMORY_BYTES"]) == 4 * document
    if names:
        config = json.loads((tmp_path / "lmcache.yaml").read_text())
        assert 0.8 * config["max_local_cpu_size"] * 2**30 == pytest.approx(12 * document)


def test_all_questions_are_asked_and_timed():
    command = (sys.executable, stub_replica.__file__, "--rate=200", "--first=0.05", "{port}")
    measured = Measured()
    with Program(*command) as stub:
        stub.ready()
        texts = questions("x", 4, 2, 10, random.Random(0))
        asyncio.run(ask_all(stub.url, texts, 3, measured))
    assert len(measured.ttfts) == 8
    assert min(measured.ttfts) >= 0.05
    assert measured.tokens == 8 * strategies.ANSWER_TOKENS
    assert measured.seconds >= 3 * 0.05


def test_a_request_that_fails_ends_the_run():
    command = (sys.executable, stub_replica.__file__, "--rate=200", "{port}")
    with Program(*command) as stub:
        stub.ready()
        with pytest.raises(SystemExit, match="a request failed: HTTP 404"):
            asyncio.run(ask_all(f"{stub.url}/elsewhere", ["x"], 1, Measured()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--price-per-hour=-1"], "invalid price value: '-1'"),
        (["--documents=11"], "--documents 11: an engine could hold none; at least 12"),
        (["--clients=0"], "invalid count value: '0'"),
    ],
)
def test_bad_options(capsys, words, told):
    with pytest.raises(SystemExit):
        parsed(["--tiers", *words])
    assert told in capsys.readouterr().err
