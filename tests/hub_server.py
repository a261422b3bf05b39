# SPDX-License-Identifier: Apache-2.0
"""A small Hugging Face hub in the tests' process."""

import contextlib
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclasses.dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "a" * 40
    refusal: tuple[int, str] | None = None  # status and X-Error-Code for everything
    gated: bool = False  # the hub lists a gated model's files, and does not serve them
    claims: dict[str, int] = dataclasses.field(default_factory=dict)  # false sizes
    hashes: dict[str, str] = dataclasses.field(default_factory=dict)  # false SHA-256
    elsewhere: str = ""  # another host, the target of redirected file requests


class FakeHub(ThreadingHTTPServer):
    """Answers huggingface_hub's requests to list and fetch models: three routes of the
    hub's API.
    """

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
    disable_nagle_algorithm = True  # otherwise each answer takes 40 ms

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
        elif kind == "file" and repo.elsewhere:
            self.send_response(302)
            self.send_header("Location", f"{repo.elsewhere}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "file":
            self.send(repo, unquote(file))
        else:
            assert query in ("blobs=true", "")
            siblings = [self.sibling(repo, name) for name in repo.files]
            self.tell({"id": name, "sha": repo.commit, "siblings": siblings})

    def entry(self, repo, name):
        size = repo.claims.get(name, len(repo.files[name]))
        version = self.etag(repo, name)
        return {"type": "file", "path": name, "size": size, "oid": version}

    def sibling(self, repo, name):
        found = self.entry(repo, name)
        found |= {"rfilename": name, "blobId": found["oid"]}
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(repo.files[name]).hexdigest()
            told = {"sha256": repo.hashes.get(name, sha256), "pointerSize": 130}
            found["lfs"] = {"size": found["size"], **told}
        return found

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


@contextlib.contextmanager
def serving_fake() -> Iterator[FakeHub]:
    """A hub until the block ends."""
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
