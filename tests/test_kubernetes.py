# SPDX-License-Identifier: Apache-2.0
"""The manifests: valid by the schemas, consistent with each other, and with the behaviour of the
programs.

Kubernetes' own objects are checked by its schemas, and operators' objects by the operators' schemas
(custom_resources.py; HyperPod's in tools/hyperpod_local). Pods within them are checked by
Kubernetes' schemas again.
"""

import asyncio
import copy
import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.testclient import TestClient

from lmi_config.options import settings
from lmi_config.options.declared import Settings
from lmi_config.options.parsers import Endpoints, replica_source
from lmi_config.plan import shared_store, vllm
from lmi_config.plan.devices.parallelism import copies
from serving.access.access import Access
from serving.api.app import create_app
from serving.api.backend import Backend
from serving.inference import queue
from serving.lifecycle import SHUTDOWN, Lifecycle
from serving.router import metrics
from serving.router.http.buffers import Buffers
from serving.router.http.forwarded_request import Request
from serving.router.router import Router
from tests import custom_resources
from tools.hyperpod_local import manifest
from tools.hyperpod_local.manifest import ManifestError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/kubernetes"
VERSIONS = ("1.30", "1.34", kubernetes_validate.latest_version())
"""The oldest version with all fields in use, a usual one, and the newest with a known schema."""

Document = dict[str, Any]


def _documents(text: str) -> list[Document]:
    return list(yaml.safe_load_all(text))


MANIFESTS = {
    file.name: _documents(file.read_text())
    for file in sorted(FOLDER.glob("*.yaml"))
    if file.name != "kustomization.yaml"
}
DOCUMENTS = [(name, document) for name, found in MANIFESTS.items() for document in found]
SETS = (
    ("server.yaml", "router.yaml", "autoscaling.yaml", "monitoring.yaml", "shared_cache.yaml"),
    ("multi_node.yaml", "router.yaml", "monitoring.yaml"),
)
"""Manifests that are applied together."""

# --- schemas ---------------------------------------------------------------------------------


def check(document: Document) -> None:
    """Raise jsonschema.ValidationError or ManifestError if a cluster would refuse the document, or
    drop a part of it.
    """
    spec = document.get("spec", {})
    if document["kind"] == manifest.KIND:
        manifest.check(document)
    elif not custom_resources.checked(document):
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        return
    for template in templates(document):
        check({"apiVersion": "v1", "kind": "Pod", **template})
    if "scaleTargetRef" in spec:
        scaler = {
            "scaleTargetRef": {"kind": "Deployment", **spec["scaleTargetRef"]},
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        }
        kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
        check({**kind, "metadata": document["metadata"], "spec": scaler})


def templates(document: Document) -> Iterator[Document]:
    """The pods that a document makes: metadata and spec."""
    spec = document.get("spec", {})
    if "template" in spec:
        yield spec["template"]
    elif "leaderWorkerTemplate" in spec:
        for name in ("leaderTemplate", "workerTemplate"):
            template = copy.deepcopy(spec["leaderWorkerTemplate"][name])
            labels = template.setdefault("metadata", {}).setdefault("labels", {})
            labels["leaderworkerset.sigs.k8s.io/name"] = document["metadata"]["name"]
            yield template
    elif "worker" in spec:
        worker = copy.deepcopy(spec["worker"])
        container = {
            "name": "worker",
            "ports": [worker.pop("modelInvocationPort")],
            "volumeMounts": [worker.pop("modelVolumeMount")],
            "env": worker.pop("environmentVariables"),
            **worker.pop("probes"),
            **worker,
        }
        yield {"metadata": document["metadata"], "spec": {"containers": [container]}}


class Part(NamedTuple):
    """A container, its pod, and the file that declares it."""

    file: str
    pod: Document
    container: Document

    @property
    def verb(self) -> str:
        return str(self.container["args"][0])

    def environment(self) -> dict[str, str]:
        """Its variables; references to other objects get placeholders."""
        found = {}
        for variable in self.container.get("env", ()):
            value = variable.get("value", "from-elsewhere" * 3)
            found[variable["name"]] = re.sub(r"\$\((\w+)\)", r"\1", value)
        return found

    def settings(self) -> Settings:
        return settings.read(self.environment())


def parts(documents: list[tuple[str, Document]]) -> list[Part]:
    return [
        Part(file, template, container)
        for file, document in documents
        for template in templates(document)
        for container in template["spec"]["containers"]
    ]


PARTS = parts(DOCUMENTS)
OURS = [it for it in PARTS if it.verb in ("serve", "route")]


def _commented_in(name: str) -> str:
    """A file's text with its commented proposals switched on."""
    return re.sub(r"(?m)^( *)# (- \{|- name: |  )", r"\1\2", (FOLDER / name).read_text())


@pytest.mark.parametrize(("file", "document"), DOCUMENTS)
def test_manifests_are_valid(file: str, document: Document) -> None:
    check(document)


def _path(document: Document, *path: str | int) -> Any:
    found: Any = document
    for step in path:
        found = found[step]
    return found


POD = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("file", "path", "change"),
    [
        ("server.yaml", (*POD, "containers", 0), {"readynessProbe": {}}),
        ("server.yaml", (*POD, "containers", 0, "env", 0), {"value": 1}),
        ("server.yaml", (*POD, "containers", 0, "lifecycle", "preStop", "sleep"), {"seconds": "9"}),
        ("autoscaling.yaml", ("spec", "triggers", 0, "metadata"), {"threshold": 32}),
        ("autoscaling.yaml", ("spec", "scaleTargetRef"), {"nmae": "x"}),
        (
            "autoscaling.yaml",
            ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior", "scaleUp"),
            {"policies": [{"type": "Pods"}]},
        ),
        ("monitoring.yaml", ("spec", "podMetricsEndpoints", 0), {"interval": "15"}),
        ("multi_node.yaml", ("spec",), {"startupPolicy": "Leader"}),
        (
            "multi_node.yaml",
            ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
            {"volume": []},
        ),
        ("hyperpod.yaml", ("spec", "intelligentRoutingSpec"), {"routingStrategy": "sticky"}),
        ("hyperpod.yaml", ("spec", "worker", "probes", "startupProbe"), {"period": 1}),
    ],
)
def test_what_is_wrong_is_found(file: str, path: tuple[str | int, ...], change: Document) -> None:
    document = copy.deepcopy(MANIFESTS[file][0])
    _path(document, *path).update(change)
    with pytest.raises((jsonschema.ValidationError, ManifestError)):
        check(document)


def test_what_comments_propose_is_valid() -> None:
    assert _commented_in("server.yaml") != (FOLDER / "server.yaml").read_text()
    documents = _documents(_commented_in("server.yaml"))
    for document in documents:
        check(document)
    (it,) = parts([("server.yaml", document) for document in documents])
    assert {"name": "kv", "mountPath": "/tmp/lmcache"} in it.container["volumeMounts"]
    assert it.pod["spec"]["volumes"][-1]["ephemeral"]
    assert {"name": "compiled", "mountPath": "/compiled"} in it.container["volumeMounts"]
    assert str(it.settings().cache_folder).startswith("/compiled/")
    (store,) = (one for one in MANIFESTS["shared_cache.yaml"] if one["kind"] == "Service")
    assert it.settings().kv_l2_url == f"redis://{store['metadata']['name']}"
    mounted = f"/dev/shm/{shared_store.SEGMENT}"
    volumes = {volume["name"]: volume.get("hostPath") for volume in it.pod["spec"]["volumes"]}
    assert volumes["tiered-storage"] == {"path": mounted, "type": "File"}
    assert mounted in [mount["mountPath"] for mount in it.container["volumeMounts"]]
    assert shared_store.read("tieredstorage://", it.environment())
    assert store["spec"]["ports"][0]["port"] == 6379


def test_other_sources_that_hyperpods_comments_propose_are_valid() -> None:
    text = (FOLDER / "hyperpod.yaml").read_text()
    proposed = re.findall(r"(?m)^  # modelSourceConfig:\n(?:  # (?:  .*|kubernetes:)\n)+", text)
    (document,) = MANIFESTS["hyperpod.yaml"]
    kinds = [document["spec"]["modelSourceConfig"]["modelSourceType"]]
    for block in proposed:
        other = copy.deepcopy(document)
        other["spec"] |= yaml.safe_load(re.sub(r"(?m)^  # ", "", block))
        check(other)
        source = other["spec"]["modelSourceConfig"]
        kinds.append(source["modelSourceType"])
        asked = manifest.endpoint(other)
        assert asked.hub_id == source.get("huggingFaceModel", {}).get("modelId")
        mounted = other["spec"]["worker"]["modelVolumeMount"]["name"]
        for volume in other["spec"].get("kubernetes", {}).get("volumes", ()):
            assert volume["name"] == mounted
    assert kinds == ["s3", "huggingface", "fsx", "kubernetesVolume", "kubernetesVolume"]


def test_the_caches_that_hyperpods_comments_propose_are_valid() -> None:
    text = (FOLDER / "hyperpod.yaml").read_text()
    (proposed,) = re.findall(r"(?m)^  # modelCacheConfig:\n(?:  #   .*\n)+", text)
    (document,) = copy.deepcopy(MANIFESTS["hyperpod.yaml"])
    document["spec"] |= yaml.safe_load(re.sub(r"(?m)^  # ", "", proposed))
    check(document)
    assert any("spec.modelCacheConfig" in it for it in manifest.endpoint(document).notes)


def test_kustomization_names_the_files() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    base = yaml.safe_load(text)
    everything = yaml.safe_load(re.sub(r"(?m)^( *)# - ", r"\1- ", text))
    assert base["resources"] == ["server.yaml", "router.yaml"]
    assert {*everything["resources"], "hyperpod.yaml"} == {*MANIFESTS}
    assert [it["name"] for it in base["images"]] == ["slipway"]
    assert {it.container["image"] for it in OURS if it.file != "hyperpod.yaml"} == {"slipway"}


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part", OURS, ids=lambda part: f"{part.file}-{part.verb}")
def test_options_can_be_used(part: Part) -> None:
    asked = part.settings()
    assert not asked.notes
    others = {"HF_TOKEN", "VLLM_HOST_IP", "SESSION_KEY"}
    assert {name for name in part.environment() if not name.startswith("OPTION_")} <= others
    assert [it["containerPort"] for it in part.container["ports"] if it["name"] == "http"] == [
        asked.port
    ]
    assert (asked.router_replicas is not None) == (part.verb == "route")


def test_router_and_servers_agree() -> None:
    serves = [it for it in OURS if it.file == "server.yaml"]
    (routes,) = (it for it in OURS if it.verb == "route")
    assert {it.settings().model_id for it in serves} == {routes.settings().model_id}
    assert routes.settings().routing_strategy == "kvaware"


@pytest.mark.parametrize(
    "part", [it for it in OURS if it.settings().kv_events], ids=lambda part: part.file
)
def test_kv_events_have_their_ports(part: Part) -> None:
    settings = part.settings()
    count = copies(settings)
    assert not vllm.kv_events_faults(settings, count)
    ports = {it["name"]: it["containerPort"] for it in part.container["ports"]}
    assert (ports["kv-events"], ports["kv-events-log"]) == vllm.kv_event_ports(settings, count)


def test_the_nodes_of_a_group_agree() -> None:
    leader, worker = (it for it in PARTS if it.file == "multi_node.yaml")
    group = MANIFESTS["multi_node.yaml"][0]["spec"]["leaderWorkerTemplate"]
    command = worker.container["args"]
    given = dict(it[2:].split("=", 1) for it in command if "=" in it)
    known = json.loads((ROOT / "lmi_config/options/vllm_options.json").read_text())
    assert {name.replace("-", "_") for name in given} <= known.keys()
    asked = leader.settings()
    assert command[:4] == ["vllm", "serve", asked.model_id, "--headless"]
    assert given == {
        "max-model-len": str(asked.max_model_len),
        "tensor-parallel-size": str(asked.tensor_parallel_degree),
        "pipeline-parallel-size": str(asked.pipeline_parallel_degree),
        "distributed-executor-backend": asked.engine["distributed_executor_backend"],
        "nnodes": str(asked.engine["nnodes"]),
        "node-rank": "$(LWS_WORKER_INDEX)",
        "master-addr": "$(LWS_LEADER_ADDRESS)",
    }
    assert asked.engine["node_rank"] == 0
    assert asked.engine["nnodes"] == group["size"]
    assert asked.engine["master_addr"] == "LWS_LEADER_ADDRESS"
    gpus = int(leader.container["resources"]["limits"]["nvidia.com/gpu"])
    degree = asked.tensor_parallel_degree
    assert isinstance(degree, int)
    assert degree * asked.pipeline_parallel_degree == gpus * group["size"]
    assert not asked.lmcache_auto_config


# --- how they find each other ----------------------------------------------------------------


def _of(kind: str, files: tuple[str, ...]) -> list[Document]:
    return [it for name, it in DOCUMENTS if name in files and it["kind"] == kind]


def _selected(selector: Mapping[str, str], pods: list[Document]) -> list[Document]:
    return [it for it in pods if selector.items() <= it["metadata"]["labels"].items()]


def _ports(pods: list[Document]) -> set[str]:
    return {
        port["name"]
        for pod in pods
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }


@pytest.mark.parametrize("files", SETS)
def test_the_router_finds_the_servers(files: tuple[str, ...]) -> None:
    pods = [it.pod for it in PARTS if it.file in files]
    (router,) = (it for it in OURS if it.verb == "route")
    source = replica_source(router.settings().router_replicas or "")
    assert isinstance(source, Endpoints)
    assert source.namespace == ""  # its own
    wanted = dict(it.split("=") for it in source.selector.split(","))
    found = []
    for service in _of("Service", files):
        # An EndpointSlice has the labels of its Service, and one with the Service's name.
        name = service["metadata"]["name"]
        labels = {**service["metadata"]["labels"], "kubernetes.io/service-name": name}
        if wanted.items() <= labels.items():
            found.append(service)
    (service,) = found
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]
    assert source.port in {it["name"] for it in service["spec"]["ports"]}
    serving = [it for it in OURS if it.verb == "serve" and it.file in files]
    assert _selected(service["spec"]["selector"], pods) == [it.pod for it in serving]


@pytest.mark.parametrize("files", SETS)
def test_selectors_select(files: tuple[str, ...]) -> None:
    pods = [it.pod for it in PARTS if it.file in files]
    for service in _of("Service", files):
        selected = _selected(service["spec"]["selector"], pods)
        assert {it["targetPort"] for it in service["spec"]["ports"]} <= _ports(selected)
    for kind in ("PodDisruptionBudget", "PodMonitor", "Deployment"):
        for document in _of(kind, files):
            assert _selected(document["spec"]["selector"]["matchLabels"], pods)
    for monitor in _of("PodMonitor", files):
        selected = _selected(monitor["spec"]["selector"]["matchLabels"], pods)
        assert {it["port"] for it in monitor["spec"]["podMetricsEndpoints"]} <= _ports(selected)
    for budget in _of("PodDisruptionBudget", files):
        assert len(_selected(budget["spec"]["selector"]["matchLabels"], pods)) == 1
    for target in _of("ScaledObject", files):
        names = {it["metadata"]["name"] for it in _of("Deployment", files)}
        assert target["spec"]["scaleTargetRef"]["name"] in names


@pytest.mark.parametrize("files", SETS)
def test_only_the_router_and_prometheus_reach_the_servers(files: tuple[str, ...]) -> None:
    pods = [it.pod for it in PARTS if it.file in files]
    (router,) = (it.pod for it in OURS if it.verb == "route")
    reached: dict[str, set[str]] = {}
    for policy in _of("NetworkPolicy", files):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        selected = _selected(policy["spec"]["podSelector"]["matchLabels"], pods)
        for rule in policy["spec"]["ingress"]:
            named = {it["port"] for it in rule.get("ports", ())}
            assert named <= _ports(selected)
            for peer in rule["from"]:
                if "namespaceSelector" in peer:
                    assert named == {"http"}
                    continue
                allowed = _selected(peer["podSelector"]["matchLabels"], pods)
                assert allowed
                if allowed == [router]:
                    names = {it["spec"]["containers"][0]["name"] for it in selected}
                    reached.update(dict.fromkeys(names, named))
    assert reached["server"] == {"http", "kv-events", "kv-events-log"}


def test_the_role_is_the_one_that_discovery_needs() -> None:
    role, binding = (
        next(it for it in MANIFESTS["router.yaml"] if it["kind"] == kind)
        for kind in ("Role", "RoleBinding")
    )
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        }
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (router,) = (it for it in OURS if it.verb == "route")
    assert binding["subjects"][0]["name"] == router.pod["spec"]["serviceAccountName"]


# --- life ------------------------------------------------------------------------------------


async def _routed(path: str) -> int:
    """The answer of a router without replicas."""
    statuses: list[int] = []
    client: Any = SimpleNamespace(respond=lambda status, *rest: statuses.append(status))
    request = Request(b"GET", path.encode(), "1.1", [], Buffers(), keep_alive=True)
    Router(Settings(), {}).dispatch(client, request)
    return statuses[0]


def test_probes_ask_what_is_answered() -> None:
    app: Any = create_app(Backend(Lifecycle(), Settings()), Settings(), Access(Settings()))
    client = TestClient(app)
    for it in OURS:
        probes = {name: it.container[name] for name in it.container if name.endswith("Probe")}
        assert probes.keys() == {"startupProbe", "readinessProbe", "livenessProbe"}
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        if it.verb == "serve":
            assert {*paths.values()} == {"/ping"}
            assert client.get("/ping").status_code == 503  # it has no engine yet
            continue
        # A start without replicas does not succeed; a router that has lost them serves on.
        statuses = {name: asyncio.run(_routed(path)) for name, path in paths.items()}
        assert statuses == {"startupProbe": 503, "readinessProbe": 200, "livenessProbe": 200}


@pytest.mark.parametrize("part", OURS, ids=lambda part: f"{part.file}-{part.verb}")
def test_starts_fail_with_a_reason_first(part: Part) -> None:
    probe = part.container["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    if part.verb == "serve":
        assert (part.settings().model_loading_timeout or 0) < allowed
    for document in MANIFESTS[part.file]:
        spec = document["spec"] if document["kind"] == "Deployment" else {}
        assert spec.get("progressDeadlineSeconds", allowed + 1) > allowed


@pytest.mark.parametrize(
    "part",
    [it for it in OURS if it.file != "hyperpod.yaml"],
    ids=lambda part: f"{part.file}-{part.verb}",
)
def test_the_end_has_time(part: Part) -> None:
    drains = sum(SHUTDOWN)
    if part.verb == "route":
        drains = SHUTDOWN.drain
    sleeps = part.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert part.pod["spec"]["terminationGracePeriodSeconds"] >= sleeps + drains
    if part.file == "multi_node.yaml":  # workers stay until the leader has finished
        (worker,) = (it for it in PARTS if it.file == part.file and it is not part)
        stays = worker.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert stays >= sleeps + SHUTDOWN.drain
        assert worker.pod["spec"]["terminationGracePeriodSeconds"] > stays


# --- resources and rights --------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.file}-{part.verb}")
def test_memory_is_asked_for_in_full(part: Part) -> None:
    resources = part.container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert "cpu" not in resources["limits"]
    for volume in part.pod["spec"].get("volumes", ()):
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            assert volume["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize(
    "part",
    [it for it in PARTS if it.file != "hyperpod.yaml"],
    ids=lambda part: f"{part.file}-{part.verb}",
)
def test_pods_are_restricted(part: Part) -> None:
    """They follow the Pod Security Standard "restricted", and their root is read-only."""
    assert (
        part.pod["spec"]["securityContext"].items()
        >= {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items()
    )
    assert part.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert part.pod["spec"]["enableServiceLinks"] is False
    # Only the router asks the API server.
    tokenless = part.pod["spec"].get("automountServiceAccountToken") is False
    assert tokenless == (part.verb != "route")
    volumes = {it["name"] for it in part.pod["spec"]["volumes"]}
    assert {it["name"] for it in part.container["volumeMounts"]} == volumes


# --- metrics ---------------------------------------------------------------------------------


def test_scaling_asks_for_series_that_exist() -> None:
    (scaled,) = MANIFESTS["autoscaling.yaml"]
    ours = {
        family.name + "_total" * isinstance(series, Counter)
        for series in (*vars(metrics).values(), *vars(queue).values())
        if isinstance(series, Counter | Gauge)
        for family in series.describe()
    }
    held = metrics.HeldWork(0, 0.0)
    replicas = metrics.CurrentSeries(CollectorRegistry(), {}, held, frozenset())
    ours |= {family.name for family in replicas.collect()}
    found = find_spec("vllm")
    assert found
    assert found.origin
    vllm = (Path(found.origin).parent / "v1/metrics/loggers.py").read_text()
    for trigger in scaled["spec"]["triggers"]:
        asked = trigger["metadata"]
        names = re.findall(r"[a-z_:]+(?=\{)", asked["query"])
        assert names
        assert all(name in ours or f'"{name}"' in vllm for name in names)
        assert asked["ignoreNullValues"] == "false"


def test_scaling_goes_down_slowly_and_never_to_nothing() -> None:
    (scaled,) = MANIFESTS["autoscaling.yaml"]
    assert scaled["spec"]["minReplicaCount"] >= 1
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    assert down["stabilizationWindowSeconds"] > up["stabilizationWindowSeconds"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 600}]


def test_hyperpod_scrapes_and_asks_the_port_that_is_served() -> None:
    (config,) = (it["spec"] for it in MANIFESTS["hyperpod.yaml"])
    (part,) = (it for it in OURS if it.file == "hyperpod.yaml")
    port = part.settings().port
    assert config["metrics"]["modelMetrics"] == {"path": "/metrics", "port": port}
    assert config["invocationEndpoint"] == "invocations"
    assert config["loadBalancer"]["healthCheckPath"] == "/ping"
    assert config["worker"]["modelVolumeMount"]["mountPath"] == part.settings().model_id
    # Its own addition names the store; sizes are Slipway's.
    assert config["kvCacheSpec"]["l2CacheSpec"] == {"l2CacheBackend": "tieredstorage"}
    assert part.settings().lmcache_auto_config


def test_docs_name_every_file() -> None:
    text = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert all(f"`{name}`" in text for name in MANIFESTS)
