# SPDX-License-Identifier: Apache-2.0
"""Which requests meet the operator's objectives. The fake engine reports its times."""

import pytest
from prometheus_client import REGISTRY

from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

PROMPT = {"prompt": "a b c"}


def counted():
    """The series of objectives so far."""
    return {
        (name, result): REGISTRY.get_sample_value(
            "slipway_slo_requests_total", {"objective": name, "result": result}
        )
        or 0
        for name in ("ttft", "itl", "all")
        for result in ("met", "missed")
    }


@pytest.fixture
def more():
    """Returns a function that shows the new counts: `ttft+` for a request that met the objective,
    `itl-` for one that missed it.
    """
    before = counted()

    def found():
        changed = {key: now - before[key] for key, now in counted().items() if now != before[key]}
        assert set(changed.values()) <= {1}
        return " ".join(f"{name}{'+' if result == 'met' else '-'}" for name, result in changed)

    return found


@pytest.mark.parametrize(
    ("first_s", "between_s", "path", "body", "expected"),
    [
        (0, 0, "/v1/completions", PROMPT, "ttft+ itl+ all+"),
        (0, 0, "/v1/completions", PROMPT | {"stream": True}, "ttft+ itl+ all+"),
        (100, 0, "/v1/completions", PROMPT | {"stream": True}, "ttft- itl+ all-"),
        (0, 1, "/invocations", {"inputs": "a b"}, "ttft+ itl- all-"),
        (0, 1, "/invocations", {"inputs": "a"}, "ttft+ all+"),  # one token has no gap
        (0, 0, "/v1/completions", {"prompt": "refuse"}, ""),  # the client's fault
        (0, 0, "/v1/completions", {"prompt": "break"}, "ttft- itl- all-"),
        (0, 0, "/v1/completions", {"prompt": "a fault", "stream": True}, "ttft- itl- all-"),
        (0, 0, "/tokenize", PROMPT, ""),
        (0, 0, "/v1/completions", {"no": "prompt"}, ""),
    ],
)
async def test_a_request_is_held_against_the_objectives(
    first_s, between_s, path, body, expected, more
):
    async with running(slo_ttft_ms=50_000, slo_itl_ms=500) as it:
        it.engine.first_s, it.engine.between_s = first_s, between_s
        await it.post(path, body)
        assert more() == expected


async def test_one_objective_is_enough_and_none_counts_nothing(more):
    async with running(slo_itl_ms=1) as it:
        await it.post("/v1/completions", PROMPT)
    assert more() == "itl+ all+"
    async with running() as it:
        await it.post("/v1/completions", PROMPT)
    assert more() == "itl+ all+"


async def test_the_slowest_of_several_lines_counts(more):
    async with running(slo_ttft_ms=50_000, slo_itl_ms=500) as it:
        it.engine.between_s = 1
        content = b'{"inputs": "a"}\n{"inputs": "a b"}'
        headers = {"content-type": "application/jsonlines"}
        answer = await it.client.post("/invocations", content=content, headers=headers)
        assert answer.status_code == 200
        assert more() == "ttft+ itl- all-"
