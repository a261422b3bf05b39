# SPDX-License-Identifier: Apache-2.0
"""README and docs/ show options that the programs accept, and output that they print.

Each code block is executed, parsed or compared, depending on its language; tests/e2e/test_docs.py
sends the requests to a server. Names of options, files, series and links must exist.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import handlers.djl_python
from lmi_config.options import arguments, settings
from lmi_config.options.declared import OPTIONS, vllm_options
from lmi_config.options.ignored import REFUSED, REMOVED, UNUSED
from lmi_config.options.settings import SettingsError
from lmi_config.plan import explain, plan
from tests import documented
from tests.documented import PAGES, ROOT, Block, Call, Command
from tests.lmi_config.examples import PARTS, machine, model

LANGUAGES = {"console", "python", "json", "jsonl", "yaml", "properties", "text"}
PROGRAMS = {
    *("aws", "curl", "docker", "git", "grep", "helm", "kubectl", "pip", "printf", "python3", "tar"),
    "tail",
}
"""Other people's programs that commands may call."""
COMMANDS = list(documented.commands())
DOCS = {page: text for page, text in PAGES.items() if page.startswith("docs/")}


def named(items):
    return pytest.mark.parametrize("block", [*items], ids=lambda it: it.name)


# Blocks


def test_every_block_says_its_language():
    assert [it.name for it in documented.blocks() if it.language not in LANGUAGES] == []


@named(documented.blocks("json", "jsonl"))
def test_json_is_json(block):
    for text in block.text.splitlines() if block.language == "jsonl" else [block.text]:
        json.loads(text)


@named(documented.blocks("yaml"))
def test_yaml_is_yaml(block):
    assert yaml.safe_load(block.text)


@named(documented.blocks("python"))
def test_python_imports_what_is_there(block, monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", handlers.djl_python)
    monkeypatch.syspath_prepend(ROOT / "examples" / "sagemaker")
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(
                    f"{node.module}.{name.name}"
                )


# Commands


@functools.cache
def verbs(script: str) -> dict[str, str]:
    """A script's verbs → the module that each runs, read from its text."""
    text = (ROOT / script).read_text().partition("\ncase ")[2]
    found = {}
    for labels, body in re.findall(r"^    ([\w |-]+)\)(.*?);;", text, re.MULTILINE | re.DOTALL):
        module = re.search(r'-m "?([\w.$]+)', body)
        found.update({it.strip(): module[1] if module else "" for it in labels.split("|")})
    return found


@functools.cache
def usage(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def check_script(call: Call) -> None:
    script, *words = call.words
    assert os.access(ROOT / script, os.X_OK), f"there is no {script}"
    verb = next(iter(words), "")
    if script in ("scripts/serve", "scripts/plan", "scripts/tune", "scripts/route"):
        configured(call.environ, Path(script).name, words)
    elif script == "scripts/build":
        assert verb in ("cpu", "gpu")
    elif script == "scripts/check":
        assert set(words) <= {"--fix"}
    elif script in ("scripts/dev", "scripts/sagemaker"):
        assert verb in verbs(script), f"{script} has no verb {verb}"
        module, arguments_ = verbs(script)[verb], words[1:]
        if "$bench" in module:
            module, arguments_ = module.replace("$bench", words[1]), words[2:]
            module = module.replace("bench.ceiling", "ceiling")
            assert importlib.util.find_spec(module), f"there is no bench {words[1]}"
        flags = [it.partition("=")[0] for it in arguments_ if it.startswith("--")]
        if flags and module:
            prefix = [verb] if script == "scripts/sagemaker" else []
            text = usage(module, *prefix)
            missing = [it for it in flags if not re.search(rf"{it}(?![\w-])", text)]
            assert not missing, f"{script} {verb} has no {missing}"


def configured(environ, verb, words):
    """The options as the program reads them. Raises SettingsError if it would refuse them."""
    words = [it for it in words if it not in ("--json", "--help")]
    return settings.read(environ, arguments.read(verb, words))


def container(words):
    """The environment and the command that `docker run` passes to the container."""
    given = [word for flag, word in itertools.pairwise(words) if flag in ("-e", "--env")]
    environ = dict(it.split("=", 1) for it in given)
    image = next(n for n, word in enumerate(words) if word.startswith("slipway:"))
    assert re.fullmatch(r"slipway:[cg]pu(-sagemaker)?", words[image]), words[image]
    return environ, words[image + 1 :]


def check(call: Call) -> None:
    program = call.words[0]
    if program.startswith("scripts/"):
        check_script(call)
    elif program == ".venv/bin/python":
        name = call.words[2] if call.words[1] == "-m" else call.words[1].removesuffix(".py")
        assert importlib.util.find_spec(name.replace("/", ".")), f"there is no {name}"
    else:
        assert program in PROGRAMS, program
    if call.words[:2] == ["docker", "run"]:
        environ, command = container(call.words)
        verb, *words = command or ["serve"]
        assert verb in ("serve", "warm", "plan", "tune", "route", "keys", "vllm", "bash")
        if verb not in ("vllm", "keys"):
            configured(environ, verb, words)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda it: f"{it.where} {it.line[:40]}")
def test_a_command_calls_what_is_there(command):
    fails = " cannot be used:" in command.output or "failed" in command.output
    with contextlib.suppress(SettingsError) if fails else contextlib.nullcontext():
        for call in documented.calls(command.line):
            check(call)


def shown(part: str) -> list[Command]:
    return [it for it in COMMANDS if part in it.output]


def planned(environ):
    """The plan on a machine with two CPUs."""
    read = settings.read(environ)
    return plan.make(read, machine(cpus=(0, 1)), model(0.3), None, environ, PARTS)


def options_of(command: Command):
    call = next(documented.calls(command.line))
    if call.words[0] == "docker":
        return container(call.words)[0]
    return call.environ


@pytest.mark.parametrize("command", shown(" cannot be used:\n"), ids=lambda it: it.where)
def test_faults_are_shown_as_they_are_printed(command):
    call = next(documented.calls(command.line))
    if call.words[0] == "scripts/sagemaker":
        environ = dict([call.words[call.words.index("--env") + 1].split("=")])
    else:
        environ = options_of(command)
    with pytest.raises(SettingsError) as refused:
        planned(environ)
    assert command.output.strip() == str(refused.value)


@pytest.mark.parametrize("command", shown("longest request  "), ids=lambda it: it.where)
def test_a_plan_has_the_rows_that_are_shown(command):
    environ = {"OPTION_MODEL_ID": "some/model", **options_of(command)}
    made = plan.make(settings.read(environ), machine(cpus=(0, 1)), model(0.3), None, environ, PARTS)
    printed = {label.strip() for label, *_ in explain.rows(made)}
    rows = command.output.partition("\n\n")[0].partition("to know:")[0].splitlines()
    labels = {re.split(r" {2,}", it.strip())[0] for it in rows if it[:24].strip() and it != "..."}
    assert len(labels) > 3
    assert labels - printed == set()


@functools.cache
def paths() -> list[str]:
    described = yaml.safe_load((ROOT / "docs/reference/openapi.yaml").read_text())["paths"]
    return [re.sub(r"{\w+}", "[^/]+", it) for it in [*described, "/replicas", "/livez"]]


CURLS = [it for it in COMMANDS if it.line.startswith("curl ")]


@pytest.mark.parametrize("command", CURLS, ids=lambda it: f"{it.where} {it.line[:60]}")
def test_curl_asks_for_what_the_api_has(command):
    call, *_ = documented.calls(command.line)  # the rest of a pipe reads its output
    (url,) = [it for it in call.words if re.match(r"(https?://)?localhost:", it)]
    path = "/" + url.partition("?")[0].partition("://")[2 if "://" in url else 0].partition("/")[2]
    assert any(re.fullmatch(it, path) for it in paths()), path
    if "-d" in call.words:
        json.loads(call.words[call.words.index("-d") + 1])


# Examples that run


def block_of(page: str, first: str) -> Block:
    """The page's only block that begins with this text."""
    (found,) = [it for it in documented.blocks() if it.page == page and it.text.startswith(first)]
    return found


def test_the_formatters_of_the_guide_work(monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", handlers.djl_python)
    module: dict[str, Any] = {}
    both = "from djl_python.input_parser import input_formatter\nfrom djl_python.output_formatter"
    first = f"{both} import output_formatter\n\n\n@input_formatter\ndef question"
    text = block_of("docs/guides/formatters.md", first).text
    exec(compile(text, "model.py", "exec"), module)
    asked = module["question"]({"question": "Why?"})
    assert asked == {"inputs": "Why?", "parameters": {"max_new_tokens": 64}}
    answer = type("Answer", (), {"choices": [type("Choice", (), {"text": "So."})], "model": "lmi"})
    assert module["answer"](answer) == {"answer": "So.", "model": "lmi"}
    assert module["answer"]("data: {}") == "data: {}"


# Names


KNOWN = {
    *(name for it in OPTIONS.values() for name in it.all_names),
    *(f"{prefix}_{name.upper()}" for name in vllm_options() for prefix in ("OPTION", "SM_VLLM")),
    *(f"SM_VLLM_{it.vllm.upper()}" for it in OPTIONS.values() if it.vllm),
    *UNUSED,
    *REMOVED,
    *(f"OPTION_{name.upper()}" for name in REFUSED),
}
OPTION = re.compile(r"\b((?:OPTION|SERVING|SM_VLLM)_[A-Z0-9_]*[A-Z0-9])\b(?!_?[*<])")
SERIES = re.compile(r"\b(slipway_[a-z0-9_]*[a-z0-9])\b(?!_?[*])")
COUNTED = {*re.findall(r"^\| `(slipway_\w+)`", PAGES["docs/reference/metrics.md"], re.MULTILINE)}
CURRENT = [page for page in PAGES if page != "CHANGELOG.md"]
"""All pages except the changelog, which may name removed things."""


@pytest.mark.parametrize("page", CURRENT)
def test_options_exist(page):
    mistakes = {*re.findall(r"(\w+): no such option", PAGES[page])}
    assert {*OPTION.findall(PAGES[page])} - KNOWN - mistakes == set()


@pytest.mark.parametrize("page", PAGES)
def test_series_exist(page):
    names = {*SERIES.findall(documented.prose(PAGES[page]))}
    assert {re.sub("_(bucket|sum|count)$", "", it) for it in names} - COUNTED == set()


PLACES = re.compile(
    r"`((?:scripts|serving|lmi_config|handlers|tests|docs|deploy|examples|requirements)/[\w./-]*)`"
)


@pytest.mark.parametrize("page", CURRENT)
def test_files_exist(page):
    assert [it for it in PLACES.findall(PAGES[page]) if not (ROOT / it).exists()] == []


# Links and the site


def slug(heading: str) -> str:
    text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\s-]", "", text).replace(" ", "-")


def anchors(page: str) -> set[str]:
    return {slug(it) for it in re.findall(r"^#+ (.+)$", documented.prose(PAGES[page]), re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    here = (ROOT / page).parent
    for target, anchor in re.findall(
        r"]\(([^)#\s]*)(?:#([^)]*))?\)", documented.prose(PAGES[page])
    ):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (here / target).resolve() if target else ROOT / page
        assert file.exists(), target
        if page in DOCS:
            assert file.is_relative_to(ROOT / "docs"), f"{target} is not on the site"
        if anchor:
            assert anchor in anchors(str(file.relative_to(ROOT))), f"{target}#{anchor}"


def test_every_page_is_in_the_sites_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/]+\.md", json.dumps(site["nav"]))
    assert sorted(f"docs/{it}" for it in listed) == sorted(DOCS)


@pytest.mark.parametrize("page", [it for it in CURRENT if it != "docs/reference/options.md"])
def test_prose_has_lines_of_at_most_100_columns(page):
    lines = documented.prose(PAGES[page]).splitlines()
    assert [it for it in lines if len(it) > 100 and not it.startswith("|")] == []
