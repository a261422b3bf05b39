"""Models from a folder, from a real S3 server (moto's) and from a small Hugging Face hub."""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub.constants
import pytest

from lmi_config.model import Folder
from serving import sources
from serving.sources import SourceError, locate, needed
from tests.s3_server import Watched

WEIGHTS = bytes(range(256)) * 1000
MODEL = {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "empty.txt": b""}
NOT_NEEDED = {".gitattributes": b"a", "pytorch_model.bin": b"b", "original/weights.pth": b"c"}
WANTED = "give a folder with a model, s3://bucket/prefix, or a hub id like Qwen/Qwen3-0.6B"


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def ignore(note: str) -> None:
    pass


@contextlib.contextmanager
def silent():
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def closed():
    """An address where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def hurried(monkeypatch):
    """Hosts that do not answer are given up soon."""
    monkeypatch.setattr(sources, "ANSWER_S", 0.2)
    monkeypatch.setattr(sources, "UNREACHABLE_S", 0.6)


# What a model is


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["config.json", "model-1.safetensors", "tokenizer.model", "vocab.txt"], "all"),
        (["config.json", "chat_template.jinja", "modeling_x.py", "README.md"], "all"),
        (["config.json", "model.safetensors", "pytorch_model.bin", "x.pt"], [0, 1]),
        (["config.json", "pytorch_model.bin", "x.pt", "x.gguf"], [0, 1]),
        (["config.json", "x.gguf"], "all"),
        (["config.json", "model.safetensors", "adapters/a/adapter_model.bin"], "all"),
        (["config.json", "a.onnx", "tf_model.h5", "flax_model.msgpack", "onnx/a.json"], [0]),
        (["config.json", ".gitattributes", ".cache/a", "a/.b/c"], [0]),
        (["params.json", "original/consolidated.00.pth", "my/original/a.json"], [0, 2]),
        (["config.json", "a.bin", "optimizer.pt", "training_args.bin", "rng_state_0.pth"], [0, 1]),
        (["config.json", "checkpoint-500/model.safetensors", "adapters/checkpoint-5/a"], [0, 2]),
    ],
)
def test_only_what_serving_reads_is_needed(given, kept):
    wanted = given if kept == "all" else [given[place] for place in kept]
    assert needed(dict.fromkeys(given, 7)) == dict.fromkeys(wanted, 7)


@pytest.mark.parametrize("description", ["config.json", "params.json"])
def test_a_folder_is_served_where_it_is(tmp_path, monkeypatch, description):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / description).write_bytes(b"{}")
    folder.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model_id in (str(folder), "tiny", "./tiny", "~/tiny"):
        source = locate(model_id, {})
        assert source.fetch(ignore).samefile(folder)
        assert source.checkpoint().sizes == {description: 2}
        assert source.checkpoint().head(description, 1) == b"{"


@pytest.mark.parametrize(
    ("model_id", "fault"),
    [
        ("/no/model", "there is no such folder"),
        ("./model", "there is no such folder"),
        ("../model", "there is no such folder"),
        ("~nobody-here/model", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "there is no such folder"),
        ("a b", "it is neither a folder nor a hub id"),
        ("a--b", "it is neither a folder nor a hub id"),
        ("org/", "it is neither a folder nor a hub id"),
        ("s3://", "it names no bucket"),
        ("s3:///prefix", "it names no bucket"),
    ],
)
def test_what_cannot_be_a_model_is_refused_without_asking_anybody(model_id, fault):
    with pytest.raises(SourceError, match=f"^{re.escape(f'{model_id!r}: {fault}; {WANTED}')}$"):
        locate(model_id, {"HF_ENDPOINT": "http://not.asked.invalid"})


# S3


class Bucket:
    """A bucket of a test's own."""

    def __init__(self, server: Watched, name: str, downloads: Path) -> None:
        self.server = server
        self.name = name
        self.downloads = downloads
        self.client = server.client
        self.client.create_bucket(Bucket=name)

    def put(self, files, prefix="models/tiny/"):
        for name, content in files.items():
            self.client.put_object(Bucket=self.name, Key=prefix + name, Body=content)

    def locate(self, prefix="models/tiny"):
        uri = f"s3://{self.name}/{prefix}"
        return locate(uri, {}, downloads=str(self.downloads))

    def fetch(self):
        """What is fetched, the names that were asked for, and what was noted meanwhile."""
        self.server.fetched.clear()
        notes: list[str] = []
        folder = self.locate().fetch(notes.append)
        asked = {key.removeprefix("models/tiny/") for key in self.server.fetched}
        return contents(folder), asked, notes


@pytest.fixture
def bucket(aws, tmp_path, request):
    name = "b-" + hashlib.sha256(request.node.name.encode()).hexdigest()[:20]
    made = Bucket(aws, name, tmp_path / "models")
    made.put(MODEL | NOT_NEEDED)
    return made


def test_what_was_fetched_from_s3_is_looked_at_on_disk(bucket):
    source = bucket.locate()
    assert not isinstance(source.checkpoint(), Folder)
    assert source.room() > 0
    source.fetch(print)
    assert isinstance(source.checkpoint(), Folder)
    bucket.put({"config.json": b"{}"})
    assert not isinstance(source.checkpoint(), Folder)


def test_a_model_comes_from_s3_once(bucket):
    bucket.put({"config.json": b"of another model"}, prefix="models/tiny-2/")
    uri = f"s3://{bucket.name}/models/tiny"
    first, asked, notes = bucket.fetch()
    assert (first, asked) == (MODEL, set(MODEL))
    assert notes[0] == f"fetching {uri}: 0.3 MB"
    assert re.fullmatch(rf"fetched {re.escape(uri)}: 0\.3 MB in \d+ s", notes[1])
    assert len(notes) == 2
    assert bucket.fetch() == (MODEL, set(), [])
    with_slash = bucket.locate("models/tiny/").fetch(ignore)
    assert with_slash == bucket.locate("models/tiny").fetch(ignore)
    assert re.fullmatch("tiny-[0-9a-f]{12}", with_slash.name)


def test_a_whole_bucket_may_be_the_model(bucket):
    bucket.put(MODEL, prefix="")
    assert contents(bucket.locate("").fetch(ignore)).items() >= MODEL.items()


def test_only_what_is_not_as_it_should_be_is_fetched_again(bucket):
    bucket.put({"a.json": b"a", "b.json": b"b", "c.json": b"ccc", "d/e.json": b"e"})
    folder = bucket.locate().fetch(ignore)
    bucket.client.delete_object(Bucket=bucket.name, Key="models/tiny/a.json")
    (folder / "b.json").write_bytes(b"x")  # the same size, not the same time
    os.truncate(folder / "c.json", 1)
    (folder / "d/e.json").unlink()
    (folder / "model.safetensors.0a1b2c3d").write_bytes(b"left by a fetch that was killed")
    time.sleep(1.01)  # S3 tells times in whole seconds
    changed = {"model.safetensors": WEIGHTS[::-1]}
    bucket.put(changed)
    found, asked, _ = bucket.fetch()
    assert found == MODEL | {"b.json": b"b", "c.json": b"ccc", "d/e.json": b"e"} | changed
    assert asked == {"b.json", "c.json", "d/e.json", "model.safetensors"}


KILLED = """
import sys
from serving import sources
sources.PART = 64 * 1024
sources.locate(sys.argv[1], {}, downloads=sys.argv[2]).fetch(print)
"""


def test_a_fetch_that_was_killed_goes_on(bucket):
    bucket.server.gate.clear()
    uri = f"s3://{bucket.name}/models/tiny"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, uri, str(bucket.downloads)],
        cwd=Path(sources.__file__).parent.parent,
    )
    config = bucket.client.head_object(Bucket=bucket.name, Key="models/tiny/config.json")

    def half_done():
        begun = list(bucket.downloads.glob("*/model.safetensors.*"))
        whole = list(bucket.downloads.glob("*/config.json"))
        times = [file.stat().st_mtime for file in whole]
        return begun and times == [int(config["LastModified"].timestamp())]

    wait_for(half_done)
    child.send_signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not list(bucket.downloads.glob("*/model.safetensors"))
    bucket.server.gate.set()
    found, asked, _ = bucket.fetch()
    assert (found, asked - {"empty.txt"}) == (MODEL, {"model.safetensors"})


def test_two_that_want_the_same_fetch_it_once(bucket, monkeypatch):
    monkeypatch.setattr(sources, "PART", 64 * 1024)
    bucket.server.gate.clear()
    notes: dict[str, list[str]] = {"first": [], "second": []}
    first, second = (
        threading.Thread(target=bucket.locate().fetch, args=[notes[name].append]) for name in notes
    )
    first.start()
    wait_for(lambda: "models/tiny/model.safetensors" in bucket.server.fetched)
    second.start()
    wait_for(lambda: notes["second"])
    assert notes["second"] == ["waiting for another process that fetches the same model"]
    bucket.server.gate.set()
    first.join()
    second.join()
    assert len(notes["second"]) == 1
    assert bucket.fetch() == (MODEL, set(), [])


def test_an_object_that_changes_meanwhile_is_not_mixed_with_the_new_one(bucket, monkeypatch):
    monkeypatch.setattr(sources, "PART", 64 * 1024)
    bucket.server.gate.clear()
    faults: list[str] = []

    def fetch() -> None:
        try:
            bucket.locate().fetch(ignore)
        except SourceError as fault:
            faults.append(fault.reason)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    wait_for(lambda: "models/tiny/model.safetensors" in bucket.server.fetched)
    bucket.put({"model.safetensors": WEIGHTS[::-1]})
    bucket.server.gate.set()
    fetching.join()
    assert faults == ["an object changed while it was fetched"]
    assert not list(bucket.downloads.glob("*/model.safetensors*"))


def test_progress_is_told(bucket, monkeypatch):
    monkeypatch.setattr(sources, "PERIOD_S", 0.0)
    _, _, notes = bucket.fetch()
    uri = re.escape(f"s3://{bucket.name}/models/tiny")
    assert re.fullmatch(f"fetching {uri}: 0.[0-3] MB of 0.3 MB", notes[1])
    assert re.fullmatch(f"fetching {uri}: 0.3 MB of 0.3 MB", notes[-2])


def test_a_checkpoint_on_s3_is_looked_at_without_its_weights(bucket):
    checkpoint = bucket.locate().checkpoint()
    assert checkpoint.where == f"s3://{bucket.name}/models/tiny"
    assert checkpoint.sizes == {name: len(content) for name, content in MODEL.items()}
    assert bucket.server.fetched == []
    for length in (8, 1000, sources.HEAD + 1, 10**9):
        for name, content in MODEL.items():
            assert checkpoint.head(name, length) == content[:length]
    asked = [key.removeprefix("models/tiny/") for key in bucket.server.fetched]
    assert asked == ["config.json", *["model.safetensors"] * 3]
    assert not bucket.downloads.exists()


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "there are no objects below it; check the prefix"),
        ({"config.json/": b""}, "there are no objects below it; check the prefix"),
        (MODEL | {"../evil": b"x"}, "the name '../evil' leads out of its folder; rename it"),
        (MODEL | {"a/../../evil": b"x"}, "the name 'a/../../evil' leads out of its folder"),
        (MODEL | {"/etc/evil": b"x"}, "the name '/etc/evil' leads out of its folder"),
    ],
)
def test_objects_that_are_no_model_are_refused(bucket, files, fault):
    bucket.put(files, prefix="other/")
    with pytest.raises(SourceError, match=re.escape(f"/other': {fault}")):
        bucket.locate("other").fetch(ignore)
    assert not bucket.downloads.exists()


@pytest.mark.parametrize(
    ("code", "status", "fault"),
    [
        ("AccessDenied", "403 No", "access is denied; allow s3:ListBucket"),
        ("InvalidAccessKeyId", "403 No", "AWS does not know the credentials; give"),
        ("ExpiredToken", "400 No", "the AWS credentials have expired; give"),
        ("AuthorizationHeaderMalformed", "400 No", "the bucket is in another region; set AWS_"),
        ("Odd", "418 No", "S3 answers Odd; check the bucket"),
    ],
)
def test_what_s3_refuses_is_told_with_what_to_do(aws, tmp_path, code, status, fault):
    aws.answers["locked"] = (code, status)
    with pytest.raises(SourceError, match=f"^'s3://locked/a': {fault}") as told:
        locate("s3://locked/a", {}, downloads=str(tmp_path)).checkpoint()
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("s3://not-there/a", "there is no such bucket; check its name"),
        ("s3://No Bucket/a", "no bucket can have this name; check it"),
    ],
)
def test_a_bucket_that_is_not_there_is_told(aws, uri, fault):
    with pytest.raises(SourceError, match=f"^'{uri}': {fault}$"):
        locate(uri, {}).checkpoint()


def test_without_aws_credentials_there_is_advice(aws, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceError, match=r"no AWS credentials; .* \(ModelDataSource\) instead$"):
        locate("s3://bucket/a", {}).checkpoint()


@pytest.mark.parametrize(
    ("where", "kind"),
    [(closed, "EndpointConnectionError"), (silent, "ReadTimeoutError|TimeoutError")],
)
def test_an_s3_that_cannot_be_reached_is_given_up(aws, monkeypatch, hurried, where, kind):
    with where() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(SourceError, match=rf"S3 cannot be reached \(({kind})\); check network"):
            locate("s3://bucket/a", {}).checkpoint()


def test_an_endpoint_that_is_no_url_is_told(aws, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    fault = "^'s3://bucket/a': AWS_ENDPOINT_URL is no URL; set it to one like http://minio:9000$"
    with pytest.raises(SourceError, match=fault):
        locate("s3://bucket/a", {}).checkpoint()


def test_a_folder_that_cannot_be_written_is_told(bucket):
    bucket.downloads.write_text("a file")
    fault = r"cannot be written \(.*\); set SERVING_DOWNLOAD_DIR to a folder"
    with pytest.raises(SourceError, match=fault):
        bucket.fetch()


# The Hugging Face hub


@dataclasses.dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "a" * 40
    refusal: tuple[int, str] | None = None  # status and X-Error-Code for everything
    gated: bool = False  # the hub shows what a gated model has, and keeps its files
    claims: dict[str, int] = dataclasses.field(default_factory=dict)  # sizes that are not true


class FakeHub(ThreadingHTTPServer):
    """Answers what huggingface_hub asks to list and fetch models: three routes of the hub's API."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer takes 40 ms

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, _, query = self.path.partition("?")
        self.server.asked.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers["Authorization"])
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
            name, kind, revision = match.groups()
        else:
            name, revision, file = path[1:].replace("/resolve/", "/").rsplit("/", 2)
            kind = "file"
        repo = self.server.repos.get(name)
        if repo is None:
            self.refuse(404, "RepoNotFound")
        elif repo.refusal:
            self.refuse(*repo.refusal)
        elif revision not in (None, "main", repo.commit):
            self.refuse(404, "RevisionNotFound")
        elif kind == "tree":
            self.tell([self.entry(repo, name) for name in repo.files])
        elif kind == "file" and repo.gated:
            self.refuse(403, "GatedRepo")
        elif kind == "file":
            self.send(repo, unquote(file))
        else:
            assert query in ("blobs=true", "")
            siblings = [{**self.entry(repo, name), "rfilename": name} for name in repo.files]
            self.tell({"id": name, "sha": repo.commit, "siblings": siblings})

    def entry(self, repo, name):
        size = repo.claims.get(name, len(repo.files[name]))
        return {"type": "file", "path": name, "size": size, "oid": self.etag(repo, name)}

    def etag(self, repo, name):
        return hashlib.sha1(repo.files[name]).hexdigest()

    def send(self, repo, name):
        content = repo.files[name]
        first, last = 0, len(content) - 1
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or last), last)
        body = content[first : last + 1]
        self.send_response(206 if span else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{self.etag(repo, name)}"')
        self.send_header("X-Repo-Commit", repo.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def tell(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def serving_hub():
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
    monkeypatch.setattr(sources, "PERIOD_S", 0.0)
    _, notes = fetched(environ)
    assert "fetching org/tiny: 0.3 MB of 0.3 MB" in notes


def test_a_checkpoint_on_the_hub_is_looked_at_without_its_weights(hub, environ, tmp_path):
    checkpoint = locate("org/tiny", environ).checkpoint()
    assert checkpoint.where == "org/tiny"
    assert checkpoint.sizes == {name: len(content) for name, content in MODEL.items()}
    assert hub.asked == ["GET /api/models/org/tiny"]
    for length in (8, 1000, sources.HEAD + 1, 10**9):
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
        ("tokenizer.json", True),  # nothing else says that there should be one
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


def test_asking_costs_no_more_than_it_may():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        sources._within(0.05, lambda: time.sleep(1))
    assert time.monotonic() - began < 0.5
    with pytest.raises(io.UnsupportedOperation):
        sources._within(1, lambda: io.BytesIO().fileno())
