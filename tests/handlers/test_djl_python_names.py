# SPDX-License-Identifier: Apache-2.0
"""docs/reference/djl_python.md states the truth about every public name of LMI's package.

djl_python_names.json has those names and their parameters, which are facts of LMI's source (Apache
2.0).
"""

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import handlers.djl_python
from tests.documented import PAGES

REFERENCE = json.loads(Path(__file__).with_name("djl_python_names.json").read_text())["modules"]
PAGE, _, REST = PAGES["docs/reference/djl_python.md"].partition("## Modules that are not here")


def module_of(name):
    return f"djl_python.{name}".rstrip(".")


def rows():
    """(module, name, verdict) of each row about a module that exists here."""
    for part in PAGE.split("\n## ")[1:]:
        module = re.match(r"`djl_python\.?(\w*)`", part)
        assert module
        for name, verdict in re.findall(r"^\| `([\w.]+)` \| ([a-z ]+) \|", part, re.MULTILINE):
            yield module[1], name, verdict


ROWS = list(rows())
ABSENT = {
    name: set(re.findall(r"`(\w+)`", names))
    for name, names in re.findall(r"^\| `([\w.]+)` \| (.*?) \|", REST, re.MULTILINE)
}


@pytest.fixture(autouse=True)
def alias(monkeypatch):
    monkeypatch.setitem(sys.modules, "djl_python", handlers.djl_python)


def test_every_name_is_on_the_page_once():
    listed = [(module, name) for module, name, _ in ROWS]
    here = {module for module, _ in listed}
    assert len(listed) == len(set(listed))
    assert set(listed) == {(it, name) for it in here for name in REFERENCE[it]}
    assert {
        it: {name for name in names if "." not in name}
        for it, names in REFERENCE.items()
        if it not in here
    } == ABSENT


def parameters(function):
    taken = inspect.signature(function).parameters
    return [name for name in taken if name != "self"]


@pytest.mark.parametrize(("module", "name", "verdict"), ROWS)
def test_a_name_is_as_the_page_says(module, name, verdict):
    top, _, method = name.partition(".")
    if verdict == "not here" and not method:
        with pytest.raises(ImportError, match=f"{top} is not here: "):
            exec(f"from {module_of(module)} import {top}")
        return
    found = getattr(importlib.import_module(module_of(module)), top)
    if verdict == "not here":
        with pytest.raises(NotImplementedError, match=name):
            getattr(found(), method)(None)
        return
    assert verdict in ("here", "differs")
    found = getattr(found, method) if method else found
    if wanted := REFERENCE[module][name]:
        assert [it for it in parameters(found) if it in wanted] == wanted


@pytest.mark.parametrize("name", [*ABSENT, "no_such_thing", "rolling_batch.scheduler"])
def test_a_module_that_is_not_here_says_why(name):
    with pytest.raises(ModuleNotFoundError, match=r"^djl_python\.\S+ is not here: .*[;:]"):
        importlib.import_module(f"djl_python.{name}")


def test_unknown_names_are_no_attributes():
    for module in ("", *{module for module, _, verdict in ROWS if verdict == "not here"}):
        assert not hasattr(importlib.import_module(module_of(module)), "no_such_name")
