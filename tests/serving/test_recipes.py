# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/guides/formatters.md, each run unchanged."""

import time

import pytest

from serving.user_code import Limits, start_user_code
from tests import documented
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

PAGE = "docs/guides/formatters.md"
RECIPES = [
    it
    for it in documented.blocks("python")
    if it.page == PAGE and it.line > documented.PAGES[PAGE].partition("## Recipes")[0].count("\n")
]
BODY = {"inputs": "a b"}
CHAT = {"messages": [{"role": "user", "content": "a b"}]}


async def answered(text, tmp_path, body):
    (tmp_path / "model.py").write_text(text)
    async with running() as it:
        code = it.pipeline.code = await start_user_code(tmp_path, tmp_path, Limits(5, 5, 0))
        assert code
        try:
            answer = await it.invoke(body)
            streamed = await it.invoke({**body, "stream": True})
        finally:
            await code.stop()
        assert answer.status_code == streamed.status_code == 200
        return answer.json(), it.engine.bodies[0]


async def metadata(answer, sent):
    assert answer["metadata"]["model"] == answer["model"]
    assert abs(answer["metadata"]["answered_at"] - time.time()) < 100
    assert answer["choices"][0]["text"] == "b a"


async def prefix(answer, sent):
    assert (sent["prompt"], sent["max_tokens"]) == ("[SUPPORT] a b", 256)


async def metrics(answer, sent):
    counted = {"characters": 3, "words": 2}
    assert answer == {"generated_text": "b a", "custom_metrics": counted}


async def schema(answer, sent):
    assert (sent["prompt"], answer) == ("Classify: x y", {"label": "y x Classify:"})


async def one_format(answer, sent):
    assert answer["text"] == "b a"
    assert answer["tokens"] >= 2


CASES = [
    (0, BODY, metadata),
    (1, BODY, prefix),
    (2, BODY, metrics),
    (3, {"ticket": {"subject": "x y"}}, schema),
    (4, BODY, one_format),
    (4, CHAT, one_format),
]


def test_there_are_five():
    assert len(RECIPES) == 5


@pytest.mark.parametrize(("number", "body", "check"), CASES)
async def test_a_recipe_does_what_it_says(number, body, check, tmp_path):
    await check(*await answered(RECIPES[number].text, tmp_path, body))
