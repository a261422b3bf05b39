# SPDX-License-Identifier: Apache-2.0
"""Models from a small Hugging Face hub."""

import json
import re

import huggingface_hub.constants
import pytest

from serving.sources import hub as sources_hub
from serving.sources import source
from serving.sources.arriving import Early
from serving.sources.locate import locate
from serving.sources.source import SourceError
from tests.hub_server import Repo, serving_fake
from tests.serving.sources.conftest import (
    MODEL,
    NOT_NEEDED,
    WEIGHTS,
    closed,
    contents,
    ignore,
    silent,
)


@pytest.fixture
def hurried(monkeypatch):
    """Short time-outs for hosts that do not answer."""
    monkeypatch.setattr(sources_hub, "ANSWER_S", 0.2)
    monkeypatch.setattr(source, "UNREACHABLE_S", 0.6)


@pytest.fixture(scope="module")
def serving_hub():
    with serving_fake() as server:
        yield server


@pytest.fixture
def hub(serving_hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    serving_hub.repos = {"org/tiny": Repo(MODEL | NOT_NEEDED)}
    serving_hub.asked = []
    serving_hub.tokens = set()
    return serving_hub


@pytest.fixture
def environ(hub, tmp_path):
    return {"HF_ENDPOINT": hub.url + "/", "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret\n"}


def fetched(environ, **more):
    notes: list[str] = []
    folder = locate("org/tiny", environ, **more).fetch(notes.append)
    return contents(folder), notes


def test_a_use_begins_before_the_weights_are_there(hub, environ):
    shards = dict.fromkeys(("model-1.safetensors", "model-2.safetensors"), WEIGHTS)
    hub.repos = {"org/tiny": Repo(MODEL | shards)}
    seen = []
    early = Early([*shards], lambda folder: seen.append({*contents(folder)}))
    folder = locate("org/tiny", environ).listed().fetch(ignore, early)
    assert seen == [{*MODEL}]
    assert contents(folder) == MODEL | shards
    locate("org/tiny", environ).fetch(ignore, early)
    assert len(seen) == 1, "nothing had to be fetched"


def test_a_model_comes_from_the_hub_once(hub, environ, tmp_path):
    found, notes = fetched(environ)
    assert found == MODEL
    assert notes[0] == "fetching org/tiny: 0.3 MB"
    assert re.fullmatch(r"fetched org/tiny: 0\.3 MB in \d+ s", notes[1])
    assert len(notes) == 2
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in repr(locate("org/tiny", environ))
    hub.asked.clear()
    assert fetched(environ) == (MODEL, [])
    assert hub.asked == ["GET /api/models/org/tiny"]
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}


def test_a_new_commit_is_fetched_and_an_old_one_can_be_named(hub, environ):
    old = fetched(environ)
    hub.repos["org/tiny"] = Repo(MODEL | {"config.json": b"{}"}, commit="b" * 40)
    assert fetched(environ)[0] == MODEL | {"config.json": b"{}"}
    hub.repos["org/tiny"].commit = "a" * 40
    assert fetched(environ, revision="a" * 40)[0] == old[0]


def test_progress_of_the_hub_is_told(hub, environ, monkeypatch):
    monkeypatch.setattr(source, "PERIOD_S", 0.0)
    _, notes = fetched(environ)
    assert "fetching org/tiny: 0.3 MB of 0.3 MB" in notes


def test_a_checkpoint_on_the_hub_is_looked_at_without_its_weights(hub, environ, tmp_path):
    checkpoint = locate("org/tiny", environ).checkpoint()
    assert checkpoint.where == "org/tiny"
    assert checkpoint.sizes == {name: len(content) for name, content in MODEL.items()}
    assert hub.asked == ["GET /api/models/org/tiny"]
    for length in (8, 1000, source.HEAD + 1, 10**9):
        for name, content in MODEL.items():
            assert checkpoint.head(name, length) == content[:length]
    asked = [line.rsplit("/", 1)[1] for line in hub.asked[1:]]
    assert asked == ["config.json", *["model.safetensors"] * 3]
    assert not list(tmp_path.iterdir())


def test_the_headers_of_all_parts_are_read_at_once(hub, environ):
    parts = {f"model-{number}.safetensors": b"part %d" % number for number in range(40)}
    others = {"config.json": b"{}", "adapters/a/adapter_model.safetensors": b"a"}
    hub.repos["org/tiny"] = Repo(parts | others)
    checkpoint = locate("org/tiny", environ).checkpoint()
    hub.asked.clear()
    for part, content in parts.items():
        assert checkpoint.head(part, 6) == content[:6]
        assert len(hub.asked) == 40


def test_a_checkpoint_that_is_cached_is_looked_at_there(hub, environ):
    fetched(environ)
    hub.asked.clear()
    checkpoint = locate("org/tiny", environ).checkpoint()
    assert checkpoint.sizes == {name: len(content) for name, content in MODEL.items()}
    assert checkpoint.head("model.safetensors", 300) == WEIGHTS[:300]
    assert hub.asked == ["GET /api/models/org/tiny"]


UNREACHABLE = (
    r"'org/tiny': {}; the cache has no whole copy either: mount the model as a folder, or set "
    r"HF_HOME to a cache that has it"
)


def look_and_fetch(environ, fault, **more):
    for look in (lambda at: at.checkpoint(), lambda at: at.fetch(ignore)):
        with pytest.raises(SourceError, match=f"^{fault}$") as told:
            look(locate("org/tiny", environ, **more))
        assert "hf_secret" not in str(told.value)


@pytest.mark.parametrize(("where", "kind"), [(closed, "ConnectError"), (silent, "ReadTimeout")])
def test_a_hub_that_cannot_be_reached_is_given_up(hub, environ, hurried, where, kind):
    with where() as url:
        fault = UNREACHABLE.format(rf"the hub cannot be reached \({kind}\)")
        look_and_fetch(environ | {"HF_ENDPOINT": url}, fault)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("closed", "the hub cannot be reached (ConnectError)"),
        ("offline", "HF_HUB_OFFLINE is set"),
        ("refused", "the hub answers 503"),
        ("gone", "there is no such model on the hub, or it is private"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_hub_that_cannot_help_is_not_needed_for_a_cached_model(
    hub, environ, tmp_path, way, reason, listed
):
    fetched(environ)
    if not listed:
        (tree,) = tmp_path.glob("hub/*/trees/*.json")
        tree.unlink()
        huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE.clear()
    if way == "refused":
        hub.repos["org/tiny"].refusal = (503, "")
    elif way == "gone":
        del hub.repos["org/tiny"]
    elif way == "offline":
        environ = environ | {"HF_HUB_OFFLINE": "1"}
    with closed() as url:
        if way == "closed":
            environ = environ | {"HF_ENDPOINT": url}
        assert fetched(environ) == (MODEL, [f"using the cached copy of org/tiny: {reason}"])
        assert locate("org/tiny", environ).checkpoint().head("config.json", 8) == b'{"model_'


SHARDED = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
INDEXED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(SHARDED).encode(),
    "model-1.safetensors": b"1",
    "model-2.safetensors": b"2",
}


@pytest.mark.parametrize(
    ("lost", "listed"),
    [
        ("config.json", True),
        ("config.json", False),
        ("model-2.safetensors", True),
        ("model-2.safetensors", False),
        ("tokenizer.json", True),  # no other file shows that there should be one
    ],
)
def test_a_copy_that_is_not_whole_does_not_do(hub, environ, tmp_path, lost, listed):
    hub.repos["org/tiny"] = Repo(INDEXED | {"tokenizer.json": b"{}"})
    folder = locate("org/tiny", environ).fetch(ignore)
    if not listed:
        (tree,) = tmp_path.glob("hub/*/trees/*.json")
        tree.unlink()
        huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE.clear()
    (folder / lost).unlink()
    offline = environ | {"TRANSFORMERS_OFFLINE": "yes"}
    look_and_fetch(offline, UNREACHABLE.format("HF_HUB_OFFLINE is set"))
    hub.asked.clear()
    assert contents(locate("org/tiny", environ).fetch(ignore)) == hub.repos["org/tiny"].files
    assert not [line for line in hub.asked if line.startswith("GET /org/tiny/resolve")]


NOT_THERE = "there is no such model on the hub, or it is private; check the id, or set HF_TOKEN .*"


@pytest.mark.parametrize(
    ("repo", "token", "fault"),
    [
        (None, "t", NOT_THERE),
        (Repo({}, refusal=(401, "RepoNotFound")), None, NOT_THERE),
        (Repo({}, refusal=(401, "")), None, NOT_THERE),
        (Repo({}, refusal=(401, "")), "t", "the hub does not accept HF_TOKEN; set it to .*"),
        (Repo({}, refusal=(403, "")), "t", NOT_THERE),
        (Repo({}, refusal=(403, "GatedRepo")), "t", "it is gated; accept its licence on the .*"),
        (Repo(MODEL | {"../a": b""}), "t", "the name '../a' leads out of its folder; rename it"),
    ],
)
def test_what_the_hub_refuses_is_told_with_what_to_do(hub, environ, repo, token, fault):
    hub.repos = {"org/tiny": repo} if repo else {}
    look_and_fetch(environ | {"HF_TOKEN": token or ""}, f"'org/tiny': {fault}")


def test_a_gated_model_is_told_where_its_files_are_wanted(hub, environ):
    hub.repos["org/tiny"].gated = True
    fault = "^'org/tiny': it is gated; accept its licence on the hub and set HF_TOKEN$"
    with pytest.raises(SourceError, match=fault):
        locate("org/tiny", environ).checkpoint().head("config.json", 8)
    with pytest.raises(SourceError, match=fault):
        locate("org/tiny", environ).fetch(ignore)


def test_a_revision_that_is_not_there_is_told(hub, environ):
    fault = "'org/tiny': it has no revision 'v9'; give a branch, a tag or a commit"
    look_and_fetch(environ, fault, revision="v9")


def test_a_model_that_does_not_fit_the_disk_is_not_begun(hub, environ):
    hub.repos["org/tiny"].claims["model.safetensors"] = 10**18
    fault = r"'org/tiny': it needs 1000000000.0 GB, and .* has .* GB left; set HF_HOME to a larger"
    with pytest.raises(SourceError, match=fault):
        locate("org/tiny", environ).fetch(ignore)
    assert hub.asked == ["GET /api/models/org/tiny"]


def test_a_cache_that_cannot_be_written_is_told(hub, environ, tmp_path):
    (tmp_path / "hub").write_text("a file")
    with pytest.raises(SourceError, match=r"the cache cannot be written \(.*\); set HF_HOME to"):
        locate("org/tiny", environ).fetch(ignore)


def push(hub, files):
    hub.repos["org/tiny"] = Repo(files, commit="b" * 40)


def test_what_is_fetched_is_what_was_looked_at(hub, environ):
    """A push in between changes nothing, and the next start gets it."""
    listed = locate("org/tiny", environ).listed()
    assert listed.checkpoint().head("config.json", 8) == b'{"model_'
    before = dict(MODEL)
    push(hub, before | {"config.json": b"{}", "model-2.safetensors": b"2"})
    with pytest.raises(SourceError):  # the hub of this test has one commit only
        listed.fetch(ignore)
    hub.repos["org/tiny"] = Repo(before)
    folder = listed.fetch(ignore)
    assert (folder.name, contents(folder)) == ("a" * 40, before)
    push(hub, before | {"config.json": b"{}"})
    assert listed.fetch(ignore) == folder
    assert locate("org/tiny", environ).listed().fetch(ignore).name == "b" * 40
    offline = locate("org/tiny", environ | {"HF_HUB_OFFLINE": "1"}).listed()
    assert offline.fetch(ignore).name == "b" * 40
