# SPDX-License-Identifier: Apache-2.0
"""SageMaker's secure mode: the refusals of `plan` and `serve`, and the adapter registry's
behaviour.
"""

import functools
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lmi_config.options.declared import PICKLE_FILES, REMOTE_CODE, REQUIREMENTS, SCRIPTS, TEMPLATE
from serving.__main__ import main
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from serving.user_code import start_user_code
from tests.lmi_config.facts.test_model import safetensors
from tests.serving.conftest import running
from tests.serving.lora.test_registry import BASE, LIMITS, write
from tests.test_entrypoint import CONFIG

ROOT = Path(__file__).parents[3]
ALL = (REQUIREMENTS, PICKLE_FILES, REMOTE_CODE, SCRIPTS, TEMPLATE)
REGISTERED = '{"status":"Adapter one registered"}'
WITH_TEMPLATE = json.dumps({"chat_template": "{{ messages }}"})


@pytest.fixture
def channel(tmp_path):
    """A folder with an acceptable model, which also has code for other servers."""
    folder = tmp_path / "model"
    folder.mkdir()
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": auto_map}))
    (folder / "configuration_own.py").write_text("raise SystemExit('it ran')")
    (folder / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [2, 3])}))
    (folder / "tokenizer_config.json").write_text('{"chat_template": null}')
    (folder / "serving.properties").write_text(
        "engine=Python\noption.async_mode=true\noption.rolling_batch=disable\n"
        "option.entryPoint=djl_python.lmi_vllm.vllm_async_service\noption.dtype=fp16\n"
        "option.max_model_len=256\noption.trust_remote_code=false\njob_queue_size=100\n"
    )
    return folder


def environ(channel, *controls, **more):
    return {
        "SERVING_MODEL_STORE": str(channel),
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": ",".join(controls),
        "SAGEMAKER_UNTRUSTED_CHANNELS": str(channel),
        **more,
    }


def put(channel, name, content="") -> None:
    path = channel / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def refusal(capsys, asked) -> str:
    """The text of `plan`'s refusal, after the heading; empty if it succeeds."""
    code = main(["plan"], asked)
    told: str = capsys.readouterr().err
    assert code == (2 if told else 0), told
    return told.partition("cannot be used:\n")[2]


def test_a_usual_channel_passes_all_controls(channel, capsys):
    assert refusal(capsys, environ(channel, *ALL)) == ""


FORBIDDEN = [
    (REQUIREMENTS, "requirements.txt", ""),
    (REQUIREMENTS, "deep/er/requirements.txt", ""),
    *(
        (PICKLE_FILES, f"weights{it}", "")
        for it in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".BIN")
    ),
    (PICKLE_FILES, "deep/er/weights.bin", ""),
    (SCRIPTS, "model.py", ""),
    (SCRIPTS, "adapters/one/model.py", ""),
    (TEMPLATE, "tokenizer_config.json", WITH_TEMPLATE),
    (TEMPLATE, "processor_config.json", WITH_TEMPLATE),
    (TEMPLATE, "adapters/one/tokenizer_config.json", WITH_TEMPLATE),
    (TEMPLATE, "chat_template.json", WITH_TEMPLATE),
    (TEMPLATE, "tokenizer_config.json", "[" * 100_000),
    (TEMPLATE, "chat_template.jinja", ""),
    (TEMPLATE, "additional_chat_templates/rag.jinja", ""),
    (TEMPLATE, "model.gguf", ""),
]


@pytest.mark.parametrize(("control", "name", "content"), FORBIDDEN)
def test_each_control_forbids_its_files_and_nothing_else(channel, capsys, control, name, content):
    put(channel, name, content)
    told = refusal(capsys, environ(channel, control))
    assert f"{channel}/{name}: " in told
    assert f"{control} forbids" in told
    others = [it for it in ALL if it != control]
    assert refusal(capsys, environ(channel, *others)) == ""
    without = environ(channel, control, SAGEMAKER_SECURE_MODE="false")
    assert refusal(capsys, without) == ""


@pytest.mark.parametrize(
    ("control", "given"),
    [
        (REMOTE_CODE, {"OPTION_TRUST_REMOTE_CODE": "true"}),
        (REMOTE_CODE, {"HF_MODEL_TRUST_REMOTE_CODE": "true"}),
        (SCRIPTS, {"OPTION_ENTRYPOINT": "model.py"}),
        (SCRIPTS, {"DJL_ENTRY_POINT": "model.py"}),
    ],
)
def test_what_a_control_names_may_not_be_asked_for_either(channel, capsys, control, given):
    (channel / "serving.properties").unlink()
    told = refusal(capsys, environ(channel, control, **given))
    assert f"{control} forbids it" in told
    assert next(iter(given)) in told
    others = [it for it in ALL if it != control]
    assert refusal(capsys, environ(channel, *others, **given)) == ""


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("serving.properties", "option.trust_remote_code=true"),
        ("serving.properties", "option.model_id=org/other"),
        ("serving.properties", "option.model_id=/"),
        ("serving.properties", "option.kv_transfer_config={}"),
        ("serving.properties", "option.tool_parser_plugin=/tmp/x.py"),
        ("serving.properties", "option.allowed_local_media_path=/"),
        ("serving.properties", "option.trust_request_internals=true"),
        ("serving.properties", "option.enable_log_requests=true"),
        ("slipway.yaml", "adapter_roots: [/]"),
        ("slipway.yaml", "speculative_draft_model: s3://other/draft"),
        ("slipway.yaml", "chat_template: '{{ messages }}'"),
        ("slipway.yaml", "LMCACHE_REMOTE_URL: redis://other"),
        ("slipway.yaml", "SAGEMAKER_BIND_TO_PORT: 81"),
    ],
)
def test_an_untrusted_file_widens_nothing(channel, capsys, name, line):
    put(channel, name, line)
    told = refusal(capsys, environ(channel, PICKLE_FILES))
    assert f"{line.partition('=')[0].partition(':')[0]}: " in told
    assert f"{channel / name} is in an untrusted channel and may not set it" in told


def test_the_same_is_fine_in_the_environment_and_in_trusted_files(channel, capsys, tmp_path):
    trusted = tmp_path / "trusted.yaml"
    trusted.write_text("allowed_media_domains: [example.org]\nLMCACHE_CHUNK_SIZE: 256\n")
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    given = {"OPTION_CHAT_TEMPLATE": str(template)}
    asked = environ(channel, *ALL, OPTION_CONFIG_FILE=str(trusted), **given)
    assert refusal(capsys, asked) == ""


@pytest.mark.parametrize("item", ["--trust-remote-code", "--tool-parser-plugin=/opt/evil.py"])
@pytest.mark.parametrize("name", ["serving.properties", "slipway.yaml"])
def test_no_value_of_an_untrusted_file_becomes_an_option_of_vllms(channel, capsys, name, item):
    line = "option.served_model_name=x," if name.endswith("s") else "served_model_name: x,"
    put(channel, name, line + item)
    assert f"'{item}' begins with a dash" in refusal(capsys, environ(channel, *ALL))


def test_an_untrusted_file_may_name_models_that_are_looked_at(channel, capsys):
    put(channel, "serving.properties", f"option.model_id={channel}")
    assert refusal(capsys, environ(channel, *ALL)) == ""


@pytest.mark.parametrize("name", ["SECURE_MODE", "SECURITY_CONTROLS", "UNTRUSTED_CHANNELS"])
def test_no_file_touches_secure_mode_itself(channel, capsys, name):
    put(channel, "slipway.yaml", f"SAGEMAKER_{name}: 'false'")
    told = refusal(capsys, environ(channel, PICKLE_FILES))
    assert f"slipway.yaml: SAGEMAKER_{name}: only the environment may set it" in told


@pytest.mark.parametrize(
    ("option", "name", "control"),
    [
        ("OPTION_CHAT_TEMPLATE", "template.txt", TEMPLATE),
        ("OPTION_TOOL_PARSER_PLUGIN", "parser.py", SCRIPTS),
        ("OPTION_LMCACHE_CONFIG_FILE", "lmcache.yaml", None),
    ],
)
def test_the_environment_may_not_lead_into_a_channel(channel, capsys, option, name, control):
    put(channel, name, "chunk_size: 256")
    asked = environ(channel, *ALL, **{option: str(channel / name)})
    told = refusal(capsys, asked)
    assert f"{option}: {channel / name} is in an untrusted channel" in told
    if control:
        others = [it for it in ALL if it != control]
        assert refusal(capsys, asked | {"SAGEMAKER_SECURITY_CONTROLS": ",".join(others)}) == ""


def test_links_may_lead_elsewhere_within_a_channel_only(channel, capsys, tmp_path):
    (channel / "blobs").mkdir()
    (channel / "blobs" / "1").write_text("{}")
    (channel / "generation_config.json").symlink_to("blobs/1")
    assert refusal(capsys, environ(channel, PICKLE_FILES)) == ""
    (channel / "weights").symlink_to(tmp_path)
    told = refusal(capsys, environ(channel, REQUIREMENTS))
    assert told == f"  {channel}/weights: links must not lead out of a folder in secure mode\n"


def test_a_links_own_name_counts(channel, capsys):
    (channel / "blob").touch()
    (channel / "weights.bin").symlink_to("blob")
    assert f"{channel}/weights.bin" in refusal(capsys, environ(channel, PICKLE_FILES))


def test_code_that_would_run_is_refused_outside_of_channels_too(channel, capsys, tmp_path):
    put(channel, "model.py")
    asked = environ(channel, SCRIPTS)
    del asked["SAGEMAKER_UNTRUSTED_CHANNELS"]
    assert f"{channel}/model.py: {SCRIPTS} forbids it" in refusal(capsys, asked)
    (channel / "model.py").unlink()
    put(channel, "weights.bin")
    assert refusal(capsys, asked | {"SAGEMAKER_SECURITY_CONTROLS": PICKLE_FILES}) == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"SAGEMAKER_SECURITY_CONTROLS": f"{PICKLE_FILES},DISALLOW_ALL"},
            "SAGEMAKER_SECURITY_CONTROLS='DISALLOW_PICKLE_FILES,DISALLOW_ALL': should be some of "
            "DISALLOW_REQUIREMENTS_TXT, ",
        ),
        ({"SAGEMAKER_SECURITY_CONTROLS": ""}, "SAGEMAKER_SECURITY_CONTROLS is not set"),
        ({"SAGEMAKER_UNTRUSTED_CHANNELS": "/nowhere"}, "'/nowhere' is no folder"),
        ({"SAGEMAKER_SECURE_MODE": "yes"}, "should be true or false"),
    ],
)
def test_what_the_platform_says_has_to_make_sense(channel, capsys, change, told):
    assert told in refusal(capsys, environ(channel, PICKLE_FILES) | change)


def test_many_files_are_one_fault(channel, capsys):
    for number in range(10):
        put(channel, f"{number}.bin")
    told = refusal(capsys, environ(channel, PICKLE_FILES))
    assert "and 7 more: a pickle can run code" in told
    assert len(told.splitlines()) == 1


def test_serve_ends_at_once(channel):
    put(channel, "model.py")
    put(channel, "weights.bin")
    ended = subprocess.run(
        [ROOT / "entrypoint.sh", "serve"],
        env={
            "PATH": os.environ["PATH"],
            "SLIPWAY_PYTHON": sys.executable,
            **environ(channel, *ALL),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert f"{channel}/weights.bin: a pickle can run code" in ended.stderr
    assert f"{channel}/model.py: {SCRIPTS} forbids it" in ended.stderr


@pytest.fixture
async def guarded(anyio_backend, tmp_path):
    """Gives servers whose registry is under some controls."""
    root = tmp_path / "adapters"

    def under(it, *controls):
        files = AdapterFiles((root,), (), tmp_path / "store", 10**6, controls)
        code = functools.partial(start_user_code, tokenizer=root, limits=LIMITS)
        it.pipeline.adapters = AdapterRegistry(it.engine, files, BASE, 16, 2, 2, 100, code, ())

    async with running() as it:
        yield lambda *controls: under(it, *controls) or it


async def register(served, src):
    answer = await served.client.post("/adapters", params={"name": "one", "src": str(src)})
    if answer.status_code == 200:
        assert (await served.client.delete("/adapters/one")).status_code == 200
    return answer.status_code, answer.text


def packed(folder: Path) -> Path:
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as members:
        for file in sorted(folder.iterdir()):
            members.add(file, file.name)
    return archive


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("control", "name", "content"),
    [
        (REQUIREMENTS, "requirements.txt", ""),
        (PICKLE_FILES, "deep/optimizer.pt", ""),
        (SCRIPTS, "model.py", ""),
        (TEMPLATE, "tokenizer_config.json", WITH_TEMPLATE),
        (TEMPLATE, "chat_template.jinja", ""),
    ],
)
async def test_adapters_are_looked_at_for_all_of_it(
    guarded, tmp_path, control, name, content, pack
):
    folder = write(tmp_path / "adapters" / "one")
    put(folder, name, content)
    src = packed(folder) if pack else folder
    status, told = await register(guarded(control), src)
    assert status == 400
    assert f"{src}/{name}: " in told
    assert f"{control} forbids" in told
    others = [it for it in ALL if it != control]
    assert await register(guarded(*others), src) == (200, REGISTERED)
    assert await register(guarded(), src) == (200, REGISTERED)


async def test_links_of_adapters(guarded, tmp_path):
    one = write(tmp_path / "adapters" / "one")
    write(tmp_path / "adapters" / "two")
    (one / "adapter_config.json").unlink()
    (one / "adapter_config.json").symlink_to("../two/adapter_config.json")
    assert (await register(guarded(), one))[0] == 200
    status, told = await register(guarded(PICKLE_FILES), one)
    assert status == 400
    assert "links must not lead out of a folder in secure mode" in told


async def test_links_in_archives_are_never_taken(guarded, tmp_path):
    folder = write(tmp_path / "adapters" / "one")
    archive = packed(folder)
    with tarfile.open(archive, "w:gz") as members:
        for file in sorted(folder.iterdir()):
            members.add(file, file.name)
        link = tarfile.TarInfo("more")
        link.type, link.linkname = tarfile.SYMTYPE, "adapter_config.json"
        members.addfile(link, io.BytesIO())
    for controls in ((), (PICKLE_FILES,)):
        assert (await register(guarded(*controls), archive))[0] == 424
