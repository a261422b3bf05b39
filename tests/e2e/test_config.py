# SPDX-License-Identifier: Apache-2.0
"""A deployment written for LMI, served unchanged: in a container's memory, with its model in S3."""

import json
import os
import signal

import boto3
import psutil
import pytest
from moto.server import ThreadedMotoServer

from lmi_config.plan import compile_cache
from serving import folders
from tests.cgroups import killed, limited
from tests.e2e.conftest import serving
from tests.support.harness.wait import until
from tests.support.models import tiny

GIB = 1024**3
LIMIT = 6 * GIB

PROPERTIES = """
engine=Python
option.entryPoint=djl_python.lmi_vllm.vllm_async_service
option.model_id=s3://models/tiny-llama
option.tensor_parallel_degree=max
option.max_rolling_batch_size=64
option.rolling_batch=disable
option.async_mode=true
option.max_model_len=4096
option.lmcache_auto_config=true
option.speculative_config={"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}
"""


@pytest.fixture(scope="module")
def aws(tmp_path_factory):
    """S3 with the tiny model in it, as environment variables."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environ = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=environ["AWS_ENDPOINT_URL"],
        aws_access_key_id="key",
        aws_secret_access_key="hush",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="models")
    for file in tiny.make().iterdir():
        client.upload_file(str(file), "models", f"tiny-llama/{file.name}")
    client.close()
    yield environ
    server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lmi")


@pytest.fixture(scope="module")
def group():
    with limited(LIMIT) as group:
        yield group


@pytest.fixture(scope="module")
def served(aws, folder, group):
    (folder / "serving.properties").write_text(PROPERTIES)
    environ = {
        "SERVING_MODEL_STORE": str(folder),
        "SERVING_DOWNLOAD_DIR": str(folder / "downloads"),
        "OPTION_KV_DISK_PATH": str(folder / "kv"),
        "OPTION_CACHE_FOLDER": str(folder / "compiled"),
        **aws,
    }
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", "./entrypoint.sh", "serve"]
    with serving(folder / "log", *command, **environ) as it:
        it.ready()
        yield it


def logged(served):
    lines = served.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def plan(served):
    (line,) = [line for line in logged(served) if line["message"] == "plan"]
    return line["plan"]


def test_sizes_follow_the_containers_limit(served, folder):
    found = plan(served)
    assert found["machine"]["memory"] == LIMIT
    taken = sum(share["size"] for share in found["memory"]["shares"])
    assert 0 < found["tiers"]["l1_bytes"] <= LIMIT - taken
    assert found["tiers"]["disk_path"] == str(folder / "kv")


def test_options_are_read_from_the_file(served):
    options = {option["name"]: option["origin"] for option in plan(served)["options"]}
    assert options["max_rolling_batch_size"] == "serving.properties: option.max_rolling_batch_size"
    warnings = [line["message"] for line in logged(served) if line["level"] == "warning"]
    assert [line for line in warnings if line.startswith("accepted, but without effect here")]
    assert "hush" not in served.log.read_text()


def test_it_answers_and_fills_its_tiers_without_an_oom_kill(served, folder, group):
    for number in range(4):
        body = {
            "inputs": f"{number} " + "The import statement is. " * 500,
            "parameters": {"max_new_tokens": 4},
        }
        assert served.invoke(body).status_code == 200
    until(lambda: served.metric("vllm:external_prefix_cache_queries_total") > 4 * 2000)
    until(lambda: list((folder / "kv").rglob("*.data")))
    assert killed(group) == 0


def test_the_names_of_an_s3_model(served):
    names = [model.id for model in served.openai.models.list()]
    assert names == ["tiny-llama", "lmi", "s3://models/tiny-llama"]


def test_it_stops_with_its_cache_server(served, folder):
    lmcache = served.children("lmcache")
    assert len(lmcache) == 1
    os.kill(served.process.pid, signal.SIGTERM)
    assert served.process.wait(30) == 0
    assert not psutil.pid_exists(lmcache[0].pid)
    assert served.left_behind() == []
    listed = [compile_cache.manifest(part) or {} for part in (folder / "compiled").iterdir()]
    assert [any("modelinfos" in file for file in each) for each in listed] == [True]
    decision = (folders.place(str(served.port)) / "lmcache.yaml").read_text()
    assert f'local_disk: "file://{folder}/kv"\n' in decision
