# SPDX-License-Identifier: Apache-2.0
"""A cross-encoder on the real engine: rerank, score, classify and pooling, tokens, and /invocations
by keys.
"""

import json

import pytest

from serving.access import keys
from serving.protocol import RERANK_PATHS, SCORE_PATHS
from tests.e2e.conftest import serving
from tests.e2e.test_router import routing
from tests.e2e.test_security import Pings
from tests.support.models import tiny_reranker

QUERY = "How is a module imported?"
DOCUMENTS = ["The import statement finds a module.", "A class is made.", "Numbers are added."]


@pytest.fixture(scope="module")
def access(tmp_path_factory):
    """The keys of the server and of the router in front of it."""
    rows = [{"name": it, "sha256": keys.digest(it.encode())} for it in ("own", "shop")]
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps({"keys": [rows[0], {**rows[1], "requests_per_minute": 5}]}))
    return {"OPTION_API_KEYS_FILE": str(file), "OPTION_ROUTER_SECRET": "secret" * 8}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory, access):
    environ = {
        **access,
        "OPTION_MODEL_ID": str(tiny_reranker.make()),
        "OPTION_KV_CACHE_MEMORY_BYTES": "64M",
        "HF_TASK": "text-ranking",
    }
    with serving(tmp_path_factory.mktemp("reranker") / "log", **environ) as it:
        it.ready()
        it.client.headers["authorization"] = "Bearer own"
        yield it


def scores(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "results" in body:
        found = {it["index"]: it["relevance_score"] for it in body["results"]}
        return [found[n] for n in sorted(found)]
    return [it["score"] for it in body["data"]]


def test_every_path_has_the_same_scores(reranker):
    body = {"query": QUERY, "documents": DOCUMENTS}
    first = scores(reranker.client.post("/rerank", json=body))
    assert len(set(first)) == 3
    for path in RERANK_PATHS:
        answer = reranker.client.post(path, json=body)
        assert scores(answer) == pytest.approx(first, abs=1e-3)
        ranked = [it["relevance_score"] for it in answer.json()["results"]]
        assert ranked == sorted(ranked, reverse=True)
    pairs = (
        {"text_1": QUERY, "text_2": DOCUMENTS},
        {"queries": QUERY, "documents": DOCUMENTS},
        {"queries": [QUERY] * 3, "items": DOCUMENTS},
        {"data_1": QUERY, "data_2": DOCUMENTS},
    )
    for path in SCORE_PATHS:
        for each in pairs:
            answer = reranker.client.post(path, json=each)
            assert scores(answer) == pytest.approx(first, abs=1e-3)
    for each in (body, pairs[0]):
        assert scores(reranker.invoke(each)) == pytest.approx(first, abs=1e-3)


def test_the_best_alone(reranker):
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "model": "lmi"}
    (best,) = reranker.client.post("/v2/rerank", json=body).json()["results"]
    assert best["document"]["text"] == DOCUMENTS[best["index"]]


def test_classes_and_what_is_pooled(reranker):
    body = {"input": [QUERY, *DOCUMENTS]}
    answer = reranker.client.post("/classify", json=body).json()
    assert [it["num_classes"] for it in answer["data"]] == [1] * 4
    found = reranker.invoke(body).json()
    theirs, ours = ([it["probs"][0] for it in each["data"]] for each in (answer, found))
    assert theirs == pytest.approx(ours, abs=1e-3)
    pooled = reranker.client.post("/pooling", json=body).json()
    assert len(pooled["data"]) == 4
    refused = reranker.client.post("/pooling", json={"data": {"url": "http://169.254.169.254"}})
    assert refused.status_code == 400
    assert "input" in refused.json()["error"]["message"]


def test_tokens_and_back(reranker):
    answer = reranker.client.post("/tokenize", json={"prompt": QUERY, "return_token_strs": True})
    body = answer.json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) > 3
    back = reranker.client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert "module imported" in back["prompt"]
    for tokens in ([10**6], [2**62], [-1], ["a"]):
        answer = reranker.client.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code in (200, 400), answer.text
    with Pings(reranker.url) as pings:
        long = {"prompt": "a " * 500_000, "return_token_strs": True}
        assert reranker.client.post("/tokenize", json=long).json()["count"] > 500_000
        back = {"tokens": [7] * 300_000}
        assert reranker.client.post("/detokenize", json=back).status_code == 200
    assert pings.slowest < 2  # what SageMaker allows it


def test_what_is_refused(reranker):
    refused = [
        ({"query": QUERY, "documents": []}, "text_pair"),
        ({"query": QUERY}, "documents"),
        ({"query": QUERY, "documents": ["a"], "model": "other"}, "does not exist"),
        ({"query": QUERY, "documents": ["word " * 5000]}, "512"),
        ({"query": QUERY, "documents": [{"text": "a"}]}, "documents should be a text"),
        ({"query": QUERY, "documents": [{"content": []}]}, "MultiModal"),
        ({"query": QUERY, "documents": ["a"], "top_n": -1}, "top_n"),
    ]
    for body, told in refused:
        answer = reranker.client.post("/rerank", json=body)
        assert answer.status_code in (400, 404), answer.text
        error = answer.json()["error"]
        assert told in error["message"]
        assert QUERY not in answer.text
    for path in ("/v1/embeddings", "/v1/completions", "/v1/chat/completions"):
        answer = reranker.client.post(path, json={"input": "a", "prompt": "a", "messages": []})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"the model does not answer {path}"


@pytest.mark.parametrize("strategy", ["kvaware", "session"])
def test_through_a_router_with_keys(reranker, access, tmp_path, strategy):
    """The router reads no cached prefix out of documents, and applies the keys' limits."""
    environ = {**access, "OPTION_MODEL_ID": str(tiny_reranker.make())}
    with routing([reranker], tmp_path / "log", strategy, **environ) as routed:
        routed.ready()
        body = {"query": QUERY, "documents": DOCUMENTS * 50, "user": "someone"}
        assert routed.client.post("/rerank", json=body).status_code == 401
        routed.client.headers["authorization"] = "Bearer shop"
        for path in (*RERANK_PATHS, "/invocations"):
            answer = routed.client.post(path, json=body)
            assert len(scores(answer)) == 150
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
        assert routed.client.post("/rerank", json=[]).status_code == 400
        assert routed.client.post("/rerank", json=body).status_code == 429


def test_many_documents_hold_nobody_up(reranker):
    with Pings(reranker.url) as pings:
        body = {"query": QUERY, "documents": ["A class is made."] * 2048}
        assert len(scores(reranker.client.post("/rerank", json=body))) == 2048
    assert pings.slowest < 2
