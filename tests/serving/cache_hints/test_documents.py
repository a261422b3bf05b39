# SPDX-License-Identifier: Apache-2.0
"""Documents in canonical order: by the client's consent, and named in the answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from serving.cache_hints import documents
from serving.protocol import CHAT_COMPLETIONS, COMPLETIONS, MESSAGES
from tests.fake_engine import whole
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Hi"}]
A, B, C = ({"title": name, "text": f"It is {name}."} for name in "abc")
CONSENT = {"document_order": "canonical"}
ORDER = "X-Slipway-Document-Order"


def served(found: list[Any], path: str = CHAT_COMPLETIONS) -> tuple[list[Any], list[int]]:
    """The documents in the order that is served, and that order."""
    body = {"messages": SAID, "documents": [*found]}
    order = documents.order(path, body, 100)
    return body["documents"], [int(it) for it in order.split(",") if it]


def parts(*texts: str, **more: Any) -> list[dict[str, Any]]:
    """Parts of a message. A text in upper case is no document."""
    return [
        {"type": "text", "text": it} | ({} if it.isupper() else {"orderable": True} | more)
        for it in texts
    ]


_documents = st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))


@given(_documents.flatmap(lambda it: st.tuples(st.just(it), st.permutations(it))))
def test_all_permutations_have_one_order_which_is_named(both):
    sent, permuted = both
    found, order = served(permuted)
    assert found == served(sent)[0]
    assert found == [permuted[at] for at in order]
    assert sorted(order) == [*range(len(sent))]
    assert served(found) == (found, [*range(len(sent))])  # equal documents stay as they are


@given(_documents, st.data())
def test_a_document_less_changes_no_other_place(sent, data):
    found, _ = served(sent)
    kept = data.draw(st.lists(st.sampled_from(range(len(found))), unique=True)) if found else []
    assert served([found[at] for at in kept])[0] == [found[at] for at in sorted(kept)]


def test_runs_of_orderable_parts_are_ordered_each_by_itself():
    first, second = parts("q", "r", "s"), parts("q", "r")
    order_of_three, order_of_two = (served(it)[1] for it in (first, second))
    body: dict[str, Any] = {
        "documents": [A],
        "messages": [
            *SAID,
            {"role": "user", "content": [*parts("X"), *first, *parts("Y", "Z"), *second]},
            {"role": "tool", "content": parts("q", "r", "s")},
            {"role": "assistant", "content": None},
            "odd",
        ],
    }
    before = json.loads(json.dumps(body))
    order = documents.order(CHAT_COMPLETIONS, body, 100)
    assert order == ";".join(",".join(map(str, it)) for it in ([0], order_of_three, order_of_two))
    content = body["messages"][1]["content"]
    expected = [
        *parts("X"),
        *(first[at] for at in order_of_three),
        *parts("Y", "Z"),
        *(second[at] for at in order_of_two),
    ]
    assert content == expected
    before["messages"][1]["content"] = expected
    assert body == before


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SAID},
        {"messages": SAID, "documents": []},
        {"messages": SAID, "documents": {"a": "b"}},
        {"messages": "odd", "documents": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{**parts("a")[0], "orderable": "yes"}]}]},
        {"messages": SAID, "documents": [A] * (documents.MOST + 1)},
    ],
)
def test_bodies_without_documents_and_with_too_many_stay_as_they_are(body):
    before = json.dumps(body)
    assert documents.order(CHAT_COMPLETIONS, body, 100) == ""
    assert json.dumps(body) == before


def test_large_bodies_and_other_paths_stay_as_they_are():
    body = {"messages": SAID, "documents": [A, B, C]}
    assert documents.order(CHAT_COMPLETIONS, body, documents.LARGEST + 1) == ""
    assert documents.order(COMPLETIONS, body, 100) == ""
    assert documents.order(MESSAGES, body, 100) == ""


# Through HTTP


@pytest.fixture(scope="module")
async def door(anyio_backend):
    async with running() as it:
        it.engine.answers[MESSAGES] = whole(lambda call: {"said": "b a"})
        yield it


def counted(taken: str) -> float:
    labels = {"field": "document_order", "taken": taken}
    return REGISTRY.get_sample_value("slipway_cache_hints_total", labels) or 0


async def engines(door: Any, path: str, body: Any, **more: Any) -> tuple[Any, Any]:
    """The bodies that the engine gets of a request, and the order that its answer names."""
    door.engine.calls.clear()
    answer = await door.post(path, body, **more)
    assert answer.status_code == 200, answer.text
    return [it.request for it in door.engine.calls], answer.headers.get(ORDER)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT_COMPLETIONS, "/invocations"])
async def test_a_chat_is_that_of_a_client_who_sends_the_served_order(door, path, stream):
    before = counted("true")
    sent = [A, B, C]
    body = {"messages": SAID, "stream": stream}
    got, named = await engines(door, path, {**body, **CONSENT, "documents": sent})
    order = [int(it) for it in named.split(",")]
    assert counted("true") == before + 1
    given, none = await engines(door, path, {**body, "documents": [sent[at] for at in order]})
    assert got == given
    assert none is None
    permuted, _ = await engines(door, path, {**body, **CONSENT, "documents": [C, A, B]})
    assert permuted == got


async def test_parts_of_messages_are_ordered_on_both_apis_of_chats(door):
    content = [*parts("INTRO"), *parts("q", "r", "s"), *parts("QUESTION")]
    (_, *run, _) = content
    expected = [content[0], *served(run)[0], content[-1]]
    for path, more in ((CHAT_COMPLETIONS, {}), (MESSAGES, {"max_tokens": 4})):
        body = {"messages": [{"role": "user", "content": content}], **more, **CONSENT}
        (got,), named = await engines(door, path, body)
        assert got["messages"][0]["content"] == expected
        assert named == ",".join(map(str, served(run)[1]))


async def test_without_consent_nothing_moves(door):
    odd = ({}, {"document_order": "given"}, {"document_order": 5}, {"document_order": "cached"})
    for consent in odd:
        body = {"messages": SAID, "documents": [A, B, C], **consent}
        (got,), named = await engines(door, CHAT_COMPLETIONS, body)
        assert got["documents"] == [A, B, C]
        assert "document_order" not in got
        assert named is None


async def test_consent_without_effect_is_counted_as_ignored(door):
    before = counted("false")
    body = {"messages": SAID, **CONSENT}
    headers = {"X-Slipway-Cache": "1"}
    assert (await engines(door, CHAT_COMPLETIONS, body, headers=headers))[1] is None
    answer = await door.post(COMPLETIONS, {"prompt": "a", **CONSENT}, headers=headers)
    assert answer.headers["X-Slipway-Cache"] == "session=- seconds=0 ignored=document_order"
    assert counted("false") == before + 2


async def test_lines_keep_their_orders_since_no_header_could_name_them(door):
    line = json.dumps({"messages": SAID, "documents": [A, B, C], **CONSENT}).encode() + b"\n"
    kind = {"content-type": "application/jsonlines"}
    got, named = await engines(door, "/invocations", line * 2, headers=kind)
    assert [it["documents"] for it in got] == [[A, B, C]] * 2
    assert named is None
