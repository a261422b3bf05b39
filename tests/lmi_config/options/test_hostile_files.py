# SPDX-License-Identifier: Apache-2.0
"""Option files of an untrusted model: `plan` soon refuses them with one sentence."""

import itertools
import subprocess
import sys

import pytest

from lmi_config.facts import strict_yaml
from tests.support.models import tiny

LETTERS = "abcdefghijklm"
ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in itertools.pairwise(LETTERS)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{','.join([f'*{before}'] * 9)}]}}\n"
    for before, name in itertools.pairwise(LETTERS)
)

HOSTILE = {
    "aliases that grow": (ALIASES, "line 2: `*a` repeats another part; write it out"),
    "merge keys that grow": (MERGES, "line 2: `*a` repeats another part; write it out"),
    "a merge key": ("<<: {seed: 1}\n", "line 1: `<<` merges another part; write it out"),
    "an alias within itself": ("a: &a [*a]", "line 1: `*a` repeats"),
    "an alias as a key": ("a: &x b\n*x : 1\n", "line 2: `*x` repeats"),
    "too large": ("seed: 1\n#" + " " * 2**20, "longer than 1048576 bytes"),
    "too many values": ("a: [" + "1," * 150_000 + "]", "more than 100,000 values"),
    "too many documents": ("---\n" * 150_000, "more than 100,000 values"),
    "nested lists": ("a: " + "[" * 500_000, "nested more than 100 deep"),
    "nested lines": ("- " * 500_000, "nested more than 100 deep"),
    "a number to the base 60": ("seed: " + "1:" * 400_000 + "1", "more than 100 digits"),
    "a number": ("seed: " + "9" * 500_000, "more than 100 digits"),
    "an object": ("seed: !!python/object/apply:os.system ['id']", "could not determine"),
    "the same twice": ("seed: 1\n" * 2, "line 2: `seed` is given twice"),
    "half a pair": ('seed: "\\ud800"', "not YAML in line 1"),
    "a zero byte": ("seed: 1\0", "not YAML at position 7"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_yaml_is_refused(name):
    content, told = HOSTILE[name]
    with pytest.raises(strict_yaml.NotYAML) as refused:
        strict_yaml.read(content.encode())
    assert told in str(refused.value)


def test_many_plain_keys_are_read():
    content = b"".join(b"k%d: 1\n" % n for n in range(30_000))
    assert len(strict_yaml.read(content)) == 30_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for file in tiny.make().iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def plan(model, files, *arguments):
    for name, content in files.items():
        (model / name).write_text(content)
    try:
        return subprocess.run(
            [sys.executable, "-m", "serving", "plan", str(model), *arguments],
            capture_output=True,
            check=False,
        )
    finally:
        for name in files:
            (model / name).unlink()


REFUSED = {
    "aliases": ({"slipway.yaml": ALIASES}, "slipway.yaml: not YAML in line 2"),
    "half a pair": ({"serving.properties": "option.served_model_name=\\ud800"}, "surrogate pair"),
    "in a list": ({"slipway.yaml": 'served_model_name: ["a\\0b"]'}, "a zero byte"),
    "in a name": ({"serving.properties": "option.seed\\ud800=1"}, "surrogate pair"),
    "in JSON": (
        {"serving.properties": 'option.hf_overrides={"a": "\\\\ud800"}'},
        "half of a surrogate pair",
    ),
    "a file": ({"serving.properties": "option.lmcache_config_file=\\u0000"}, "a zero byte"),
    "a folder": ({"serving.properties": "option.kv_disk_path=\\u0000"}, "a zero byte"),
    "a template": ({"serving.properties": "option.chat_template=\\udfff"}, "surrogate pair"),
    "LMCache's file": (
        {
            "serving.properties": "option.lmcache_config_file=lm\noption.lmcache_auto_config=true",
            "lm": "a: &a [*a]",
        },
        "`*a` repeats another part",
    ),
    "too long": ({"serving.properties": "#" + " " * 2**20}, "longer than 1048576 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_refuses_in_a_sentence(model, name):
    files, told = REFUSED[name]
    done = plan(model, files)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False), done.stderr
    assert told in done.stderr.decode()


ODD = "a\\nb\\u001b[31mred\\u009b1m\\u202eleft\\u2028"


@pytest.mark.parametrize(
    "content",
    [f"option.served_model_name={ODD}", f"option.nobody_{ODD}=1", f"option.seed={ODD}"],
)
def test_nothing_that_a_terminal_obeys_is_printed(model, content):
    done = plan(model, {"serving.properties": content + "\n"})
    assert done.returncode in (0, 2)
    printed = (done.stdout + done.stderr).decode()
    assert "\\n" in printed
    assert "\\x1b[31m" in printed
    assert not {*printed} & {*"\x1b\x9b\u202e\u2028"}
    assert not any(it.startswith("b\\x1b") for it in printed.splitlines())
