# SPDX-License-Identifier: Apache-2.0
"""The facts about this machine that are gathered before a plan."""

import json
import shutil
from pathlib import Path

import pytest

from lmi_config.options.settings import SettingsError
from lmi_config.plan.kv_tiers import Tiers
from serving.server.prepare import prepare
from tests.lmi_config.facts.test_model import safetensors
from tests.test_entrypoint import CONFIG

SHM = Path("/dev/shm")
CONNECTOR = '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'


@pytest.fixture
def environ(tmp_path):
    """LMI's manual mode: LMCache's own configuration names the disk tier."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [2, 3])}))
    return {
        "OPTION_MODEL_ID": str(tmp_path),
        "OPTION_KV_TRANSFER_CONFIG": CONNECTOR,
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.01",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "0.01",
    }


@pytest.fixture(autouse=True)
def two_kinds_of_disks(tmp_path):
    found = {Path(folder).stat().st_dev for folder in (SHM, tmp_path)}
    if len(found) < 2:
        pytest.skip("needs temporary files on another file system than /dev/shm")


def test_the_disk_that_lmcaches_configuration_names_is_measured(environ, tmp_path):
    disk = tmp_path / "not/yet"
    plan = prepare(
        {**environ, "LMCACHE_LOCAL_DISK": f"file://{disk}", "OPTION_KV_DISK_PATH": str(SHM)}
    ).plan
    assert (plan.machine.disk.path, plan.machine.disk.kind) != (str(SHM), "tmpfs")
    assert plan.machine.disk.total == shutil.disk_usage(tmp_path).total
    assert isinstance(plan.tiers, Tiers)
    assert plan.tiers.disk
    assert plan.tiers.disk.path == str(disk)
    assert plan.tiers.disk.size == round(0.01 * (1 << 30))


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ('{"sliding_window": 64, "layer_types": ["sliding_attention"]}', "windows_only"),
        ('{"architectures": ["MyOwnForCausalLM"]}', "unknown"),
        ("not JSON, which vLLM refuses", "full"),
    ],
)
def test_what_overrides_a_models_configuration_counts(environ, overrides, kind):
    del environ["OPTION_KV_TRANSFER_CONFIG"]
    automatic = {"OPTION_LMCACHE_AUTO_CONFIG": "true", "OPTION_HF_OVERRIDES": overrides}
    assert prepare({**environ, **automatic}).plan.verdict.kind == kind


def test_memory_is_no_disk_wherever_it_is_named(environ, tmp_path):
    plan = prepare(
        {**environ, "LMCACHE_LOCAL_DISK": str(SHM / "kv"), "OPTION_KV_DISK_PATH": str(tmp_path)}
    ).plan
    assert isinstance(plan.tiers, Tiers)
    assert plan.tiers.disk is None
    assert (
        "no disk tier: left out: /dev/shm/kv is a tmpfs, which is memory; name a folder on a disk "
        "as local_disk"
    ) in plan.findings


def test_a_template_that_cannot_be_read_is_found_before_the_start(environ, tmp_path):
    missing, odd = tmp_path / "nothing.jinja", tmp_path / "odd.jinja"
    odd.write_bytes(b"\xff\xfe")
    for file, reason in (
        (missing, "No such file or directory; give a file's path"),
        (odd, "'utf-8'"),
    ):
        with pytest.raises(SettingsError) as refused:
            prepare({**environ, "OPTION_CHAT_TEMPLATE": str(file)})
        (fault,) = refused.value.faults
        assert fault.startswith(f"OPTION_CHAT_TEMPLATE={str(file)!r}: {reason}")


def test_a_template_may_be_text_or_one_of_vllms(environ):
    for template in ("{{ messages }}", "template_chatml.jinja"):
        plan = prepare({**environ, "OPTION_CHAT_TEMPLATE": template}).plan
        assert plan.options["chat_template"] == template
