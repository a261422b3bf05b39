# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm itself: what it makes is valid, equal to deploy/kubernetes where
both have it, and understood by the programs.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lmi_config.options.parsers import Endpoints, replica_source
from scripts.generate import helm_values
from scripts.release import version
from tests import tools
from tests.test_kubernetes import (
    MANIFESTS,
    ROOT,
    TEXT,
    Document,
    check,
    parts,
    templates,
)

CHART = ROOT / "deploy/helm/slipway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NEW_VOLUMES = {"oci.yaml"}
"""Examples with what the oldest Kubernetes whose schemas are checked does not have."""


def _strict(required: str, **fields: Document) -> Document:
    return {
        "type": "object",
        "required": required.split(),
        "properties": fields,
        "additionalProperties": False,
    }


LABELS = {"type": "object", "additionalProperties": TEXT}
NAMES = {"type": "array", "minItems": 1, "items": TEXT}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

SPECS = {
    # github.com/kubernetes-sigs/gateway-api-inference-extension, api/v1/inferencepool_types.go
    "InferencePool": _strict(
        "selector targetPorts endpointPickerRef",
        selector=_strict("matchLabels", matchLabels=LABELS),
        targetPorts={
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": _strict("number", number=PORT),
        },
        endpointPickerRef=_strict(
            "name",
            group=TEXT,
            kind=TEXT,
            name=TEXT,
            port=_strict("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    # github.com/kubernetes-sigs/gateway-api, apis/v1/httproute_types.go
    "HTTPRoute": _strict(
        "parentRefs rules",
        parentRefs={
            "type": "array",
            "minItems": 1,
            "items": _strict(
                "name",
                group=TEXT,
                kind=TEXT,
                name=TEXT,
                namespace=TEXT,
                sectionName=TEXT,
                port=PORT,
            ),
        },
        hostnames=NAMES,
        rules={
            "type": "array",
            "items": _strict(
                "backendRefs",
                matches={
                    "type": "array",
                    "items": _strict(
                        "path",
                        path=_strict(
                            "type value",
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string", "pattern": "^/"},
                        ),
                    ),
                },
                backendRefs={
                    "type": "array",
                    "items": _strict("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT),
                },
                timeouts=_strict("", request=TEXT, backendRequest=TEXT),
            ),
        },
    ),
    # github.com/prometheus-operator/prometheus-operator, pkg/apis/monitoring/v1
    "PrometheusRule": _strict(
        "groups",
        groups={
            "type": "array",
            "items": _strict(
                "name rules",
                name=TEXT,
                interval=TEXT,
                rules={
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["expr"],
                        "properties": {
                            **dict.fromkeys(("alert", "record", "expr", "for"), TEXT),
                            "keep_firing_for": TEXT,
                            "labels": LABELS,
                            "annotations": LABELS,
                        },
                        "additionalProperties": False,
                    },
                },
            ),
        },
    ),
}


def helm(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [str(tools.helm()), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def rendered(*values: str | Path) -> list[Document]:
    """What Helm makes of files of values."""
    files = [argument for file in values for argument in ("-f", file)]
    made = helm("template", "slipway", CHART, "--namespace", "default", *files)
    assert made.returncode == 0, made.stderr
    return [it for it in yaml.safe_load_all(made.stdout) if it]


def valid(document: Document, *, newest: bool = False) -> None:
    if spec := SPECS.get(document["kind"]):
        jsonschema.Draft202012Validator(spec).validate(document["spec"])
    elif newest:
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
            assert source.selector.partition("=")[2] in services


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
    """Without what is Helm's, and with variables in the order of their names."""
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
    """As the manifests' comments say: no number of servers where that is scaled."""
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
    """With templates() of a LeaderWorkerSet, which are copies, out of the way."""
    for document in documents:
        template = document.get("spec", {}).get("leaderWorkerTemplate", {})
        for pod in ("leaderTemplate", "workerTemplate"):
            for container in template.get(pod, {}).get("spec", {}).get("containers", ()):
                container.pop("imagePullPolicy", None)
                container["image"] = "slipway"
    return list(documents)


def test_alerts_and_dashboard_are_those_without_helm():
    made = {it["kind"]: it for it in rendered(CHART / "examples/gateway.yaml")}
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
    for file in (asked.epp_certificate, asked.epp_private_key):
        assert str(Path(file or "").parent) in mounts


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
