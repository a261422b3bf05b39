# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm itself: its objects are valid, equal to deploy/kubernetes where
both have them, and accepted by the programs.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lmi_config.options.parsers import Endpoints, replica_source
from serving.access import objectives
from tests import custom_resources
from tests.support import programs
from tests.test_kubernetes import (
    MANIFESTS,
    ROOT,
    Document,
    check,
    parts,
    templates,
)
from tools.generate import helm_values
from tools.release import version

CHART = ROOT / "deploy/helm/slipway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NEW_VOLUMES = {"oci.yaml"}
"""Examples with fields that the oldest Kubernetes with a checked schema lacks."""


def helm(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [str(programs.helm()), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*values: str | Path) -> list[Document]:
    """The objects that Helm renders from files of values."""
    files = [argument for file in values for argument in ("-f", file)]
    made = helm("template", "slipway", CHART, "--namespace", "default", *files)
    assert made.returncode == 0, made.stderr
    return [it for it in yaml.safe_load_all(made.stdout) if it]


def valid(document: Document, *, newest: bool = False) -> None:
    if newest and not custom_resources.checked(document):
        latest = kubernetes_validate.latest_version()
        kubernetes_validate.validate(document, latest, strict=True)
    else:
        check(document)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_makes_what_a_cluster_takes(file):
    linted = helm("lint", "--strict", CHART, "-f", file)
    assert linted.returncode == 0, linted.stdout
    documents = rendered(file)
    for document in documents:
        valid(document, newest=file.name in NEW_VOLUMES)
    named = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(named) == len({*named})


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_options_of_every_example_can_be_used(file):
    documents = rendered(file)
    found = parts([(file.name, document) for document in documents])
    ours = [part for part in found if part.verb in ("serve", "route")]
    assert {part.verb for part in ours} == {"serve", "route"}
    for part in ours:
        asked = part.settings()
        if part.verb == "route":
            source = replica_source(asked.router_replicas or "")
            assert isinstance(source, Endpoints)
            services = {it["metadata"]["name"] for it in documents if it["kind"] == "Service"}
            named = {*re.findall(r"slipway-\w+", source.selector)}
            assert named
            assert named <= services


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_what_selects_pods_finds_some(file):
    documents = rendered(file)
    pods = [it["metadata"]["labels"] for document in documents for it in templates(document)]
    for document in documents:
        spec = document.get("spec", {})
        selectors = {
            "Service": lambda spec: spec["selector"],
            "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
            "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
            "InferencePool": lambda spec: spec["selector"]["matchLabels"],
            "PodMonitor": lambda spec: spec["selector"]["matchLabels"],
            "Deployment": lambda spec: spec["selector"]["matchLabels"],
        }
        if wanted := selectors.get(document["kind"]):
            selector = wanted(spec).items()
            assert any(selector <= labels.items() for labels in pods), document["metadata"]["name"]


HELMS = {"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"}


def plain(value: Any) -> Any:
    """The value without Helm's own fields, and with variables sorted by name."""
    if isinstance(value, list):
        found = [plain(it) for it in value]
        variables = all(
            isinstance(it, dict) and "name" in it and it.keys() & {"value", "valueFrom"}
            for it in found
        )
        return sorted(found, key=lambda it: it["name"]) if variables else found
    if isinstance(value, dict):
        return {name: plain(it) for name, it in value.items() if name not in HELMS}
    return value


def same(document: Document) -> tuple[tuple[str, str], Document]:
    found = plain(document)
    for template in templates(found) if "worker" not in found.get("spec", {}) else ():
        for container in template["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
            if container["image"].startswith("registry.example.com/slipway"):
                container["image"] = "slipway"
    return (found["kind"], found["metadata"]["name"]), found


def unscaled(document: Document) -> Document:
    """The document without a number of servers if it is scaled, as the manifests' comments
    recommend.
    """
    document["spec"].pop("replicas", None)
    return document


@pytest.mark.parametrize(
    ("example", "files"),
    [
        ("manifests.yaml", ("server.yaml", "router.yaml", "monitoring.yaml", "autoscaling.yaml")),
        ("shared_cache.yaml", ("shared_cache.yaml",)),
        ("multi_node.yaml", ("multi_node.yaml",)),
    ],
)
def test_it_makes_what_the_manifests_have(example, files):
    made = dict(map(same, patched(rendered(CHART / "examples" / example))))
    wanted = dict(map(same, patched([it for file in files for it in MANIFESTS[file]])))
    for what, document in wanted.items():
        if what == ("Deployment", "slipway-server"):
            unscaled(document)
        assert made[what] == document, what
    if example == "manifests.yaml":
        assert made.keys() == wanted.keys()


def patched(documents: Sequence[Document]) -> list[Document]:
    """A patch for the time of the block: templates() leaves out a LeaderWorkerSet's copies."""
    for document in documents:
        template = document.get("spec", {}).get("leaderWorkerTemplate", {})
        for pod in ("leaderTemplate", "workerTemplate"):
            for container in template.get(pod, {}).get("spec", {}).get("containers", ()):
                container.pop("imagePullPolicy", None)
                container["image"] = "slipway"
    return list(documents)


def test_alerts_and_dashboard_are_those_without_helm():
    documents = rendered(CHART / "examples/gateway.yaml")
    made = {it["kind"]: it for it in documents if it["metadata"]["name"] != "slipway-objectives"}
    alerts = yaml.safe_load((ROOT / "deploy/monitoring/alerts.yml").read_text())
    assert made["PrometheusRule"]["spec"] == alerts
    dashboard = ROOT / "deploy/monitoring/grafana/dashboards/slipway.json"
    shown = made["ConfigMap"]["data"]["slipway.json"]
    assert json.loads(shown) == json.loads(dashboard.read_text())


def test_the_picker_is_where_the_pool_says():
    documents = rendered(CHART / "examples/gateway.yaml")
    (pool,) = (it["spec"] for it in documents if it["kind"] == "InferencePool")
    reference = pool["endpointPickerRef"]
    services = {it["metadata"]["name"]: it["spec"] for it in documents if it["kind"] == "Service"}
    (port,) = services[reference["name"]]["ports"]
    assert port["port"] == reference["port"]["number"]
    (router,) = (part for part in parts([("", it) for it in documents]) if part.verb == "route")
    ports = {it["name"]: it["containerPort"] for it in router.container["ports"]}
    asked = router.settings()
    assert (asked.epp, asked.epp_port) == (True, ports[port["targetPort"]])
    mounts = {it["mountPath"] for it in router.container["volumeMounts"]}
    for file in (asked.epp_certificate, asked.epp_private_key, asked.router_objectives):
        assert str(Path(file or "").parent) in mounts
    (content,) = (
        it["data"][Path(asked.router_objectives or "").name]
        for it in documents
        if it["metadata"]["name"] == "slipway-objectives"
    )
    assert objectives.parsed(content.encode()) == {"chat": 10, "batch": -10}


def test_prefill_and_decode_are_apart():
    documents = rendered(CHART / "examples/prefill.yaml")
    found = parts([("", it) for it in documents])
    serves = {it.settings().server_role: it for it in found if it.verb == "serve"}
    decode, prefill = serves["decode"], serves["prefill"]
    (router,) = (it for it in found if it.verb == "route")
    given = [it.environment() for it in (decode, prefill)]
    assert [it.pop("OPTION_SERVER_ROLE") for it in given] == ["decode", "prefill"]
    assert given[0] == given[1]
    assert given[0]["OPTION_KV_L2_URL"] == "redis://slipway-cache"
    memory = [it.container["resources"]["limits"].pop("memory") for it in (decode, prefill)]
    assert memory == ["64Gi", "96Gi"]
    assert router.settings().router_prefill_tokens == 4096
    trusted = [
        [it for it in part.container["env"] if it["name"] == "OPTION_ROUTER_SECRET"]
        for part in (decode, prefill, router)
    ]
    assert trusted[0] == trusted[1] == trusted[2] != []
    # The router finds both, they reach the store, and Prometheus may scrape them.
    services = {it["metadata"]["name"]: it["spec"] for it in documents if it["kind"] == "Service"}
    named = re.findall(r"slipway-\w+", router.environment()["OPTION_ROUTER_REPLICAS"])
    selectors = [services[name]["selector"].items() for name in named]
    (store,) = (
        it["spec"]["ingress"][0]["from"]
        for it in documents
        if (it["kind"], it["metadata"]["name"]) == ("NetworkPolicy", "slipway-cache")
    )
    allowed = [it["podSelector"]["matchLabels"].items() for it in store]
    for part in (decode, prefill):
        labels = part.pod["metadata"]["labels"].items()
        assert sum(it <= labels for it in selectors) == sum(it <= labels for it in allowed) == 1
    (monitor,) = (it["spec"] for it in documents if it["kind"] == "PodMonitor")
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "slipway-access", "key": "admin"}


def test_servers_that_prefill_and_those_that_decode_are_scaled_apart():
    documents = rendered(CHART / "examples/prefill.yaml")
    targets = {it["metadata"]["name"]: it["spec"] for it in documents if it["kind"] == "Deployment"}
    scaled = {
        it["spec"]["scaleTargetRef"]["name"]: it["spec"]["triggers"]
        for it in documents
        if it["kind"] == "ScaledObject"
    }
    assert {"slipway-server", "slipway-prefill"} == scaled.keys() < targets.keys()
    assert not [name for name in scaled if "replicas" in targets[name]]
    queries = {
        name: {it["name"]: it["metadata"]["query"] for it in triggers}
        for name, triggers in scaled.items()
    }
    backlog = "slipway_router_backlog_seconds"
    assert (
        f'{backlog}{{namespace="default",role!="prefill"}}' in queries["slipway-server"]["backlog"]
    )
    assert {*queries["slipway-server"]} == {"backlog", "kv", "waiting"}
    prefills = f'sum({backlog}{{namespace="default",role="prefill"}})'
    assert queries["slipway-prefill"] == {"backlog": prefills}


def test_a_gateway_sends_nothing_to_servers_that_prefill():
    documents = rendered(CHART / "examples/prefill.yaml", CHART / "examples/gateway.yaml")
    (pool,) = (it["spec"] for it in documents if it["kind"] == "InferencePool")
    selected = [
        part.settings().server_role
        for part in parts([("", it) for it in documents])
        if pool["selector"]["matchLabels"].items() <= part.pod["metadata"]["labels"].items()
    ]
    assert selected == ["decode"]


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ("model.name=x", "additional properties 'name' not allowed"),
        ("server.replicas=two", "got string, want integer"),
        ("router.strategy=random", "value must be one of"),
        ("model.id=", "model.id or model.volume: one of them has to say where the model is"),
        ("gateway.enabled=true,router.enabled=false", "gateway.enabled needs router.enabled"),
        ("multiNode.enabled=true,autoscaling.kind=keda", "several nodes for one server"),
        ("multiNode.enabled=true,server.gpus=0", "server.gpus: several nodes"),
        ("gateway.selfSigned=true,gateway.tlsSecret=x", "a picker shows one certificate"),
        ("gateway.objectives.batch=-10", "gateway.objectives needs access.secret"),
        ("prefill.enabled=true", "prefill.enabled needs access.secret"),
        ("prefill.enabled=true,access.secret=x", "needs a store that all servers share"),
        ("prefill.enabled=true,access.secret=x,router.strategy=session", "prefixaware or kvaware"),
        ("prefill.enabled=true,access.secret=x,router.enabled=false", "needs router.enabled"),
        ("prefill.enabled=true,access.secret=x,multiNode.enabled=true", "several nodes"),
        ("prefill.server.gpu=2", "additional properties 'gpu' not allowed"),
        ("autoscaling.minReplicas=9", "minReplicas is more than autoscaling.maxReplicas"),
    ],
)
def test_values_that_are_wrong_or_contradict_are_refused(values, fault):
    made = helm("template", "slipway", CHART, "--set", values)
    assert made.returncode != 0
    assert fault in made.stderr


def test_a_volume_without_a_tokenizer_is_refused(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("model: {id: '', volume: {emptyDir: {}}}")
    made = helm("template", "slipway", CHART, "-f", file)
    assert "model.tokenizer" in made.stderr


def test_its_page_and_schema_are_fresh():
    assert helm_values.main(check=True) == 0


def test_its_version_is_the_projects():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version.version(ROOT)
