# SPDX-License-Identifier: Apache-2.0
"""Starts whose weights are fetched from S3 while vLLM starts."""

import threading

import pytest

from serving.exit import START_FAILED
from tests.e2e.conftest import serving
from tests.s3_server import Watched
from tests.support.harness.wait import until
from tests.support.models import tiny

BUCKET, NAME = "models", "tiny-shards"
FILES = sorted(file.name for file in tiny.make_shards().iterdir())
SHARDS = [name for name in FILES if name.endswith(".safetensors")]
READING = "Filesystem type for checkpoints"  # vLLM's log line when it opens the first file
GREEDY = {"prompt": "The import statement is", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def bucket():
    """S3 with the model in several files."""
    made = Watched()
    thread = threading.Thread(target=made.server.serve_forever, args=[0.05])
    thread.start()
    made.client.create_bucket(Bucket=BUCKET)
    for name in FILES:
        made.client.upload_file(str(tiny.make_shards() / name), BUCKET, f"{NAME}/{name}")
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def s3(bucket):
    """The last file is only sent once its gate is open."""
    bucket.reset()
    bucket.held.add(f"{NAME}/{SHARDS[-1]}")
    bucket.gate.clear()
    yield bucket
    bucket.gate.set()


def options(s3, downloads, **more):
    return {
        "OPTION_MODEL_ID": f"s3://{BUCKET}/{NAME}",
        "SERVING_DOWNLOAD_DIR": str(downloads),
        "OPTION_MAX_MODEL_LEN": "2048",
        "OPTION_KV_CACHE_MEMORY_BYTES": "256M",
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        **more,
    }


def reads(served, downloads):
    """Whether vLLM reads weights. The last file cannot be there."""
    assert not [*downloads.glob(f"*/{SHARDS[-1]}")]
    return READING in served.logged()


def text(served):
    answer = served.client.post("/v1/completions", json={"model": "lmi", **GREEDY})
    return answer.raise_for_status().json()["choices"][0]["text"]


def test_vllm_loads_weights_while_others_are_fetched(s3, tmp_path):
    downloads = tmp_path / "models"
    with serving(tmp_path / "first", **options(s3, downloads)) as served:
        until(lambda: reads(served, downloads), 400)
        assert served.client.get("/ping").status_code == 503
        s3.gate.set()
        served.ready()
        early = text(served)
    fetched = {key.removeprefix(f"{NAME}/") for key in s3.fetched}
    assert fetched == {*FILES}
    s3.fetched.clear()
    with serving(tmp_path / "second", **options(s3, downloads)) as served:
        served.ready()
        assert text(served) == early
    assert s3.fetched == []


def test_a_fetch_that_fails_while_vllm_starts_is_the_reason(s3, tmp_path):
    downloads = tmp_path / "models"
    log = tmp_path / "log"
    with serving(log, **options(s3, downloads)) as served:
        until(lambda: reads(served, downloads), 400)
        s3.client.put_object(Bucket=BUCKET, Key=f"{NAME}/{SHARDS[-1]}", Body=b"of another model")
        s3.gate.set()
        until(lambda: served.process.poll() is not None, 200)
        assert served.process.wait(1) == START_FAILED
        *_, last = log.read_text().splitlines()
        assert "an object changed while it was fetched; start again" in last
    assert served.left_behind() == []
