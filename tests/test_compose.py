# SPDX-License-Identifier: Apache-2.0
"""compose.yaml and the monitoring that it mounts, without running any of it.

tests/e2e/test_compose.py runs it.
"""

import re

import pytest
import yaml

from lmi_config.options import settings
from tests import composed
from tests.composed import MONITORING, OF_THE_SCRAPE, ROOT

PORTS = {"valkey": 6379, "prometheus": 9090, "grafana": 3000}
PORT = 8080  # of Slipway
SERVERS = {"server-1", "server-2"}
SERVICES = {*SERVERS, "router", *PORTS}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def profile(request):
    return request.param


@pytest.fixture(scope="module")
def services(profile):
    return composed.services(profile)


@pytest.fixture(scope="module")
def hosts(services):
    """The services by their host names, which are the same in each profile."""
    return {
        name: it
        for service, it in services.items()
        for name in composed.names(service, it)
        if name in SERVICES
    }


@pytest.fixture(scope="module")
def prometheus():
    return yaml.safe_load((MONITORING / "prometheus.yml").read_text())


def ours(services):
    return {name: it for name, it in services.items() if it["image"].startswith("slipway:")}


def test_cpu_is_the_default():
    assert "COMPOSE_PROFILES=cpu\n" in (ROOT / ".env").read_text()
    assert composed.services("cpu").keys() == SERVICES


def test_a_profile_has_all_services(services, hosts):
    assert hosts.keys() == SERVICES
    assert len(services) == len(SERVICES)


def test_profiles_differ_only_in_the_engine(hosts):
    there = composed.services("cpu")
    for name, it in hosts.items():
        for key in ("command", "environment", "healthcheck", "mem_limit", "ports", "volumes"):
            assert it.get(key) == there[name].get(key), (name, key)


def test_gpus_are_not_shared():
    found = [
        device["device_ids"]
        for it in composed.services("gpu").values()
        if "deploy" in it
        for device in it["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert found == [["0"], ["1"]]


def test_images(services, profile):
    for it in services.values():
        _, tag = it["image"].rsplit(":", 1)
        assert tag == profile if "build" in it else re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    known = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for it in ours(services).values():
        assert it["build"]["args"]["ENGINE"] == profile
        assert it["build"]["args"].keys() <= known
        assert it["build"]["context"] == str(ROOT)


def test_options(services):
    """Every variable is an option with a valid value."""
    for it in ours(services).values():
        read = settings.read(it["environment"])
        given = {name for name, value in it["environment"].items() if value}
        assert {*read.origins.values()} == given
        assert not read.notes


def test_all_are_confined(services):
    for name, it in services.items():
        assert it["read_only"], name
        assert it["cap_drop"] == ["ALL"]
        assert it["security_opt"] == ["no-new-privileges:true"]
        assert int(it["mem_limit"]) > 0
        assert it["healthcheck"]["test"][0] == "CMD"
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & it.keys()
        assert all(port["host_ip"] == "127.0.0.1" for port in it.get("ports", ()))


def test_requests_under_way_have_time_to_finish(services):
    for it in ours(services).values():
        assert it["stop_grace_period"] == "30s"


def test_hosts_and_ports(hosts, prometheus):
    replicas = hosts["router"]["environment"]["OPTION_ROUTER_REPLICAS"].split(",")
    assert replicas == [f"http://{name}:{PORT}" for name in sorted(SERVERS)]
    targets = {
        job["job_name"]: [it for config in job["static_configs"] for it in config["targets"]]
        for job in prometheus["scrape_configs"]
    }
    assert targets["slipway"] == [it.removeprefix("http://") for it in replicas]
    assert targets["slipway-router"] == [f"router:{PORT}"]
    for name in SERVERS:
        environ = hosts[name]["environment"]
        assert environ["OPTION_KV_L2_URL"] == f"valkey://valkey:{PORTS['valkey']}"
    (source,) = provisioned("datasources/prometheus.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{PORTS['prometheus']}"
    for name, it in hosts.items():
        assert all(port["target"] == PORTS.get(name, PORT) for port in it.get("ports", ()))
        if name in {*SERVERS, "router"}:
            assert settings.read(it["environment"]).port == PORT
            assert f"127.0.0.1:{PORT}/ping" in it["healthcheck"]["test"][-1]


def provisioned(file):
    return yaml.safe_load((MONITORING / "grafana/provisioning" / file).read_text())


def mounts(service):
    """Path in the container → path here."""
    return {it["target"]: it["source"] for it in service["volumes"] if it["type"] == "bind"}


def test_files_that_are_mounted_are_there(services, prometheus):
    there = mounts(services["prometheus"])
    assert there == {f"/etc/prometheus/{it.name}": str(it) for it in MONITORING.glob("*.yml")}
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    assert prometheus["rule_files"] == ["alerts.yml"]

    grafana = services["grafana"]
    there = mounts(grafana)
    assert there["/etc/grafana/provisioning"] == str(MONITORING / "grafana/provisioning")
    (provider,) = provisioned("dashboards/slipway.yml")["providers"]
    folder = provider["options"]["path"]
    assert there[folder] == str(MONITORING / "grafana/dashboards")
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/slipway.json"
    (source,) = provisioned("datasources/prometheus.yml")["datasources"]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]


def test_disk_tiers_are_on_disks(hosts):
    """A disk tier in memory would be useless, and two servers may not share one."""
    found = set()
    for name in SERVERS:
        path = settings.read(hosts[name]["environment"]).kv_disk_path
        (volume,) = [it for it in hosts[name]["volumes"] if path.startswith(it["target"] + "/")]
        assert volume["type"] == "volume"
        found.add(volume["source"])
    assert len(found) == 2


QUERIES = [*composed.panels(), *composed.alerts(), *composed.recorded_rules()]


@pytest.fixture(scope="module")
def known():
    ours = {name: labels for it in composed.declared() for name, labels in it.exported.items()}
    return {**composed.recorded(), **ours}


@pytest.mark.parametrize("query", QUERIES, ids=lambda it: it.where)
def test_queries_ask_for_what_there_is(query, known):
    use = composed.used(query.text)
    assert use.series
    labels = set(OF_THE_SCRAPE)
    for name, matched in use.series:
        assert name in known
        assert matched <= known[name] | OF_THE_SCRAPE
        labels |= known[name]
    assert use.labels <= labels
    assert query.labels <= labels


def test_the_dashboard_is_whole():
    board = composed.dashboard()
    found = [it["id"] for it in board["panels"]]
    assert len({*found}) == len(found)
    drawn = [it for it in board["panels"] if it["type"] != "row"]
    assert all(it["targets"] and it["description"] for it in drawn)
    cells = [
        (grid["x"] + x, grid["y"] + y)
        for grid in (it["gridPos"] for it in board["panels"])
        for x in range(grid["w"])
        for y in range(grid["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24
    variables = {f"${it['name']}" for it in board["templating"]["list"]} - {"$datasource"}
    assert variables == {*composed.VARIABLES} - {"$__rate_interval"}


def test_all_of_the_routers_series_are_shown():
    def whole(names):
        return {re.sub("_(bucket|sum|count)$", "", name) for name in names}

    declared = {name for it in composed.declared("router") for name in it.exported}
    assert whole(declared) <= whole(composed.of_the_dashboard())


def test_alerts_are_explained():
    text = (ROOT / "docs/guides/monitoring.md").read_text()
    assert {*re.findall(r"^\| `([A-Z]\w+)`", text, re.M)} == {it.where for it in composed.alerts()}


def test_what_is_no_promql_is_refused():
    with pytest.raises(ValueError, match="unclosed"):
        composed.used("sum(rate(a[1m])")
