# SPDX-License-Identifier: Apache-2.0
"""The scripts that users and developers call, up to the start of an engine."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.models import default
from tests.test_entrypoint import run

ROOT = Path(__file__).parents[2]
DOORS = (
    *("serve", "plan", "tune", "route", "sagemaker", "hyperpod"),
    *("build", "check", "test", "lock", "dev"),
)
UV = 'echo "uv was asked: $@" >&2; exit 9'


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def root(tmp_path):
    """A fresh checkout, with a uv that installs nothing."""
    for folder in ("scripts", "tools", "tests/support", "lmi_config"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "requirements").mkdir()
    for engine in ("cpu", "gpu", "dev"):
        shutil.copy(ROOT / f"requirements/{engine}.txt", tmp_path / "requirements")
    program(tmp_path / "entrypoint.sh", 'echo "$@; ${OPTION_MODEL_ID-no model}"')
    program(tmp_path / "uv", UV)
    return tmp_path


@pytest.fixture
def ready(root):
    """A checkout whose environment is already set up. It makes a model by printing its name."""
    python = 'case "$*" in *tests.support.models.default*) echo "made for $*" ;; esac'
    for name in ("python", "python3.11"):
        program(root / ".venv/bin" / name, python)
    stamp(root)
    return root


def stamp(root, *more):
    """Record that the environment matches the lock files: the engine's, and more."""
    with (root / ".venv/.slipway").open("w") as file:
        for engine in ("cpu", "gpu"):
            locks = [root / f"requirements/{it}.txt" for it in (engine, *more)]
            content = b"".join(it.read_bytes() for it in locks)
            file.write(f"{engine} {hashlib.sha256(content).hexdigest()}\n")


def call(root, door, *words, **environ):
    kept = {"PATH": os.environ["PATH"], "HOME": str(root / "home")}
    return subprocess.run(
        [root / "scripts" / door, *words],
        env={**kept, "SLIPWAY_UV": str(root / "uv"), **environ},
        cwd="/",
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("door", DOORS)
def test_each_helps_without_installing_anything(root, door):
    ended = call(root, door, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) >= 2


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("hyperpod", ("apply", "--help")),
        ("dev", ("bench", "overhead", "--help")),
        ("sagemaker", ("-h",)),
        ("hyperpod", ("-h",)),
    ],
)
def test_help_installs_nothing_where_only_an_engine_is(ready, door, words):
    ended = call(ready, door, *words)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("door", "words"), [("serve", ()), ("check", ()), ("dev", ("simulate",)), ("dev", ("chaos",))]
)
def test_an_update_that_fails_ends_it_and_leaves_the_environment(ready, door, words):
    before = (ready / ".venv/.slipway").read_text()
    with (ready / "requirements/cpu.txt").open("a") as lock:
        lock.write("# newer\n")
    ended = call(ready, door, *words)
    assert ended.returncode == 1
    assert "uv was asked: pip install" in ended.stderr
    assert "could not bring .venv up to date, and left it as it was" in ended.stderr
    assert {it.name for it in ready.glob(".venv*")} <= {".venv", ".venv.lock"}
    assert (ready / ".venv/.slipway").read_text() == before
    assert (ready / ".venv/bin/python").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("engine",), "say engine VERSION"),
        (("engine", "--unpacked"), "say engine VERSION"),
        (("bench", "nothing"), "there is no such bench"),
        (("nothing",), "nothing: there is no such verb"),
    ],
)
def test_a_verb_that_is_not_one_is_refused_before_anything_is_installed(root, words, reason):
    ended = call(root, "dev", *words)
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert not (root / "build").exists()


def test_what_is_ready_needs_no_uv(ready):
    path = os.environ["PATH"].split(":")
    without = ":".join(it for it in path if not Path(it, "uv").exists())
    ended = call(ready, "route", "http://a", SLIPWAY_UV="", HOME="/dev/null", PATH=without)
    assert (ended.returncode, ended.stdout) == (0, "route http://a; no model\n")


def test_a_long_list_of_libraries_has_libnuma(root):
    """`grep -q` ends before `ldconfig` has written everything, which pipefail treats as a fault."""
    program(root / "bin/ldconfig", "echo libnuma.so.1; seq 100000")
    checks = "set -euo pipefail; . scripts/env.sh; need_libnuma"
    path = f"{root}/bin:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", checks], cwd=root, env={"PATH": path}, check=True)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("e2e",), "tests/e2e -n 3 --dist loadfile --no-loadscope-reorder --budget=2000"),
        (("e2e", "-x"), "tests/e2e -n 3 --dist loadfile --no-loadscope-reorder -x"),
        (
            ("e2e", "tests/e2e/test_life.py::test_it"),
            "-n 3 --dist loadfile --no-loadscope-reorder tests/e2e/test_life.py::test_it",
        ),
        (("gpu", "-k", "tests"), "tests/gpu -k tests"),
    ],
)
def test_tests_are_chosen_by_their_paths(ready, words, asked):
    program(ready / ".venv/bin/python", '[ "$1" = -c ] || echo "$@"')
    stamp(ready, "dev")
    assert call(ready, "test", *words).stdout == f"-m pytest {asked}\n"


@pytest.mark.parametrize(
    ("fast", "e2e", "code"), [(0, 0, 0), (0, 5, 0), (5, 0, 0), (5, 5, 5), (1, 0, 1), (5, 1, 1)]
)
def test_all_the_tests_that_arguments_choose(ready, fast, e2e, code):
    ending = f'case "$*" in *--ignore*) exit {fast} ;; *) exit {e2e} ;; esac'
    program(ready / ".venv/bin/python", f'[ "$1" != -c ] || exit 0; {ending}')
    stamp(ready, "dev")
    assert call(ready, "test", "-k", "some").returncode == code


@pytest.mark.parametrize(
    ("changed", "committed", "runs"),
    [
        ("serving/a.py", True, False),
        ("tools/a.py", True, True),
        ("tools/a.py", False, True),
        ("tests/support/a.py", True, True),
        (None, True, True),  # no history
    ],
)
def test_tests_of_tools_run_where_tools_have_changed(ready, changed, committed, runs):
    program(ready / ".venv/bin/python", '[ "$1" = -c ] || echo "$@"')
    stamp(ready, "dev")

    def git(*words, **environ):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        command = ["git", "-C", ready, *who, *words]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | environ)

    if changed:
        git("init", "--quiet")
        (ready / ".git/info/exclude").write_text(".venv\nhome\n")
        git("add", "--all")
        git("commit", "--message", "old", GIT_COMMITTER_DATE="2020-01-01T00:00:00Z")
        program(ready / changed, "")
        if committed:
            git("add", "--all")
            git("commit", "--message", "new")
    ended = call(ready, "test", "fast")
    assert ("--ignore tests/tools" not in ended.stdout) == runs
    assert ("leaving out tests/tools" not in ended.stderr) == runs
    assert "--ignore tests/tools" not in call(ready, "test", "fast", "-k", "some").stdout


@pytest.mark.parametrize(
    ("door", "words"),
    [
        ("serve", ("org/m", "--help")),
        ("plan", ("-h",)),
        ("tune", ("org/m", "--workload", "w.yaml", "-h")),
        ("route", ("--help", "http://a")),
    ],
)
def test_help_of_a_verb_lists_its_flags(root, door, words):
    assert "\n  --max-model-len\n" in call(root, door, *words).stdout


def test_dev_lists_every_verb_and_every_bench():
    listed = call(ROOT, "dev").stdout
    folder = ROOT / "tools/bench"
    benches = {it.stem for it in folder.glob("*.py")}
    benches |= {it.parent.name for it in folder.glob("*/__main__.py")}
    benches |= {"ceiling", "copies", "fleet"}  # in tools/ceiling
    assert benches == set(re.findall(r"^  bench (\w+) {2,}\w", listed, re.MULTILINE))
    cases = re.findall(r"^ {4}([a-z][a-z| -]*)\)", (ROOT / "scripts/dev").read_text(), re.MULTILINE)
    verbs = {verb for case in cases for verb in case.split(" | ")}
    assert verbs == set(re.findall(r"^  ([a-z-]+) .* {2,}\w", listed, re.MULTILINE))


def test_the_readme_names_every_door():
    doors = {it.name for it in (ROOT / "scripts").iterdir() if os.access(it, os.X_OK)}
    doors = {it for it in doors if (ROOT / "scripts" / it).is_file()}
    assert doors == set(DOORS)
    assert doors == set(re.findall(r"`scripts/(\w+)", (ROOT / "scripts/README.md").read_text()))


@pytest.mark.parametrize("door", ["serve", "tune", "route"])
def test_a_mistyped_flag_ends_it_before_anything_is_installed(root, door):
    ended = call(root, door, "--max-modle-len", "8k")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "--max-modle-len: no such option; did you mean --max-model-len?" in ended.stderr
    assert "uv" not in ended.stderr


@pytest.mark.parametrize("door", ["serve", "plan", "tune"])
def test_arguments_are_passed_on(ready, door):
    words = ("org/m", "--max-model-len", "8k")
    made = f"made for -P -m tests.support.models.default {door} org/m --max-model-len 8k"
    assert call(ready, door, *words).stdout == f"{door} {' '.join(words)}; {made}\n"


def test_a_router_gets_its_replicas_and_no_model(ready):
    """It would tokenise for another model than the servers', and never match."""
    assert call(ready, "route", "http://a:1", "http://b:1").stdout == (
        "route http://a:1 http://b:1; no model\n"
    )
    named = call(ready, "route", OPTION_MODEL_ID="org/model").stdout
    assert named == "route; org/model\n"


def test_a_plan_sets_up_no_engine(root):
    ended = call(root, "plan", "org/m")
    asked = ended.stderr.partition("uv was asked: ")[2]
    assert asked.startswith("run --quiet --no-project --isolated")
    assert asked.count("--with ") == asked.count("==") == 9
    assert "vllm" not in asked
    assert asked.endswith("scripts/plan org/m\n")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [it for it in os.environ if it.startswith(("OPTION_", "HF_", "SERVING_"))]:
        monkeypatch.delenv(name)
    return tmp_path / "slipway"


def test_a_plan_gets_an_outline_of_the_default_model(cache, capsys):
    default.main("plan", "--json", "--max-model-len", "4k")
    folder = capsys.readouterr().out.strip()
    assert folder == str(cache / "outlines" / default.NAME)
    ended = run("plan", folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.search(r"^KV per token +22\.5 KiB +30 layers$", ended.stdout, re.MULTILINE)
    assert re.search(r"^longest request +8,192 tokens", ended.stdout, re.MULTILINE)
    weights = Path(folder, "model.safetensors").stat()
    assert 134_515_008 * 2 < weights.st_size < 134_515_008 * 2 + 2**16
    assert weights.st_blocks * 512 < 2**20


@pytest.mark.parametrize("words", [("org/m",), ("--model", "m"), ("--model-id=m",)])
def test_there_is_no_default_where_a_model_is_named(cache, capsys, words):
    default.main("plan", *words)
    assert capsys.readouterr().out == ""


def test_there_is_no_default_where_a_variable_or_a_folder_names_one(
    cache, capsys, monkeypatch, tmp_path
):
    with monkeypatch.context() as context:
        context.setenv("HF_MODEL_ID", "org/m")
        default.main("plan")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "config.json").write_text("{}")
    monkeypatch.setenv("SERVING_MODEL_STORE", str(tmp_path / "store"))
    default.main("plan")
    assert capsys.readouterr().out == ""
