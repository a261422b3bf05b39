# SPDX-License-Identifier: Apache-2.0
"""The operator's own statuses of errors."""

import json

import pytest

from tests.serving.api.test_app import JSONL, lines
from tests.serving.conftest import running
from tests.serving.inference.test_queue import filled

pytestmark = pytest.mark.anyio


async def test_overload_told_as_429():
    async with running(throttle_error_http_code=429, job_queue_size=1) as served:
        inside, behind = await filled(served, waiting=1)
        for path in ("/invocations", "/v1/completions"):
            answer = await served.post(path, {"prompt": "b"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert '"code":429' in answer.text
        served.engine.gate.set()
        for it in (*inside, *behind):
            assert (await it).status_code == 200


@pytest.mark.parametrize(
    ("option", "status", "body"),
    [
        ("bad_request_http_code", 400, {"inputs": 5}),
        ("bad_request_http_code", 422, {"inputs": "refuse"}),
        ("server_error_http_code", 502, {"inputs": "break"}),
        ("timeout_http_code", 408, {"inputs": "wait"}),
    ],
)
async def test_statuses_of_the_operators_choice(option, status, body):
    async with running(**{option: status}, predict_timeout=1) as served:
        answer = await served.invoke(body)
        assert (answer.status_code, answer.json()["code"]) == (status, status)
        answer = await served.invoke(
            f"{json.dumps(body)}\n{json.dumps(body)}".encode(), headers={"content-type": JSONL}
        )
        assert [line["code"] for line in lines(answer)] == [status] * 2


async def test_the_status_of_a_server_that_is_not_ready():
    async with running(wait=False, wlm_error_http_code=429) as served:
        served.may_start.clear()
        answer = await served.invoke({"inputs": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        served.may_start.set()
