# SPDX-License-Identifier: Apache-2.0
"""How many copies of a model a machine gets, and which devices each of them has."""

import dataclasses

import pytest

from lmi_config.facts.kv import KvShape
from lmi_config.options.settings import SettingsError
from lmi_config.plan import explain
from tests.lmi_config.examples import GIB, H100, machine, model
from tests.lmi_config.plan.test_plan import planned


def gpus(count, at=(), **more):
    """GPUs with distinct ids. at: the NUMA node of each."""
    found = tuple(
        dataclasses.replace(H100, uuid=f"GPU-{it}", node=at[it] if at else None)
        for it in range(count)
    )
    return dataclasses.replace(machine(count, **more), gpus=found)


def slices(count):
    found = tuple(
        dataclasses.replace(H100, uuid=f"MIG-{it}", slice=True, memory=20 * GIB)
        for it in range(count)
    )
    return dataclasses.replace(machine(1), gpus=found[:1], slices=found[1:])


def masks(found):
    """The devices that each copy's engine sees."""
    return [copy.environment["CUDA_VISIBLE_DEVICES"].replace("GPU-", "") for copy in found.copies]


TP = "OPTION_TENSOR_PARALLEL_DEGREE"
PP = "OPTION_PIPELINE_PARALLEL_DEGREE"
TWO_NODES = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("here", "environ", "shown"),
    [
        (gpus(8), {TP: "1"}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (gpus(8), {TP: "2"}, ["0,1", "2,3", "4,5", "6,7"]),
        (gpus(8), {TP: "4"}, ["0,1,2,3", "4,5,6,7"]),
        (gpus(8), {TP: "8"}, []),
        (gpus(8), {}, []),
        (gpus(8), {TP: "2", PP: "2"}, ["0,1,2,3", "4,5,6,7"]),
        (gpus(7), {TP: "2"}, ["0,1", "2,3", "4,5"]),
        (gpus(7), {TP: "4"}, []),
        (gpus(1), {}, []),
        (gpus(8), {"OPTION_COPIES": "4"}, ["0,1", "2,3", "4,5", "6,7"]),
        (gpus(8), {"OPTION_COPIES": "3", TP: "2"}, ["0,1", "2,3", "4,5"]),
        (gpus(8), {"OPTION_COPIES": "1", TP: "1"}, []),
        (gpus(8), {"SERVING_MAX_WORKERS": "2", TP: "2"}, ["0,1", "2,3"]),
        (gpus(8), {"SERVING_MAX_WORKERS": "9", TP: "4"}, ["0,1,2,3", "4,5,6,7"]),
        (gpus(8), {"SAGEMAKER_NUM_MODEL_WORKERS": "1", TP: "2"}, []),
        (gpus(8), {"OPTION_COPIES": "2", "SERVING_MAX_WORKERS": "1", TP: "1"}, ["0", "1"]),
        (gpus(8, TWO_NODES), {TP: "4"}, ["0,1,2,3", "4,5,6,7"]),
        (gpus(7, TWO_NODES[1:]), {TP: "2"}, ["0,1", "3,4", "5,6"]),
        (gpus(6, (0, 0, 0, 1, 1, 1)), {TP: "2"}, ["0,1", "2,5", "3,4"]),
        (slices(3), {}, ["MIG-0", "MIG-1", "MIG-2"]),
        (slices(3), {"OPTION_COPIES": "2"}, ["MIG-0", "MIG-1"]),
        (slices(1), {}, []),
        (machine(), {}, []),
        (machine(), {"SERVING_MAX_WORKERS": "4"}, []),
    ],
)
def test_the_table_of_plans(here, environ, shown):
    found = planned(environ, here, model(2, attention_heads=32))
    assert masks(found) == shown
    assert found.parallelism.servers == max(len(shown), 1)


@pytest.mark.parametrize(
    ("here", "environ", "fault"),
    [
        (
            gpus(8),
            {"OPTION_COPIES": "5", TP: "2"},
            "OPTION_COPIES=5: needs 10 GPUs, 2 for each copy, but this machine shows 8: 4 fit; use "
            "at most 4, or OPTION_COPIES=auto",
        ),
        (
            gpus(2),
            {"OPTION_COPIES": "4"},
            "OPTION_COPIES=4: needs 4 GPUs, 1 for each copy, but this machine shows 2: 2 fit; use "
            "at most 2, or OPTION_COPIES=auto",
        ),
        (
            machine(),
            {"OPTION_COPIES": "5"},
            "OPTION_COPIES=5: needs 5 CPUs, 1 for each copy, but this machine shows 4: 4 fit; use "
            "at most 4, or OPTION_COPIES=auto",
        ),
        (
            gpus(8),
            {"OPTION_COPIES": "2", TP: "16"},
            "OPTION_COPIES=2: needs 32 GPUs, 16 for each copy, but this machine shows 8: none "
            "fits, or OPTION_COPIES=auto",
        ),
        (
            gpus(8),
            {"OPTION_COPIES": "2", "OPTION_DATA_PARALLEL_SIZE": "2", TP: "2"},
            "OPTION_COPIES=2: OPTION_DATA_PARALLEL_SIZE: vLLM runs several copies in one server; "
            "leave OPTION_COPIES out, or set it to 1",
        ),
        (gpus(8), {"OPTION_COPIES": "0"}, "at least 1"),
        (gpus(8), {"OPTION_COPIES": "many"}, "auto"),
    ],
)
def test_copies_that_cannot_be_had_are_refused_with_what_fits(here, environ, fault):
    with pytest.raises(SettingsError) as refused:
        planned(environ, here, model(2, attention_heads=32))
    (found,) = refused.value.faults
    assert found == fault or (len(fault) < 20 and fault in found)


ONE_EACH = {TP: "1"}


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"OPTION_DATA_PARALLEL_SIZE": "2"}, "OPTION_DATA_PARALLEL_SIZE"),
        ({"OPTION_ENABLE_EXPERT_PARALLEL": "true"}, "OPTION_ENABLE_EXPERT_PARALLEL"),
        ({"OPTION_DISTRIBUTED_EXECUTOR_BACKEND": "ray"}, "OPTION_DISTRIBUTED_EXECUTOR_BACKEND"),
        ({"OPTION_DEVICE_IDS": "[0]"}, "OPTION_DEVICE_IDS"),
        ({"OPTION_KV_EVENTS": "true"}, "OPTION_KV_EVENTS"),
        ({"SERVING_CORS_ALLOWED_ORIGIN": "*"}, "SERVING_CORS_ALLOWED_ORIGIN"),
        (
            {
                "OPTION_KV_TRANSFER_CONFIG": '{"kv_connector":"NixlConnector","kv_role":"kv_both",'
                '"kv_load_failure_policy":"recompute"}',
                "OPTION_SERVER_ROLE": "decode",
                "OPTION_ROUTER_SECRET": "s" * 40,
            },
            "OPTION_SERVER_ROLE=decode",
        ),
        (
            {"OPTION_LMCACHE_AUTO_CONFIG": "true", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"},
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
        ),
    ],
)
def test_what_needs_one_server_has_one_and_says_so(environ, why):
    found = planned({**ONE_EACH, **environ}, gpus(8), model(2, attention_heads=32))
    assert not found.copies
    (note,) = [it for it in found.findings if it.startswith("one copy of the model, where ")]
    assert f"would fit: {why}" in note


def test_a_model_py_that_is_the_whole_service_has_one_server(tmp_path):
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return inputs\n")
    environ = {**ONE_EACH, "OPTION_MODEL_ID": str(tmp_path), "SERVING_MODEL_STORE": str(tmp_path)}
    (tmp_path / "serving.properties").write_text("engine=Python\n")
    found = planned(environ, gpus(8), model(2, attention_heads=32))
    assert not found.copies
    assert any("model.py is the whole service" in it for it in found.findings)


def test_copies_without_gpus_share_the_cpus():
    found = planned({"OPTION_COPIES": "2"}, machine(), model(2))
    assert [copy.machine.cpus for copy in found.copies] == [(0, 1), (4, 5)]
    assert [copy.port for copy in found.copies] == [5004, 5005]
    one = planned({}, machine(), model(2))
    shares = {share.name: share.size for share in found.memory.shares}
    alone = {share.name: share.size for share in one.memory.shares}
    assert shares["weights"] == 2 * alone["weights"]
    assert shares["2 servers and 2 engine cores"] == 2 * alone["server and engine core"]
    assert shares["2 workers"] == 2 * alone["1 worker"]


def test_copies_without_gpus_do_not_span_numa_nodes():
    nodes = ((0, (0, 1, 4, 5)), (1, (2, 3, 6, 7)))
    here = machine(cpus=tuple(range(8)), nodes=nodes, ports=tuple(range(5001, 5008)))
    found = planned({"OPTION_COPIES": "4"}, here, model(2))
    assert [copy.machine.cpus for copy in found.copies] == [(0, 1), (4, 5), (2, 3), (6, 7)]
    assert [copy.environment["CPU_VISIBLE_MEMORY_NODES"] for copy in found.copies] == [
        *("0", "0", "1", "1")
    ]


def test_a_copy_on_gpus_runs_on_its_nodes_cpus():
    nodes = ((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)))
    here = gpus(8, TWO_NODES, cpus=tuple(range(8)), nodes=nodes)
    found = planned({TP: "2"}, here, model(2, attention_heads=32))
    assert [(copy.node, copy.machine.cpus[0]) for copy in found.copies] == [
        *((0, 0), (0, 0), (1, 4), (1, 4))
    ]


def test_each_copy_has_ports_of_its_own_in_sagemakers_range():
    environ = {TP: "4", "SAGEMAKER_SAFE_PORT_RANGE": "5001-5025"}
    found = planned(environ, gpus(8), model(2, attention_heads=32))
    assert [copy.port for copy in found.copies] == [5004, 5005]
    assert [copy.environment["VLLM_PORT"] for copy in found.copies] == ["5012", "5019"]
    few = gpus(8, ports=(5001, 5002, 5003, 5004))
    with pytest.raises(SettingsError) as refused:
        planned(environ | {"SAGEMAKER_SAFE_PORT_RANGE": "5001-5004"}, few, model(2))
    assert "2 copies of the model need 5 free ports, and there are 4" in str(refused.value)


def test_the_cache_server_has_a_thread_for_each_copy():
    environ = {TP: "2", "OPTION_LMCACHE_AUTO_CONFIG": "true"}
    several = planned(environ, gpus(8), model(2, attention_heads=32))
    assert {"--max-gpu-workers=4", "--max-cpu-workers=4"} <= {*several.cache_server}
    one = planned(environ, gpus(2), model(2, attention_heads=32))
    assert not any("workers" in it for it in one.cache_server)


def test_a_plan_shows_each_copy_and_all():
    nodes = ((0, tuple(range(8))), (1, tuple(range(8, 16))))
    here = gpus(4, (0, 0, 1, 1), nodes=nodes)
    found = planned({TP: "2"}, here, model(2, attention_heads=32))
    told = explain.as_text(found)
    assert "servers behind a router in this container (default: auto)" in told
    assert "NUMA node 1; GPU-2, GPU-3; port 5005" in told
    assert "copy 1: CUDA_VISIBLE_DEVICES=GPU-2,GPU-3" in told
    assert [row["gpus"] for row in explain.as_json(found)["copies"]] == [
        *(["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"])
    ]


def test_more_memory_than_there_is_asks_for_fewer_copies():
    here = gpus(8, memory=32 * GIB)
    (note,) = [
        it for it in planned(ONE_EACH, here, model(2)).findings if it.startswith("8 copies want")
    ]
    assert "OPTION_COPIES=7" in note


def test_the_plan_of_a_copy_has_its_devices_alone():
    found = planned({TP: "2"}, gpus(4), model(2, attention_heads=32))
    copy = found.of_copy(found.copies[1])
    assert [gpu.uuid for gpu in copy.machine.gpus] == ["GPU-2", "GPU-3"]
    assert copy.environment["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"
    assert copy.options == found.options


def test_heads_that_leave_gpus_over_make_copies():
    qwen = {"attention_heads": 28, "vocabulary": 152064}
    facts = model(6, **qwen, kv=KvShape(heads=4, full=2 * 4 * 128 * 28))
    assert masks(planned({}, gpus(8), facts)) == ["0,1,2,3", "4,5,6,7"]
