# SPDX-License-Identifier: Apache-2.0
"""The stand-in for HyperPod's operator, up to the start of a server."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from lmi_config.options import arguments
from tests.applied import kept
from tests.support.harness.wait import until
from tools.hyperpod_local import manifest
from tools.hyperpod_local.manifest import CONNECTOR, ManifestError
from tools.hyperpod_local.operator import Operator, running, table

ROOT = Path(__file__).parents[2]
EXAMPLE = yaml.safe_load((ROOT / "examples/hyperpod/endpoint.yaml").read_text())
OURS = yaml.safe_load((ROOT / "deploy/kubernetes/hyperpod.yaml").read_text())
APART = yaml.safe_load((ROOT / "examples/hyperpod/prefill_decode.yaml").read_text())
NVME = yaml.safe_load((ROOT / "examples/hyperpod/nvme.yaml").read_text())


def changed(*path, value, document=EXAMPLE):
    """A copy with another value at the end of the path; ... removes it."""
    found = copy.deepcopy(document)
    inner = found
    for step in path[:-1]:
        inner = inner.setdefault(step, {})
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


def endpoint(*path, value, document=EXAMPLE):
    document = changed(*path, value=value, document=document)
    manifest.check(document)
    return manifest.endpoint(document)


@pytest.mark.parametrize("document", [EXAMPLE, OURS, APART, NVME])
def test_manifests_pass_the_schema(document):
    manifest.check(document)
    assert manifest.endpoint(document).replicas == document["spec"].get("replicas", 1)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("kind",), "Pod", "kind: is 'Pod', and should be InferenceEndpointConfig"),
        (("metadata", "name"), "${NAME}", "metadata.name: is '${NAME}', and should be"),
        (("spec", "worker"), ..., "spec: 'worker' is a required property"),
        (("spec", "replicas"), "2", "spec.replicas: '2' is not of type 'integer'"),
        (("spec", "kvCacheSpec", "l2Cache"), {}, "('l2Cache' was unexpected)"),
        (
            ("spec", "kvCacheSpec", "l2CacheSpec", "l2CacheBackend"),
            "memcached",
            "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend: 'memcached' does not match",
        ),
        (
            ("spec", "intelligentRoutingSpec", "routingStrategy"),
            "sticky",
            "spec.intelligentRoutingSpec.routingStrategy: 'sticky' is not one of",
        ),
        (("spec", "worker", "enviroment"), [], "('enviroment' was unexpected)"),
        (("spec", "modelCacheConfig", "weightCache"), {}, "('weightCache' was unexpected)"),
        (
            ("spec", "modelCacheConfig", "weightsCache", "hostPath"),
            "nvme",
            "spec.modelCacheConfig.weightsCache.hostPath: 'nvme' does not match",
        ),
        (
            ("spec", "modelCacheConfig", "weightsCache", "hostPath"),
            "/" + "n" * 255,
            "spec.modelCacheConfig.weightsCache.hostPath: '/nnn",
        ),
        (
            ("spec", "modelCacheConfig", "imageCache", "enabled"),
            "yes",
            "spec.modelCacheConfig.imageCache.enabled: 'yes' is not of type 'boolean'",
        ),
        (("spec", "loadBalancer", "idleTimeoutSeconds"), 0, "0 is less than the minimum of 1"),
        (("spec", "metrics", "modelMetrics", "port"), 80, "80 is less than the minimum of 1024"),
    ],
)
def test_what_a_cluster_would_not_take_is_named(path, value, fault):
    with pytest.raises(ManifestError) as refused:
        manifest.check(changed(*path, value=value))
    (line,) = str(refused.value).splitlines()
    assert fault in line


def test_all_faults_are_told_at_once():
    document = changed("spec", "replicas", value="2", document=changed("kind", value="Pod"))
    with pytest.raises(ManifestError) as refused:
        manifest.check(document)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "worker", "command"), ["vllm"], "spec.worker.command"),
        (("spec", "kvCacheSpec", "l2CacheSpec"), ..., "should be redis or tieredstorage"),
        (("spec", "dynamoSpec"), {"services": {}}, "spec.dynamoSpec: NVIDIA Dynamo would serve"),
        (
            ("spec", "modelSourceConfig"),
            {"modelSourceType": "kubernetesVolume"},
            "spec.kubernetes.volumes: has none with the name 'model-weights'",
        ),
    ],
)
def test_what_would_serve_something_else_is_refused(path, value, fault):
    with pytest.raises(ManifestError, match=fault):
        endpoint(*path, value=value)


@pytest.mark.parametrize("name", ["model-weights", "model-weights-copy"])
def test_the_operators_volumes_for_prefetching_cannot_be_taken(name):
    source = {**EXAMPLE["spec"]["modelSourceConfig"], "prefetchEnabled": True}
    document = changed("spec", "modelSourceConfig", value=source)
    volumes = [{"name": name, "hostPath": {"path": "/opt/dlami/nvme/m"}}]
    with pytest.raises(ManifestError, match=f"{name}' is a volume that the operator makes"):
        endpoint("spec", "kubernetes", "volumes", value=volumes, document=document)
    volumes[0]["name"] = "nvme-cache"
    endpoint("spec", "kubernetes", "volumes", value=volumes, document=document)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("spec", "modelCacheConfig"),
            {"weightsCache": {"enabled": True}},
            "spec.modelCacheConfig",
        ),
        (
            ("spec", "loadBalancer", "idleTimeoutSeconds"),
            600,
            "spec.loadBalancer.idleTimeoutSeconds",
        ),
        (("spec", "metricsSidecarResources"), {"limits": {"cpu": "1"}}, "metricsSidecarResources"),
        (("spec", "kubernetes", "schedulerName"), "mine", "spec.kubernetes.schedulerName"),
        (("spec", "autoScalingSpec"), {"maxReplicaCount": 3}, "spec.autoScalingSpec"),
    ],
)
def test_what_does_nothing_here_is_a_note(path, value, said):
    (note,) = endpoint(*path, value=value).notes
    assert note.startswith("checked, and without effect here: spec.")
    assert said in note


def test_a_nodes_folder_is_the_model():
    found = manifest.endpoint(NVME)
    assert str(found.folder) == "/opt/dlami/nvme/Qwen2.5-VL-7B-Instruct"
    assert "spec.kubernetes.initContainers" in found.notes[0]
    volumes = [{"name": "model-weights", "persistentVolumeClaim": {"claimName": "weights"}}]
    found = endpoint("spec", "kubernetes", "volumes", value=volumes, document=NVME)
    assert found.folder is None
    assert manifest.endpoint(EXAMPLE).folder is None
    args, _ = manifest.container(manifest.endpoint(NVME), found.roles[0], "/nvme", None, {}, 1)
    assert args[0] == "/nvme"


def pods(operator):
    """Name of each pod → its arguments and variables."""
    return {it.name: (it.program._command, it.program._environ) for it in operator.pods}


def test_prefill_and_decode_are_servers_with_these_roles(tmp_path):
    spec = changed("spec", "pdSpec", "decodingSpec", "replicas", value=2, document=APART)
    operator = Operator(manifest.endpoint(spec), model=str(tmp_path), port=0, folder=tmp_path)
    found = pods(operator)
    assert list(found) == ["prefill-apart-1", "decode-apart-1", "decode-apart-2"]
    router = operator.router.program._environ
    assert operator.store
    for name, (args, environ) in found.items():
        assert environ["OPTION_SERVER_ROLE"] == name.partition("-")[0]
        assert environ["OPTION_ROUTER_SECRET"] == router["OPTION_ROUTER_SECRET"]
        assert environ["LMCACHE_REMOTE_URL"] == f"redis://127.0.0.1:{operator.store.port}"
        lengths = [args[n + 1] for n, it in enumerate(args) if it == "--max-num-batched-tokens"]
        assert lengths == (["8192"] if name.startswith("prefill") else [])
    assert len(router["OPTION_ROUTER_SECRET"]) == 64
    assert router["OPTION_ROUTER_PREFILL_TOKENS"] == "4096"
    assert router["OPTION_ROUTING_STRATEGY"] == "prefixaware"
    assert router["OPTION_ROUTER_REPLICAS"].count("http://") == 3


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("decodingSpec",), ..., "spec.pdSpec: 'decodingSpec' is a required property"),
        (("decodeSpec",), {}, "spec.pdSpec: Additional properties are not allowed ('decodeSpec'"),
        (("prefillSpec", "replicas"), 0, "spec.pdSpec.prefillSpec.replicas: 0 is less than the"),
        (("routingThreshold",), -1, "spec.pdSpec.routingThreshold: -1 is less than the minimum"),
    ],
)
def test_faults_of_pdspec_are_named(path, value, fault):
    with pytest.raises(ManifestError) as refused:
        endpoint("spec", "pdSpec", *path, value=value, document=APART)
    (line,) = str(refused.value).splitlines()
    assert fault in line


@pytest.mark.parametrize(("threshold", "tokens"), [(..., "4096"), (0, "1"), (100, "100")])
def test_the_threshold_is_the_routers(threshold, tokens, tmp_path):
    found = endpoint("spec", "pdSpec", "routingThreshold", value=threshold, document=APART)
    operator = Operator(found, model=str(tmp_path), port=0, folder=tmp_path)
    assert operator.router.program._environ["OPTION_ROUTER_PREFILL_TOKENS"] == tokens


def test_a_roles_argument_replaces_the_workers(tmp_path):
    args = ["--max-model-len", "9000"]
    found = endpoint("spec", "pdSpec", "prefillSpec", "args", value=args, document=APART)
    operator = Operator(found, model=str(tmp_path), port=0, folder=tmp_path)
    for name, (command, environ) in pods(operator).items():
        called = arguments.called(command[1:], environ)
        assert called
        verb, words, _ = called
        lasting = arguments.read(verb, words)["OPTION_MAX_MODEL_LEN"].text
        assert lasting == ("9000" if name.startswith("prefill") else "16384")


def test_pods_whose_arguments_name_one_port_have_each_their_own(tmp_path):
    """AWS's examples set `--host 0.0.0.0 --port 8000`."""
    operator = Operator(manifest.endpoint(APART), model=str(tmp_path), port=0, folder=tmp_path)
    for pod in operator.pods:
        called = arguments.called(pod.program._command[1:], pod.program._environ)
        assert called
        found = arguments.read(called[0], called[1])
        assert found["OPTION_PORT"].text == str(pod.program.port)
        assert found["OPTION_HOST"].text == "127.0.0.1"


@pytest.mark.parametrize("strategy", ["roundrobin", "session"])
def test_a_strategy_that_chooses_the_prefill_pod_is_said_to_count_for_nothing(strategy, tmp_path):
    routing = {"enabled": True, "routingStrategy": strategy}
    found = endpoint("spec", "intelligentRoutingSpec", value=routing, document=APART)
    assert found.strategy == "prefixaware"
    assert f"{strategy} chooses among the prefill pods" in found.notes[-1]
    assert endpoint("spec", "intelligentRoutingSpec", value=..., document=APART).strategy


def test_the_secret_is_the_operators_own_where_there_is_one(tmp_path):
    mine = [{"name": "OPTION_ROUTER_SECRET", "value": "0123456789abcdef" * 2}]
    found = endpoint("spec", "worker", "environmentVariables", value=mine, document=APART)
    operator = Operator(found, model=str(tmp_path), port=0, folder=tmp_path)
    assert operator.router.program._environ["OPTION_ROUTER_SECRET"] == mine[0]["value"]


def test_lmcaches_own_file_cannot_say_where_kv_is_handed_over():
    with pytest.raises(ManifestError, match=r"cacheConfigFile: with pdSpec"):
        endpoint("spec", "kvCacheSpec", "cacheConfigFile", value="/a.yaml", document=APART)


def test_the_schemas_defaults_hold():
    found = endpoint("spec", "loadBalancer", value=...)
    assert found.health == "/ping"
    found = endpoint("spec", "kvCacheSpec", value=...)
    assert (found.l1, found.l2, found.seconds) == (True, None, 3600)
    found = endpoint("spec", "intelligentRoutingSpec", value={"enabled": True})
    assert found.strategy == "prefixaware"
    assert endpoint("spec", "intelligentRoutingSpec", value=...).strategy is None


EXTRA = {"sagemaker_hyperpod_shared_memory_name": "segment"}
L1 = {"LMCACHE_LOCAL_CPU": "true", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1"}


@pytest.mark.parametrize(
    ("path", "value", "url", "extra", "added"),
    [
        (
            ("spec", "replicas"),
            1,
            "sagemaker-hyperpod://$(NODE_IP):9200",
            EXTRA,
            {
                **L1,
                "LMCACHE_REMOTE_URL": "sagemaker-hyperpod://127.0.0.1:9200",
                "LMCACHE_REMOTE_SERDE": "naive",
                "LMCACHE_EXTRA_CONFIG": json.dumps(EXTRA),
            },
        ),
        (("spec", "kvCacheSpec"), {"enableL1Cache": True}, None, {}, L1),
        (
            ("spec", "kvCacheSpec", "enableL1Cache"),
            False,
            "redis://127.0.0.1:1",
            {},
            {
                **L1,
                "LMCACHE_LOCAL_CPU": "false",
                "LMCACHE_REMOTE_URL": "redis://127.0.0.1:1",
                "LMCACHE_REMOTE_SERDE": "naive",
            },
        ),
        (
            ("spec", "kvCacheSpec", "cacheConfigFile"),
            "/opt/ml/model/lmcache.yaml",
            "redis://127.0.0.1:1",
            {},
            {"LMCACHE_CONFIG_FILE": "/here/lmcache.yaml"},
        ),
        (("spec", "kvCacheSpec"), {"enableL1Cache": False}, None, {}, {}),
    ],
)
def test_what_the_operator_adds_for_kv_caches(path, value, url, extra, added):
    found = endpoint(*path, value=value)
    args, environ = manifest.container(found, found.roles[0], "/here", url, extra, 1)
    assert args[:2] == ["--model", "/here"]
    assert (args[-2:] == ["--kv-transfer-config", CONNECTOR]) == bool(added)
    assert {name: it for name, it in environ.items() if name.startswith("LMCACHE_")} == added
    assert environ["NODE_IP"] == "127.0.0.1"
    assert environ["MODEL_CACHE_ROOT"] == "/here"


def test_variables_are_made_as_kubernetes_makes_them():
    variables = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "URL", "value": "redis://$(NODE):1"},
        {"name": "LATER", "value": "$(NOT_THERE)"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
    ]
    found = endpoint("spec", "worker", "environmentVariables", value=variables)
    assert found.environ == {
        "NODE": "127.0.0.1",
        "URL": "redis://127.0.0.1:1",
        "LATER": "$(NOT_THERE)",
    }


def test_a_container_that_listens_elsewhere_is_refused(tmp_path):
    """The load balancer would never consider it healthy."""
    for args, port in ((EXAMPLE["spec"]["worker"]["args"], 8000), (["serve"], 8080), ([], 8080)):
        assert manifest.listens(args, {}) == port
    found = dataclasses.replace(manifest.endpoint(EXAMPLE), args=["serve"], l2=None)
    with pytest.raises(
        ManifestError, match="containerPort: is 8000, and the container listens on 8080"
    ):
        Operator(found, model=str(tmp_path), port=0, folder=tmp_path)


def test_a_mistyped_argument_is_refused_before_anything_starts(tmp_path):
    document = changed("spec", "worker", "args", value=["--max-modle-len", "5"])
    (tmp_path / "endpoint.yaml").write_text(yaml.safe_dump(document))
    words = ("apply", str(tmp_path / "endpoint.yaml"), "--model", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-m", "tools.hyperpod_local", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "--max-modle-len: no such option; did you mean --max-model-len?" in ended.stderr


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware", "session", "roundrobin"])
def test_the_router_and_the_replicas_follow_the_strategy(strategy, tmp_path):
    found = endpoint("spec", "intelligentRoutingSpec", "routingStrategy", value=strategy)
    operator = Operator(found, model=str(tmp_path), port=0, folder=tmp_path)
    environ = operator.router.program._environ
    assert environ["OPTION_ROUTING_STRATEGY"] == strategy
    assert environ["OPTION_ROUTER_REPLICAS"] == operator.pods[0].program.url
    assert ("OPTION_KV_EVENTS" in operator.pods[0].program._environ) == (strategy == "kvaware")


@pytest.fixture
def applied(tmp_path, monkeypatch):
    """The example with two replicas, each of them a stub that ignores all arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stub = tmp_path / "image"
    program = ROOT / "tests/support/harness/stub_replica.py"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$OPTION_PORT"\n')
    stub.chmod(0o755)
    found = dataclasses.replace(manifest.endpoint(EXAMPLE), replicas=2)
    operator = Operator(found, model=str(tmp_path), port=0, folder=tmp_path, image=[str(stub)])
    with kept(operator) as said:
        yield operator, said
    assert running() == []
    assert not [*Path("/dev/shm").glob(f"ai_toolkit_cache-{os.getpid()}*")]
    assert operator.store
    programs = [operator.router.program, *(it.program for it in operator.pods), operator.store]
    assert not [it for it in programs if it.process.poll() is None]


def test_an_endpoint_runs_and_its_replicas_are_started_again(applied):
    operator, said = applied
    url = operator.url + operator.endpoint.invocation
    assert httpx.post(url, json={"messages": []}).headers["x-replica"]
    assert httpx.get(f"{operator.url}/health").status_code == 200
    assert operator.store.listens()
    until(lambda: f"ask it: curl {url}" in said)
    operator.pods[0].program.kill()
    until(lambda: operator.pods[0].restarts == 1)
    until(lambda: operator.complete)
    assert any("CrashLoopBackOff" in it for it in said)
    assert any(it.startswith("demo-1 ended with exit code -9") for it in said)
    until(lambda: running()[0]["endpoint"]["STATE"] == "DeploymentComplete")
    (shown,) = running()
    assert [it["RESTARTS"] for it in shown["pods"]] == [1, 0, 0]
    assert [it["NAME"] for it in shown["pods"]] == ["demo-1", "demo-2", "demo-default-router"]


def test_a_table_is_as_kubectl_prints_it():
    rows = [{"NAME": "demo", "AGE": "8s"}, {"NAME": "demonstration", "AGE": "12s"}]
    assert table(rows) == "NAME            AGE\ndemo            8s\ndemonstration   12s"
