# SPDX-License-Identifier: Apache-2.0
"""Names that are not public: the installed libraries have them. If a library has lost such a name,
the start is refused or continues with a warning, as the patch says.
"""

import dataclasses
import importlib
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from serving.engine.patches.engine_core import plugin
from serving.http.patches import registry as http
from serving.patching import patch
from serving.patching.patch import Installed, Name, Patch, Unfit
from tools.engines.judge import PATCHES
from tools.generate.engine import patches_page
from tools.generate.engine import plugin as of_pyproject

log = logging.getLogger(__name__)
NAMES = [
    pytest.param(it, name, id=f"{it.name}-{name.place.partition(':')[2] or 'module'}-{number}")
    for it in PATCHES
    for number, name in enumerate(it.names)
]


@pytest.mark.parametrize("it", PATCHES, ids=lambda it: it.name)
def test_it_fits_what_is_installed(it):
    assert it.applies() is None


def test_names_are_unique_and_each_says_what_happens_without_it():
    assert len({it.name for it in PATCHES}) == len(PATCHES)
    for it in PATCHES:
        assert it.names, it.name
        assert it.does.endswith("."), it.name
        assert it.why.endswith("."), it.name
        assert not it.without.endswith("."), it.name


def test_the_page_lists_the_patches_and_versions():
    text = patches_page.PAGE.read_text()
    assert text == patches_page.page()
    assert [*re.findall(r"(?m)^\| `(\w+)` \|", text)] == [it.name for it in PATCHES]


def test_vllm_finds_the_plugin_that_pyproject_names(capsys):
    assert of_pyproject.main(check=True) == 0, capsys.readouterr().out
    (found,) = entry_points(group=plugin.GROUP, name=plugin.NAME)
    assert found.load() is plugin.load


class Changed(Installed):
    """The installed libraries, with one text in one module replaced by another."""

    def __init__(self, module: str, old: str) -> None:
        self._module, self._old = module, old
        longest = max(re.findall(r"\w+", old), key=len)
        self._new = old.replace(longest, "renamed_since")

    def source(self, module: str) -> str:
        found = super().source(module)
        if module != self._module:
            return found
        end = r"(?!\w)" if self._old[-1].isalnum() else ""
        return re.sub(rf"(?<!\w){re.escape(self._old)}{end}", self._new, found)


def broken(name: Name, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Break a name in every possible way, one after the other."""
    module, _, path = name.place.partition(":")
    *owners, last = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if path:
        with monkeypatch.context() as patched:
            patched.delattr(owner, last)
            yield last
    if name.parameters:
        with monkeypatch.context() as patched:
            patched.setattr(owner, last, lambda another, one: None)
            yield last
    for it in (*name.has, *name.says):
        with monkeypatch.context() as patched:
            patched.setattr(patch, "INSTALLED", Changed(module, it))
            yield it


@pytest.mark.parametrize(("it", "name"), NAMES)
def test_where_a_name_is_lost_the_start_is_refused_or_slower(it, name, monkeypatch, caplog):
    needed = dataclasses.replace(it, needed=lambda *_: True, put=never)
    ways = 0
    for lost in broken(name, monkeypatch):
        ways += 1
        caplog.clear()
        if it.closed:
            with pytest.raises(Unfit) as refused:
                patch.apply((needed,), log)
            told = str(refused.value)
            assert not caplog.records
        else:
            assert patch.apply((needed,), log) == []
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            told = record.getMessage()
        assert f"{it.name} does not fit" in told
        assert lost.strip() in told
        assert it.without in told
        assert re.search(r"(vLLM|LMCache|uvicorn|Starlette|OpenTelemetry|pydantic) \d+\.\d+", told)
    assert ways


def never(*_: Any) -> None:
    raise AssertionError("the patch is applied although a name is missing")


def example(**more: Any) -> Patch:
    given = {"names": (Name("json:dumps"),), "does": "A.", "why": "B.", "without": "c"}
    return Patch(**{"name": "a", "process": patch.SERVER, "closed": False, **given, **more})


def test_what_a_start_does_not_need_is_not_looked_at(caplog):
    other = example(names=(Name("vllm:no_such"),), needed=lambda wanted: wanted, closed=True)
    assert patch.apply((other,), log, False) == []
    with pytest.raises(Unfit, match="no_such"):
        patch.apply((other,), log, True)


def test_nothing_is_replaced_where_the_start_is_refused():
    done = []
    ours = example(name="ours", names=(Name("vllm:__version__"),), put=lambda: done.append(1))
    with pytest.raises(Unfit):
        patch.apply((ours, example(names=(Name("vllm:no_such"),), closed=True)), log)
    assert not done


@pytest.mark.parametrize("closed", [True, False])
def test_what_fails_where_it_is_put_in_place_is_told_too(closed, caplog):
    def put() -> None:
        raise AttributeError("'Served' object has no attribute 'parser'")

    failing = example(names=(Name("vllm:__version__"),), put=put, closed=closed)
    if closed:
        with pytest.raises(Unfit, match=r"a does not fit vLLM .*has no attribute 'parser'"):
            patch.apply((failing,), log)
    else:
        assert patch.apply((failing,), log) == []
        (record,) = caplog.records
        assert "has no attribute 'parser'" in record.getMessage()


def test_a_function_that_is_replaced_twice_is_replaced_once():
    class Theirs:
        def count(self) -> int:
            return 1

    for _ in range(3):
        patch.replace(Theirs, "count", lambda own: lambda self: own(self) + 1)
    assert Theirs().count() == 2
    assert Name(f"{__name__}:NAMES").missing() is None


def test_a_server_whose_connections_have_no_limits_does_not_start(monkeypatch):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from serving.http.connections import HttpServer

    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    with pytest.raises(Unfit, match=r"connections does not fit uvicorn \d.*_start_asgi_task"):
        HttpServer(None, 1, 1, None)  # type: ignore[arg-type]
    assert http.PATCHES


CACHE_SERVER = """
import runpy
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
del KVEventModule._record_kv_event
runpy.run_module("serving.kv_cache.lmcache", run_name="__main__")
"""


def test_a_cache_server_that_would_tell_of_tenants_does_not_start():
    done = python(CACHE_SERVER)
    assert done.returncode == 1
    assert re.search(
        r"Unfit: salted_events does not fit LMCache \d.*KVEventModule\._record_kv_event",
        done.stdout,
    )


LOADED = """
import os, sys
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.plugins import load_general_plugins
from serving.engine.patches.engine_core import plugin

for case in sys.argv[1:]:
    if os.fork():
        print(case, "ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    if case == "whole":
        os.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver"
    plugin.want(os.environ, adapters=case not in ("no-adapters", "loader"), loader=case == "loader")
    if case == "renamed":
        del WorkerLoRAManager._load_adapter
    if case == "changed":
        lora_ops.bgmv_shrink = lambda inputs, slots: None
    load_general_plugins()
    plugin.require()
    print(hasattr(getattr(WorkerLoRAManager, "_load_adapter", None), "_slipway_replaces"))
    if case == "loader":
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader
        extra = {"arriving": {"files": {}, "sign": ""}}
        config = LoadConfig(load_format="slipway", model_loader_extra_config=extra)
        print(type(get_model_loader(config)).__name__)
    break
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[int, str]]:
    """The exit code and the output of an engine's process in each case. All are forked from one
    process, since importing vLLM takes most of the time.
    """
    cases = ("whole", "no-adapters", "loader", "renamed", "changed")
    done = python(LOADED, *cases)
    found, rest = {}, done.stdout
    for case in cases:
        output, ended, rest = rest.partition(f"{case} ended with ")
        assert ended, done.stdout
        code, _, rest = rest.partition("\n")
        found[case] = int(code), output
    return found


def python(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": "."},
        stdin=subprocess.DEVNULL,
    )


def test_vllm_loads_what_adapters_need_whatever_plugins_it_may_load(loaded):
    code, output = loaded["whole"]
    assert (code, output.split()[-1]) == (0, "True"), output


def test_without_adapters_vllm_is_left_as_it_is(loaded):
    code, output = loaded["no-adapters"]
    assert (code, output.split()[-1]) == (0, "False"), output


def test_vllm_has_the_loader_that_waits_for_files(loaded):
    code, output = loaded["loader"]
    assert (code, output.split()[-2:]) == (0, ["False", "WaitingLoader"]), output


@pytest.mark.parametrize(
    ("allowed", "then"),
    [(None, None), ("", ",slipway"), ("a", "a,slipway"), ("slipway", "slipway")],
)
def test_the_plugin_joins_those_that_vllm_may_load(allowed, then):
    environ = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    plugin.want(environ, adapters=True)
    assert environ.get("VLLM_PLUGINS") == then


def test_an_engine_that_cannot_check_adapters_warns(loaded):
    code, output = loaded["renamed"]
    assert code == 0, output
    assert output.count("1 of Slipway's patches left out: unapplied_adapters does not fit") == 1


def test_an_engine_that_would_mix_up_adapters_does_not_start(loaded):
    code, output = loaded["changed"]
    assert code == 1
    assert re.search(r"Unfit: cpu_lora_kernels does not fit vLLM \d.*bgmv_shrink", output)


def test_a_start_with_adapters_is_refused_where_vllm_cannot_find_the_plugin(monkeypatch):
    monkeypatch.setattr(plugin, "entry_points", lambda **_: ())
    with pytest.raises(Unfit, match=r"slipway\.dist-info has to be beside"):
        plugin.want({}, adapters=True)
    plugin.want({}, adapters=False)


def test_a_plugin_that_vllm_does_not_call_is_noticed(monkeypatch):
    environ: dict[str, str] = {}
    plugin.want(environ, adapters=True)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Unfit, match="vLLM has not loaded"):
        plugin.require()
