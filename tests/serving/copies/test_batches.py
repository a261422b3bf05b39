# SPDX-License-Identifier: Apache-2.0
"""Batches of a container with two copies: both answer the lines, and lines survive each copy."""

import json
import time

import httpx
import pytest

from tests.serving.copies.test_supervisor import Container
from tests.support.harness import metrics
from tests.support.harness.wait import until

LINES = 60
LONGEST = 20_000
"""Bytes of another copy's answer."""


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    environ = {"OPTION_BATCH_FOLDER": str(folder / "batches"), "COPY_SLOW": "0.3"}
    with Container(folder, **environ, COPY_LONGEST=str(LONGEST)) as it:
        it.ready(120)
        yield it


def begun(container, prompts, max_tokens=2):
    """The id of a new batch."""
    requests = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": max_tokens},
        }
        for n, prompt in enumerate(prompts)
    ]
    content = "".join(json.dumps(it) + "\n" for it in requests)
    url = f"{container.url}/v1"
    file = httpx.post(f"{url}/files", files={"file": content}, data={"purpose": "batch"}).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return httpx.post(f"{url}/batches", json=body).json()["id"]


def looked(container, batch):
    for _ in range(20):
        answer = container.get(f"/v1/batches/{batch}")
        if answer.status_code == 200:
            return answer.json()
        time.sleep(0.2)  # the router does not know yet that a copy has ended
    raise AssertionError(answer.text)


def ended(container, batch):
    until(lambda: looked(container, batch)["status"] == "completed", 120)
    return looked(container, batch)


def answers(container, file):
    lines = container.get(f"/v1/files/{file}/content").text.splitlines()
    return [json.loads(line) for line in lines]


def generated(container):
    """Generated tokens, by the copy."""
    text = container.get("/metrics").text
    found = {"0": 0.0, "1": 0.0}
    for it in metrics.samples(text, "slipway_tokens_total"):
        if it.labels["direction"] == "output":
            found[it.labels["copy"]] += it.value
    return found


def test_both_copies_answer_lines_and_each_line_is_counted_once(container):
    before = generated(container)
    batch = ended(container, begun(container, [f"a{n} b" for n in range(LINES)]))
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    found = answers(container, batch["output_file_id"])
    texts = {it["custom_id"]: it["response"]["body"]["choices"][0]["text"] for it in found}
    assert len(found) == LINES
    assert all(f"a{n}" in texts[f"line-{n}"] for n in range(LINES))
    more = {copy: count - before[copy] for copy, count in generated(container).items()}
    assert sum(more.values()) == 2 * LINES
    assert min(more.values()) > 0.25 * LINES


def test_errors_of_another_copys_engine_are_those_of_ones_own(container):
    prompts = ["refuse", "break"] * 8
    batch = ended(container, begun(container, prompts))
    assert batch["request_counts"] == {"total": 16, "completed": 0, "failed": 16}
    found = answers(container, batch["error_file_id"])
    statuses = {(it["custom_id"], it["response"]["status_code"]) for it in found}
    assert statuses == {(f"line-{n}", (400, 500)[n % 2]) for n in range(16)}
    bodies = {json.dumps(it["response"]["body"]) for it in found}
    assert len(bodies) == 2


def test_another_copys_answer_that_is_too_long_is_its_lines_error(container):
    words = LONGEST // 4
    batch = ended(container, begun(container, ["word " * words] * 8, max_tokens=words))
    assert 0 < batch["request_counts"]["failed"] < 8, "this copy's own engine has answered some"
    for it in answers(container, batch["error_file_id"]):
        assert it["response"]["status_code"] == 400
        assert f"longer than {LONGEST} bytes; ask for fewer" in json.dumps(it["response"]["body"])


def test_a_batch_goes_on_when_another_copy_hangs(container):
    batch = begun(container, [f"a{n} b" for n in range(LINES)])
    until(lambda: looked(container, batch)["request_counts"]["completed"] > LINES / 10, 60)
    _, copies = container.parts()
    (other,) = [it for it in copies if not runs_batches(it)]
    other.suspend()
    try:
        done = ended(container, batch)
    finally:
        other.resume()
    assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}


def runs_batches(copy):
    return any(it.path.endswith(".lock") for it in copy.open_files())


@pytest.mark.parametrize("number", [0, 1])
def test_a_batch_goes_on_when_a_copy_ends(container, number):
    """The batch runs in one of the two copies."""
    until(container.both, 120)
    batch = begun(container, [f"a{n} b" for n in range(LINES)])
    until(lambda: looked(container, batch)["request_counts"]["completed"] > LINES / 10, 60)
    container.parts()[1][number].kill()
    done = ended(container, batch)
    assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    found = answers(container, done["output_file_id"])
    assert len({it["custom_id"] for it in found}) == len(found) == LINES
