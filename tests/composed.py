# SPDX-License-Identifier: Apache-2.0
"""compose.yaml as Compose itself reads it, and the series that the monitoring beside it uses."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "deploy" / "monitoring"
SERIES = ROOT / "tests/series.txt"
"""The series that a server exports beside our own declared ones: each line has a name and its
labels.

SLIPWAY_RECORD_SERIES=1 scripts/test e2e -k test_compose writes the file again.
"""
VARIABLES = {"$server": ".*", "$__rate_interval": "1m"}
OF_THE_SCRAPE = {"instance", "job"}
_KINDS = {"Counter", "CounterMetricFamily", "Gauge", "GaugeMetricFamily", "Histogram", "Info"}
_OF_INFO = {
    "slipway_build": frozenset(("version", "vllm", "lmcache")),
    "slipway_tenants": frozenset(("header",)),
    "slipway_role": frozenset(("role",)),
}
"""Labels that are known when a server starts, not when the series is declared."""

Known = dict[str, set[str]]
"""Labels by series."""


def services(profile: str) -> dict[str, dict[str, Any]]:
    """The services that Compose reads from compose.yaml and .env, independent of this process's
    environment.
    """
    command = [str(Path(sys.executable).parent / "docker-compose"), "--profile", profile]
    found = subprocess.run(
        [*command, "config", "--format", "json"], cwd=ROOT, env={}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    read: dict[str, dict[str, Any]] = json.loads(found.stdout)["services"]
    return read


def names(service: str, definition: dict[str, Any]) -> set[str]:
    """The host names of a service."""
    return {service, *((definition["networks"]["default"] or {}).get("aliases", ()))}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MONITORING / "grafana/dashboards/slipway.json").read_text())
    return read


class Query(NamedTuple):
    """An expression, ready for Prometheus. labels: those that its legend or text shows."""

    where: str
    text: str
    labels: frozenset[str]


def panels() -> Iterator[Query]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            labels = frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            yield Query(panel["title"], text, labels)


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> Iterator[Query]:
    for rule in rules():
        if "alert" in rule:
            labels = frozenset(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            yield Query(rule["alert"], rule["expr"], labels)


def recorded_rules() -> Iterator[Query]:
    """The expressions whose values Prometheus records, by the names of the recorded series."""
    for rule in rules():
        if "record" in rule:
            yield Query(rule["record"], rule["expr"], frozenset())


class Use(NamedTuple):
    """The series that an expression reads, each with the labels that select it, and its other
    labels.
    """

    series: list[tuple[str, set[str]]]
    labels: set[str]


def used(text: str) -> Use:
    """Raises ValueError if the text is not PromQL."""
    use = Use([], set())

    def visit(part: promql_parser.Expr) -> bool:
        if isinstance(part, promql_parser.VectorSelector):
            assert part.name
            use.series.append((part.name, {it.name for it in part.matchers.matchers}))
        elif isinstance(part, promql_parser.AggregateExpr) and part.modifier:
            use.labels.update(part.modifier.labels)
        elif isinstance(part, promql_parser.BinaryExpr) and part.modifier:
            matching = part.modifier.matching
            use.labels.update(matching.labels if matching else ())
            use.labels.update(part.modifier.group_labels or ())
        return True

    promql_parser.walk(promql_parser.parse(text), visit)
    return use


def of_the_dashboard() -> set[str]:
    return {name for it in panels() for name, _ in used(it.text).series}


class Declared(NamedTuple):
    """A series of Slipway's own, as the code that counts it declares it."""

    kind: str
    name: str
    labels: frozenset[str]
    owner: str
    """The file below serving/."""

    @property
    def documented(self) -> str:
        """The name in the documentation: a histogram without its parts."""
        return self.name if self.kind == "Histogram" else next(iter(self.exported))

    @property
    def exported(self) -> Known:
        """The names and labels of this series in /metrics."""
        suffixes = {"Histogram": ("_bucket", "_sum", "_count"), "Info": ("_info",)}
        total = ("_total",) if self.kind.startswith("Counter") else ("",)
        return {
            self.name + suffix: {*self.labels, "le"} if suffix == "_bucket" else {*self.labels}
            for suffix in suffixes.get(self.kind, total)
        }


def declared(owner: str = "") -> Iterator[Declared]:
    """Every series that the code declares, even if the code cannot be imported here. owner: a
    folder of it.
    """
    for file in (ROOT / "serving" / owner).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(ast.Name(kind), [ast.Constant(str(name)), *_]) if kind in _KINDS:
                    labels = frozenset(_labels(node)) | _OF_INFO.get(name, frozenset())
                    yield Declared(kind, name, labels, str(file.relative_to(ROOT / "serving")))


def _labels(call: ast.Call) -> list[str]:
    """The only list of words in a series' declaration."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    lists = [ast.literal_eval(value) for value in values if isinstance(value, ast.List)]
    return lists[0] if lists else []


def exported(text: str) -> Known:
    """The series in /metrics. A counter that has not counted yet has only a type there; it is
    included.
    """
    found: Known = defaultdict(set)
    for family in text_string_to_metric_families(text):
        if family.type == "counter" and not family.samples:
            found[f"{family.name}_total"] = set()
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


def recorded() -> Known:
    lines = (line.split() for line in SERIES.read_text().splitlines() if line[:1] != "#")
    return {name: {*labels} for name, *labels in lines}
