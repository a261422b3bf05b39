# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM and LMCache: which are supported, and how a start treats others."""

import asyncio
import logging
import re
import tomllib

import pytest

from serving.engine import vllm
from serving.engine.base import EngineError
from serving.engine.versions import moved, table
from serving.engine.versions.table import Range, judge
from serving.patching.patch import installed
from tools.engines.judge import Unpacked, lost_imports, lost_patches, main
from tools.engines.trial import recorded, summary

KNOWN = Range(
    *("0.31", "0.33.1", {"0.34.0": "its wheel, unpacked"}),
    *({"0.31.7": "it hears nothing"}, {"0.32.5": "it loses tokens"}),
)


@pytest.mark.parametrize(
    "version", ["0.31.0", "0.31.9", "0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1", "0.33.1.post1"]
)
def test_a_supported_version_is_no_news(version):
    assert judge("vLLM", version, KNOWN) is None


@pytest.mark.parametrize(
    ("version", "refused", "told"),
    [
        ("0.30.9", False, r"vLLM 0.30.9 is outside .*0.31 to 0.33.1; nothing was seen of it"),
        ("0.33.2", False, r"vLLM 0.33.2 is outside .*0.31 to 0.33.1"),
        ("0.34.0rc1", False, r"of it was seen: its wheel, unpacked"),
        ("0.31.7", False, r"vLLM 0.31.7 works but for this: it hears nothing"),
        ("1.0", False, r"vLLM 1.0 is outside"),
        ("0.32.5", True, r"vLLM 0.32.5 does not work with Slipway: it loses tokens; install 0.31"),
        ("0.32.5+cpu", True, r"it loses tokens"),
    ],
)
def test_another_version_is_told(version, refused, told):
    found = judge("vLLM", version, KNOWN)
    assert found
    assert found.refused == refused
    assert re.search(told, found.told)


def test_the_table_knows_what_is_installed():
    for package, known in table.read().items():
        version = installed(package)
        assert version in known.seen or "(not installed)" in version
        assert judge(package, version, known._replace(limits={})) is None
        for bound in (known.oldest, known.newest):
            assert any(it == bound or it.startswith(f"{bound}.") for it in known.seen)


def at(monkeypatch, version):
    monkeypatch.setattr(table.check, "__defaults__", (lambda _: version,))


def test_a_start_warns_once_of_a_version_that_is_not_supported(monkeypatch, caplog):
    table.check(lambda package: {"vllm": "0.99.1"}.get(package, "0.5.6"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "vLLM 0.99.1 is outside" in record.getMessage()


def test_a_start_is_refused_with_a_version_that_does_not_work(monkeypatch):
    at(monkeypatch, "0.30.0")
    with pytest.raises(EngineError, match=r"vLLM 0\.30\.0 does not work with Slipway: .*install"):
        asyncio.run(vllm.load(lambda *_: None))


def test_moved_names_are_found_at_their_present_place():
    assert moved.cli_args().make_arg_parser
    assert moved.chat_utils().MM_PARSER_MAP
    assert getattr(moved.chat_utils(), "TEXT_PART_TYPES", moved.TEXT_PART_TYPES) == (
        moved.TEXT_PART_TYPES
    )


@pytest.mark.parametrize("place", ["newest", "before"])
def test_one_place_is_enough(monkeypatch, place):
    places = {"newest": ("json", "no_such.json"), "before": ("no_such.json", "json")}
    monkeypatch.setitem(moved.PLACES, "cli_args", places[place])
    assert moved.cli_args().dumps


def test_a_module_that_is_nowhere_is_named(monkeypatch):
    monkeypatch.setitem(moved.PLACES, "cli_args", ("no_such.json", "no_such.other"))
    with pytest.raises(ModuleNotFoundError, match=r"no_such\.json, no_such\.other"):
        moved.cli_args()


@pytest.fixture
def unpacked(tmp_path):
    """A vLLM of three modules."""
    for name, text in (
        ("__init__.py", ""),
        ("envs.py", "def __getattr__(name): ...\n"),
        ("renderers/__init__.py", "from .base import ChatParams\n"),
        (
            "renderers/online_renderer.py",
            "class OnlineRenderer:\n"
            "    parser = None\n"
            "    async def preprocess_chat(self, request, texts): ...\n",
        ),
    ):
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_an_unpacked_wheel_is_judged_without_importing_it(unpacked, capsys):
    library = Unpacked(unpacked)
    imports = [*lost_imports(library, "vllm")]
    assert "serving/engine/vllm.py: there is no module vllm.v1.engine.async_llm" in imports
    assert not [it for it in imports if "vllm.envs" in it or "ChatParams" in it]
    patches = [*lost_patches(library, "vllm")]
    (media,) = [it for it in patches if it.startswith("media_names")]
    assert "has (self, request, texts) and not (self, request, messages, ...)" in media
    assert media.endswith("the start is refused")
    (forced,) = [it for it in patches if it.startswith("forced_calls")]
    assert "left out: forced calls" in forced
    assert main(str(unpacked), "vllm") == 1
    assert capsys.readouterr().out.endswith(" faults\n")


def test_what_is_installed_has_no_faults(capsys):
    from importlib.metadata import distribution

    site = str(distribution("lmcache").locate_file(""))
    assert main(site) == 0, capsys.readouterr().out


def test_a_record_replaces_what_was_seen_before():
    text = table.FILE.read_text()
    for version in ("0.32.0", "0.99.0"):
        text = recorded(text, version, "all of it")
        text = recorded(text, version, "3 failed, 4 passed")
    found = tomllib.loads(text)
    assert (
        found["vllm"]["seen"]["0.32.0"] == found["vllm"]["seen"]["0.99.0"] == ("3 failed, 4 passed")
    )
    assert found["lmcache"] == tomllib.loads(table.FILE.read_text())["lmcache"]


def test_the_end_of_a_run_is_summed_up():
    assert summary("x\n3 failed, 40 passed in 12.3s\n") == "3 failed, 40 passed"
    assert summary("==== 5 passed in 1.20s (0:00:01) ====\n") == "5 passed"
    assert summary("ImportError") == "the tests did not run"
