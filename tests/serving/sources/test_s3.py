# SPDX-License-Identifier: Apache-2.0
"""Models from a real S3 server (moto's)."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lmi_config.facts.model import Folder
from serving.sources import s3, source
from serving.sources.arriving import Early
from serving.sources.locate import locate
from serving.sources.source import SourceError
from tests.s3_server import Watched
from tests.serving.sources.conftest import (
    MODEL,
    NOT_NEEDED,
    WEIGHTS,
    closed,
    contents,
    ignore,
    silent,
)
from tests.support.harness.wait import until


@pytest.fixture
def hurried(monkeypatch):
    """Short time-outs for hosts that do not answer."""
    monkeypatch.setattr(s3, "ANSWER_S", 0.2)
    monkeypatch.setattr(source, "UNREACHABLE_S", 0.6)


class Bucket:
    """A bucket for one test."""

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
        """The fetched contents, the names of the requested objects, and the notes."""
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


def test_only_missing_or_changed_files_are_fetched_again(bucket):
    bucket.put({"a.json": b"a", "b.json": b"b", "c.json": b"ccc", "d/e.json": b"e"})
    folder = bucket.locate().fetch(ignore)
    bucket.client.delete_object(Bucket=bucket.name, Key="models/tiny/a.json")
    (folder / "b.json").write_bytes(b"x")  # the same size, not the same time
    os.truncate(folder / "c.json", 1)
    (folder / "d/e.json").unlink()
    (folder / "model.safetensors.0a1b2c3d").write_bytes(b"left by a fetch that was killed")
    time.sleep(1.01)  # S3 has times in whole seconds
    changed = {"model.safetensors": WEIGHTS[::-1]}
    bucket.put(changed)
    found, asked, _ = bucket.fetch()
    assert found == MODEL | {"b.json": b"b", "c.json": b"ccc", "d/e.json": b"e"} | changed
    assert asked == {"b.json", "c.json", "d/e.json", "model.safetensors"}


def test_an_object_that_has_only_the_size_and_the_time_of_the_file_is_fetched(bucket):
    """An object that replaces another within the same second looks like this."""
    bucket.put({"config.json": b"first"})
    folder = bucket.locate().fetch(ignore)
    bucket.put({"config.json": b"other"})
    listed = bucket.client.head_object(Bucket=bucket.name, Key="models/tiny/config.json")
    os.utime(folder / "config.json", (listed["LastModified"].timestamp(),) * 2)
    assert not isinstance(bucket.locate().checkpoint(), Folder)
    found, asked, _ = bucket.fetch()
    assert (found["config.json"], asked) == (b"other", {"config.json"})


def test_files_without_a_valid_note_are_fetched_again(bucket):
    folder = bucket.locate().fetch(ignore)
    (note,) = bucket.downloads.glob("*.etags")
    for broken in (b"", b"[]", None):
        if broken is None:
            note.unlink()
        else:
            note.write_bytes(broken)
        assert bucket.fetch()[:2] == (MODEL, set(MODEL))
        assert bucket.fetch()[:2] == (MODEL, set())
    assert folder.is_dir()


KILLED = """
import sys
from serving.sources import locate, s3
s3.PART = 64 * 1024
locate.locate(sys.argv[1], {}, downloads=sys.argv[2]).fetch(print)
"""


def test_a_fetch_that_was_killed_goes_on(bucket):
    bucket.server.gate.clear()
    uri = f"s3://{bucket.name}/models/tiny"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, uri, str(bucket.downloads)],
        cwd=Path(source.__file__).parents[2],
    )
    config = bucket.client.head_object(Bucket=bucket.name, Key="models/tiny/config.json")

    def half_done():
        begun = list(bucket.downloads.glob("*/model.safetensors.*"))
        whole = list(bucket.downloads.glob("*/config.json"))
        times = [file.stat().st_mtime for file in whole]
        return begun and times == [int(config["LastModified"].timestamp())]

    until(half_done)
    child.send_signal(signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert not list(bucket.downloads.glob("*/model.safetensors"))
    bucket.server.gate.set()
    found, asked, _ = bucket.fetch()
    assert (found, asked - {"empty.txt"}) == (MODEL, {"model.safetensors"})


def test_two_that_want_the_same_fetch_it_once(bucket, monkeypatch):
    monkeypatch.setattr(s3, "PART", 64 * 1024)
    bucket.server.gate.clear()
    notes: dict[str, list[str]] = {"first": [], "second": []}
    first, second = (
        threading.Thread(target=bucket.locate().fetch, args=[notes[name].append]) for name in notes
    )
    first.start()
    until(lambda: "models/tiny/model.safetensors" in bucket.server.fetched)
    second.start()
    until(lambda: notes["second"])
    assert notes["second"] == ["waiting for another process that fetches the same model"]
    bucket.server.gate.set()
    first.join()
    second.join()
    assert len(notes["second"]) == 1
    assert bucket.fetch() == (MODEL, set(), [])


SHARDS = [f"model-{number}-of-11.safetensors" for number in (1, 2, 10, 11)]


class Begun:
    """An early use, which sees the files that are there."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def __call__(self, folder):
        self.seen.append({*contents(folder)})


def test_a_use_begins_before_the_weights_are_there(bucket, monkeypatch):
    monkeypatch.setattr(s3, "PART", 64 * 1024)
    monkeypatch.setattr(s3, "CONNECTIONS", 1)
    bucket.put(dict.fromkeys(SHARDS, WEIGHTS))
    bucket.server.fetched.clear()
    begun = Begun()
    folder = bucket.locate().fetch(ignore, Early(SHARDS, begun))
    assert begun.seen == [{*MODEL}]
    assert contents(folder) == MODEL | dict.fromkeys(SHARDS, WEIGHTS)
    asked = [it.removeprefix("models/tiny/") for it in bucket.server.fetched]
    assert [it for it in dict.fromkeys(asked) if it in SHARDS] == SHARDS
    (folder / SHARDS[2]).unlink()
    again = Begun()
    bucket.locate().fetch(ignore, Early(SHARDS, again))
    assert again.seen == [{*MODEL, *SHARDS} - {SHARDS[2]}]
    bucket.locate().fetch(ignore, Early(SHARDS, again))
    assert len(again.seen) == 1, "nothing had to be fetched"


def test_old_weights_are_gone_before_an_early_use(bucket):
    bucket.put(dict.fromkeys(SHARDS, WEIGHTS))
    bucket.locate().fetch(ignore)
    time.sleep(1.01)  # S3 has times in whole seconds
    bucket.put({SHARDS[1]: WEIGHTS[::-1]})
    begun = Begun()
    bucket.locate().fetch(ignore, Early(SHARDS, begun))
    assert begun.seen == [{*MODEL, *SHARDS} - {SHARDS[1]}]


def test_a_fetch_that_fails_after_an_early_use_is_told(bucket, monkeypatch):
    monkeypatch.setattr(s3, "PART", 64 * 1024)
    bucket.put(dict.fromkeys(SHARDS, WEIGHTS))

    def replace(folder):
        bucket.put({SHARDS[3]: WEIGHTS[::-1]})

    with pytest.raises(SourceError, match="an object changed while it was fetched"):
        bucket.locate().listed().fetch(ignore, Early(SHARDS, replace))


def test_an_object_that_changes_meanwhile_is_not_mixed_with_the_new_one(bucket, monkeypatch):
    monkeypatch.setattr(s3, "PART", 64 * 1024)
    bucket.server.gate.clear()
    faults: list[str] = []

    def fetch() -> None:
        try:
            bucket.locate().fetch(ignore)
        except SourceError as fault:
            faults.append(fault.reason)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    until(lambda: "models/tiny/model.safetensors" in bucket.server.fetched)
    bucket.put({"model.safetensors": WEIGHTS[::-1]})
    bucket.server.gate.set()
    fetching.join()
    assert faults == ["an object changed while it was fetched"]
    assert not list(bucket.downloads.glob("*/model.safetensors*"))


def test_progress_is_told(bucket, monkeypatch):
    monkeypatch.setattr(source, "PERIOD_S", 0.0)
    _, _, notes = bucket.fetch()
    uri = re.escape(f"s3://{bucket.name}/models/tiny")
    assert re.fullmatch(f"fetching {uri}: 0.[0-3] MB of 0.3 MB", notes[1])
    assert re.fullmatch(f"fetching {uri}: 0.3 MB of 0.3 MB", notes[-2])


def test_a_checkpoint_on_s3_is_looked_at_without_its_weights(bucket):
    checkpoint = bucket.locate().checkpoint()
    assert checkpoint.where == f"s3://{bucket.name}/models/tiny"
    assert checkpoint.sizes == {name: len(content) for name, content in MODEL.items()}
    assert bucket.server.fetched == []
    for length in (8, 1000, source.HEAD + 1, 10**9):
        for name, content in MODEL.items():
            assert checkpoint.head(name, length) == content[:length]
    asked = [key.removeprefix("models/tiny/") for key in bucket.server.fetched]
    assert asked == ["config.json", *["model.safetensors"] * 3]
    assert not bucket.downloads.exists()


def test_what_is_looked_at_and_fetched_is_what_was_listed(bucket):
    listing = bucket.locate().list()
    digest = listing.digest
    assert digest == bucket.locate().list().digest
    bucket.put({"config.json": b'{"model_type": "other"}'})
    fault = "an object changed while it was fetched; start again"
    with pytest.raises(SourceError, match=fault):
        listing.checkpoint().head("config.json", 8)
    with pytest.raises(SourceError, match=fault):
        listing.fetch(ignore)
    assert listing.digest == digest != bucket.locate().list().digest


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


class Endless(BaseHTTPRequestHandler):
    """A bucket whose list never ends: each page has a next one."""

    protocol_version = "HTTP/1.1"
    pages = 0
    pause_s = 0.0

    def do_GET(self):
        time.sleep(self.pause_s)
        type(self).pages += 1
        item = (
            "<Contents><Key>{}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            "<ETag>a</ETag><Size>1</Size></Contents>"
        )
        items = "".join(item.format(f"{self.pages:05}-{n}") for n in range(1000))
        body = (
            "<ListBucketResult><IsTruncated>true</IsTruncated>"
            f"<NextContinuationToken>t{self.pages}</NextContinuationToken>{items}"
            "</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("pause_s", "told"), [(0.0, "more than 10,000 objects"), (0.3, "listed in 1 s")]
)
def test_a_listing_without_end_is_given_up_and_stops(monkeypatch, tmp_path, pause_s, told):
    monkeypatch.setattr(Endless, "pages", 0)
    monkeypatch.setattr(Endless, "pause_s", pause_s)
    if pause_s:
        monkeypatch.setattr("serving.sources.s3.LIST_S", 1.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError) as refused:
        locate("s3://bucket", {}, downloads=str(tmp_path)).checkpoint()
    assert told in str(refused.value)
    assert "give the prefix of one model" in str(refused.value)
    pages = Endless.pages
    assert pages <= 12
    time.sleep(1)
    assert Endless.pages == pages
    server.shutdown()
    server.server_close()
