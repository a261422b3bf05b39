# SPDX-License-Identifier: Apache-2.0
"""A real S3 server (moto's) that logs its requests."""

import threading
from urllib.parse import parse_qs

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Watched:
    """moto's server, with a log of its requests and ways to make it difficult.

    fetched: the requested objects. listed: the prefixes of its listings. answers: bucket → error
    code and status of all its answers. While `gate` is closed, it serves only the first parts of
    objects, and of those in `held` only the first bytes.
    """

    def __init__(self) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="id",
            aws_secret_access_key="secret",
        )
        self.fetched: list[str] = []
        self.listed: list[str] = []
        self.answers: dict[str, tuple[str, str]] = {}
        self.held: set[str] = set()
        self.gate = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.fetched.clear()
        self.listed.clear()
        self.answers.clear()
        self.held.clear()
        self.gate.set()

    def __call__(self, environ, start_response):
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        if answer := self.answers.get(bucket):
            start_response(answer[1], [("Content-Type", "application/xml")])
            return [f"<Error><Code>{answer[0]}</Code><Message>u:secret</Message></Error>".encode()]
        query = parse_qs(environ["QUERY_STRING"])
        if "list-type" in query:
            self.listed += query.get("prefix", [""])
        if environ["REQUEST_METHOD"] == "GET" and key:
            asked = environ.get("HTTP_RANGE", "bytes=0-")
            if not asked.startswith("bytes=0-"):
                self.gate.wait(20)
            elif key in self.held and asked == "bytes=0-":
                self.gate.wait(200)
            self.fetched.append(key)
        return self.app(environ, start_response)
