# SPDX-License-Identifier: Apache-2.0
"""The prose linter: each rule finds its habit, and a plain sentence passes."""

import re

import pytest

from tools.prose import __main__ as prose

HARD = {
    "what-subject": "What a server loads is counted.",
    "one-that": "One that looks for it frees the memory.",
    "of-what": "The plan depends on its files and of what they hold.",
    "and-what": "The log has the reason and what the server did.",
    "what-is-object": "It prints what is loaded.",
    "fronted-of": "Of a stream vLLM renders the first token.",
    "fronted-where": "Where a file is missing, the start fails.",
    "where-as-if": "The limit is 5, where there is none.",
    "preposition-which": "This is the folder in which models are.",
    "inverted-so": "The key is checked, and so is the tenant.",
    "fronted-so": "So do the clients.",
    "of-own": "It runs in a process of its own.",
    "instead-place": "Tokens do in the place of keys.",
    "for-ever": "Both were unhealthy for ever.",
    "anew": "The file is read anew.",
    "archaic": "All paths need a key but for this one, save for another.",
    "stands-in": "The text that stands in the file.",
    "nothing-else": "A cache that fails costs nothing but time.",
    "trailing-too": "This holds for adapters, too.",
    "no-more": "vLLM has them no more.",
    "to-be-passive": "The field is to be set.",
    "has-to": "The folder has to be there.",
    "so-many": "It waits for so long.",
    "personified": "A model that hears.",
    "told": "The client is told.",
    "as-it-should": "All is as it should be.",
    "held-against": "The plan is held against vLLM's.",
    "long": " ".join(["word"] * 41),
}
PLAIN = (
    "What is the capital of France?",
    "The server loads each adapter on first use and evicts the least recently used one.",
    "If a file is missing, the start fails with the path of the file.",
    "Of course the cache is empty at the start.",
    "The answer has so many tokens that it fills the context.",
)


def found(sentence):
    return [name.split(" (")[0] for name, pattern in prose.rules() if pattern.search(sentence)]


def test_every_rule_has_an_example():
    assert {name.split(" (")[0] for name, _ in prose.rules()} == HARD.keys()


@pytest.mark.parametrize("rule", HARD)
def test_a_rule_finds_its_habit(rule):
    assert rule in found(HARD[rule])


@pytest.mark.parametrize("sentence", PLAIN)
def test_plain_english_passes(sentence):
    assert found(sentence) == []


def test_code_headings_and_the_targets_of_links_are_not_prose():
    page = (
        "# What is it\n\n```console\n$ what is this\n```\nUse [the\nguide](for_ever.md), `anew`.\n"
    )
    found = [it for _, text in prose.texts_of("x.md", page) for it in prose.sentences(1, text)]
    assert [text for _, text in found if text] == ["Use the guide, CODE."]
    assert [line for line, text in found if text] == [6]


def test_docstrings_are_prose_with_the_line_that_they_begin_on():
    code = '"""Doc of a module."""\n\nX = "not prose"\n"""Doc of a name."""\n'
    assert [*prose.texts_of("x.py", code)] == [(1, "Doc of a module."), (4, "Doc of a name.")]
    assert (3, "not prose") in [*prose.texts_of("lmi_config/options/declared.py", code)]


def test_the_allowed_numbers_have_a_folder_each():
    for line in prose.ALLOWED.read_text().splitlines():
        assert re.fullmatch(r"\d+ \S+", line)
        assert (prose.ROOT / line.split()[1]).exists()
