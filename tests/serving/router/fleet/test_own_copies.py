# SPDX-License-Identifier: Apache-2.0
"""The series of a router and of its container's copies, as one text."""

import json

from prometheus_client.parser import text_string_to_metric_families

from serving.router.fleet.own_copies import described, merged

OWN = """\
# HELP slipway_router_requests_total Requests.
# TYPE slipway_router_requests_total counter
slipway_router_requests_total{replica="a"} 5.0
# HELP process_open_fds Descriptors.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""
COPY = """\
# HELP process_open_fds Descriptors.
# TYPE process_open_fds gauge
process_open_fds 7.0
# HELP vllm:latency Time.
# TYPE vllm:latency histogram
vllm:latency_bucket{le="0.1",model="m {x}"} 1.0
vllm:latency_bucket{le="+Inf",model="m {x}"} 2.0
vllm:latency_count{model="m {x}"} 2.0
vllm:latency_sum{model="m {x}"} 0.3
"""


def test_each_copys_samples_are_told_apart_and_never_summed():
    text = merged(OWN, {"0": COPY, "1": COPY})
    found = {it.name: it for it in text_string_to_metric_families(text)}
    open_fds = {it.labels.get("copy"): it.value for it in found["process_open_fds"].samples}
    assert open_fds == {None: 9.0, "0": 7.0, "1": 7.0}
    counts = [it for it in found["vllm:latency"].samples if it.name.endswith("_count")]
    assert [it.labels for it in counts] == [
        {"copy": "0", "model": "m {x}"},
        {"copy": "1", "model": "m {x}"},
    ]
    for name in ("process_open_fds", "vllm:latency"):
        assert text.count(f"# TYPE {name} ") == 1


def test_what_a_router_says_alone_stays_as_it_is():
    assert merged(OWN, {}) == OWN


def test_a_model_has_a_worker_for_each_copy_in_one_group():
    def said(started):
        worker = {"id": 1, "startTime": started, "status": "READY"}
        group = {"device": {"deviceId": 0}, "minWorkers": 1, "maxWorkers": 1, "workers": [worker]}
        model = {"modelName": "m", "queueSize": 500, "requestInQueue": 2, "workerGroups": [group]}
        return json.dumps([{"workflowName": "m", "models": [model]}]).encode()

    (model,) = json.loads(described({0: said("a"), 2: said("b")}))[0]["models"]
    (group,) = model["workerGroups"]
    assert [(it["id"], it["startTime"]) for it in group["workers"]] == [(1, "a"), (3, "b")]
    assert (group["minWorkers"], group["maxWorkers"]) == (2, 2)
    assert (model["queueSize"], model["requestInQueue"]) == (1000, 4)
