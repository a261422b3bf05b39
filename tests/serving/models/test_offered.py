# SPDX-License-Identifier: Apache-2.0
"""The plans of several models, and refusals before anything starts."""

import dataclasses
import json

import pytest

from lmi_config.facts import machine
from lmi_config.options.settings import SettingsError
from lmi_config.plan.memory import Footprint
from serving.models import offered
from tests.serving.models.parts import with_gpu
from tests.support.models import tiny

GIB = 2**30


def listed(models, **environ):
    whole = {name: {"model_id": str(tiny.make()), **more} for name, more in models.items()}
    return offered.offers(
        {
            "OPTION_MODELS": json.dumps(whole),
            "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
            "OPTION_MODELS_MEMORY": "3G",
            **environ,
        },
        {},
    )


def refused(models, **environ):
    with pytest.raises(SettingsError) as found:
        listed(models, **environ)
    return "; ".join(found.value.faults)


def test_one_model_is_no_list():
    assert offered.offers({"OPTION_MODEL_ID": str(tiny.make())}, {}) is None


def test_each_model_has_a_plan_of_its_own_and_all_share_the_other_options():
    models = {"a": {"max_num_seqs": 4}, "b": {"pinned": True}}
    found = listed(models, OPTION_MAX_MODEL_LEN="512", OPTION_MODELS_MEMORY="6G")
    a, b = found.models
    assert [a.pinned, b.pinned] == [False, True]
    plans = [it.deployment.plan for it in found.models]
    assert [it.options["max_model_len"] for it in plans] == [512, 512]
    assert plans[0].options["max_num_seqs"] == 4
    assert plans[0].options["served_model_name"][0] == "a"
    assert plans[1].settings.model_names[0] == "b"
    assert {it.settings.host for it in plans} == {"127.0.0.1"}
    assert not {*a.ports} & {*b.ports}
    assert 2 * GIB < a.awake.host < 3 * GIB
    text = offered.as_text(found)
    assert "all fit" in text
    assert "pinned" in text
    assert "they take turns" in offered.as_text(listed({"a": {}, "b": {}}))
    assert offered.as_json(found)["models"]["b"]["pinned"] is True


def test_a_model_on_a_gpu_has_a_size_while_it_sleeps(monkeypatch):
    look = machine.look
    monkeypatch.setattr(machine, "look", lambda *it, **more: with_gpu(look(*it, **more), 18))
    sizes = {"OPTION_KV_CACHE_MEMORY_BYTES": "8G", "OPTION_MODELS_MEMORY": "16G"}
    found = listed({"a": {"enable_sleep_mode": True}, "b": {}}, **sizes)
    a, b = found.models
    assert b.asleep is None
    assert a.asleep
    assert (a.awake.gpu - a.asleep.gpu) // GIB == 8
    weights = a.asleep.host - a.awake.host
    assert 0 < weights < GIB
    assert "3.0 GiB of each GPU while it sleeps" in offered.as_text(found)
    assert offered.as_json(found)["models"]["a"]["asleep"]["gpu"] == a.asleep.gpu
    assert offered.as_json(found)["models"]["b"]["asleep"] is None
    tiers = {"enable_sleep_mode": True, "lmcache_auto_config": True, "kv_l1_size": "1G"}
    (tiered,) = listed({"a": tiers}, **sizes).models
    assert tiered.asleep is None


@pytest.mark.parametrize(
    ("models", "environ", "why"),
    [
        ({"a": {"port": 1}}, {}, "a: port: is the whole container's"),
        ({"a": {"api_key": "0123456789"}}, {}, "is the whole container's"),
        ({"a": {"copies": 2}}, {}, "is the whole container's"),
        ({"a": {"models": {}}}, {}, "is the whole container's"),
        ({"a": {"pinned": "perhaps"}}, {}, "pinned: should be"),
        ({"a": {"max_modle_len": 1}}, {}, "did you mean"),
        ({"a": {"model_id": ""}}, {}, "`model_id` is missing"),
        ({"a": {"model_id": "/nowhere"}}, {}, "model a: "),
        ({"a": {"kv_cache_memory_bytes": "2G"}}, {}, "model a: needs 4.5 GiB"),
        ({"a": {"pinned": True}, "b": {}}, {}, "model b: needs 2.6 GiB, beside 2.6 GiB of models"),
        ({"a": {}}, {"SAGEMAKER_MULTI_MODEL": "true"}, "keep one"),
        ({"a": {}}, {"OPTION_COPIES": "2"}, "has one copy"),
        ({"a": {}}, {"OPTION_ROUTER_PROCESSES": "2"}, "one process of the router"),
        ({"a": {}}, {"OPTION_SERVER_ROLE": "prefill"}, "has one model"),
        ({"a": {}}, {"OPTION_BATCH_FOLDER": "/tmp/b"}, "works with one model only"),
    ],
)
def test_what_is_refused(models, environ, why):
    assert why in refused(models, **environ)


def test_a_models_folder_is_below_the_roots(tmp_path):
    inside, outside = tmp_path / "models" / "x", tmp_path / "other"
    inside.mkdir(parents=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    roots = (str(tmp_path / "models"),)
    assert offered.folder(str(inside), roots) == inside
    assert offered.folder(f"file://{inside}", roots) == inside
    for url in (str(outside), f"{inside}/../../other", f"{inside}/link", "s3://bucket/x", "/etc"):
        with pytest.raises(SettingsError, match="models may be under"):
            offered.folder(url, roots)
    with pytest.raises(SettingsError, match="there is no such folder"):
        offered.folder(f"{inside}/nothing", roots)
    with pytest.raises(SettingsError, match="should be a path"):
        offered.folder("\0", roots)


def test_the_room_that_is_needed():
    (offer,) = listed({"a": {}}).models
    need = dataclasses.replace(offer, awake=Footprint(3, 4))
    assert offered.needs(need, Footprint(0), Footprint(3, 4)) == ""
    assert "there is room for" in offered.needs(need, Footprint(0, 1), Footprint(3, 4))
