# SPDX-License-Identifier: Apache-2.0
"""Replicas from a list, from a file, and from a small Kubernetes API that the real client asks."""

import asyncio
import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from lmi_config.options.parsers import Endpoints, Pool, replica_source, replicas
from serving import follow
from serving.router.fleet import kubernetes
from serving.router.fleet.discovery import discovered, listed
from tests.support.harness.wait import until_async

A, B, C = (f"http://10.0.0.{number}:8080" for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    monkeypatch.setattr(kubernetes, "PAUSE_S", 0.02)
    monkeypatch.setattr(kubernetes, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(logging.getLogger("serving"), "propagate", True)


@contextlib.asynccontextmanager
async def following(where):
    """A growing list of all sets so far."""
    seen: list[frozenset[str]] = []

    async def follow():
        async with contextlib.aclosing(discovered(where)) as sets:
            async for found in sets:
                seen.append(found)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("http://a:8080", {"http://a:8080"}),
        ("http://a:8080,http://b:8080/", {"http://a:8080", "http://b:8080"}),
        (" a:8080  b:1, c:65535 ,", {"http://a:8080", "http://b:1", "http://c:65535"}),
        ("http://A.Example,a.example:80", {"http://a.example:80"}),
        (
            "10.0.0.1:8080,http://my_pod-0.svc:080",
            {"http://10.0.0.1:8080", "http://my_pod-0.svc:80"},
        ),
        ("http://[::1]:8080,[2001:DB8:0::1]", {"http://[::1]:8080", "http://[2001:db8::1]:80"}),
        ("file:///etc/slipway/replicas", Path("/etc/slipway/replicas")),
        ("file:///etc/my replicas", Path("/etc/my replicas")),
        (
            "kubernetes://default/kubernetes.io/service-name=slipway?port=http",
            Endpoints("default", "kubernetes.io/service-name=slipway", "http"),
        ),
        (
            "kubernetes:///app in (a, b),!canary,tier!=test?port=8080",
            Endpoints("", "app in (a, b),!canary,tier!=test", 8080),
        ),
        ("kubernetes://my-space/app=a", Endpoints("my-space", "app=a", None)),
        ("inferencepool://my-space/my.pool", Pool("my-space", "my.pool")),
        ("inferencepool:///slipway", Pool("", "slipway")),
    ],
)
def test_what_says_where_replicas_are(where, source):
    assert replica_source(where) == source
    assert replicas(where) == where


@pytest.mark.parametrize(
    ("where", "should"),
    [
        ("", "URLs like"),
        (" , ", "URLs like"),
        *(
            (where, "like http://10.0.0.5:8080 or https://a.example:8443: no user, path or query")
            for where in (
                "ftp://a:8443",
                "http://a:8080,https://b/v1",
                "s3://bucket",
                "http://",
                "http://a:",
                "http://a:0",
                "http://a:65536",
                "http://a:8080x",
                "http://a:8080/v1",
                "http://a:8080//",
                "http://a?b=c",
                "http://a#b",
                "http://user:secret@a:8080",
                "http://::1:8080",
                "http://[::1",
                "http://[::g]:8080",
                "http://[1]:8080",
                "http://ä:8080",
                "HTTP//a",
            )
        ),
        ("file://etc/replicas", "an absolute path"),
        ("file://", "an absolute path"),
        *(
            (f"kubernetes://{where}", "kubernetes://NAMESPACE/LABELS")
            for where in (
                "",
                "default",
                "default/",
                "Default/a=b",
                "default/a=b?port=",
                "default/a=b?port=Http",
                "default/a=b?porto=http",
                "default/a=b&c",
            )
        ),
        *(
            (f"inferencepool://{where}", "inferencepool://NAMESPACE/NAME")
            for where in ("", "slipway", "default/", "default/A", "default/a?port=1", "a/b/c")
        ),
        ("kubernetes://default/a=b?port=0", "a whole number, at least 1, at most 65535"),
        ("kubernetes://default/a=b?port=70000", "a whole number, at least 1, at most 65535"),
    ],
)
def test_addresses_that_say_nothing_of_replicas_are_refused(where, should):
    with pytest.raises(ValueError, match=should.replace("?", r"\?")) as caught:
        replicas(where)
    assert "secret" not in str(caught.value)


@pytest.mark.anyio
async def test_a_list_is_told_once():
    assert [found async for found in discovered(f"{A}, {B},{A}")] == [frozenset({A, B})]
    with pytest.raises(ValueError, match="no user, path"):
        await anext(discovered("https://a/b"))


def test_kubernetes_is_imported_only_for_its_endpoints():
    code = "import sys, serving.router.fleet.discovery; sys.exit('kubernetes' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_of_replicas():
    content = f"# ours\n\n{A}/\r\n  10.0.0.2:8080 # the large one\n{A}\n"
    assert listed(content) == {A, B}
    assert listed("") == listed("\n#\n") == set()
    with pytest.raises(ValueError, match=r"^line 3 should be like http://10\.0\.0\.5:8080"):
        listed(f"{A}\n\n{B} {C}\n")


@pytest.mark.anyio
async def test_a_file_is_followed_however_it_is_changed(tmp_path):
    file = tmp_path / "replicas"
    file.write_text(A)
    async with following(f"file://{file}") as seen:
        await until_async(lambda: seen == [{A}])
        file.write_text(f"{A}\n{B}\n")
        await until_async(lambda: seen[1:] == [{A, B}])
        (tmp_path / "new").write_text(C)
        (tmp_path / "new").rename(file)
        await until_async(lambda: seen[2:] == [{C}])
        file.write_text(f"# the same ones\n{C}")
        await asyncio.sleep(0.1)
        file.write_text("")
        await until_async(lambda: seen[3:] == [set()])


@pytest.mark.anyio
async def test_a_file_is_followed_as_config_maps_are_swapped(tmp_path):
    for name, content in (("..1", A), ("..2", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "replicas").write_text(content)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "replicas").symlink_to("..data/replicas")
    async with following(f"file://{tmp_path}/replicas") as seen:
        await until_async(lambda: seen == [{A}])
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        (tmp_path / "..1" / "replicas").unlink()
        await until_async(lambda: seen[1:] == [{B}])


@pytest.mark.anyio
async def test_a_file_that_cannot_be_read_changes_nothing(tmp_path, caplog):
    file = tmp_path / "replicas"

    def logged():
        return [record.getMessage() for record in caplog.records]

    async with following(f"file://{file}") as seen:
        await until_async(lambda: len(logged()) == 1)
        (tmp_path / "new").write_text(A)
        (tmp_path / "new").rename(file)  # the first content is used at once, whole or not
        await until_async(lambda: seen == [{A}])
        file.write_text(f"{B}\nhttps://user:secret@c\n")
        await until_async(lambda: len(logged()) == 3)
        file.write_bytes(b"\xff\xfe")
        await until_async(lambda: len(logged()) == 4)
        file.unlink()
        await until_async(lambda: len(logged()) == 5)
        await asyncio.sleep(0.1)
        file.write_text(B)
        await until_async(lambda: seen[1:] == [{B}])
    missing, again, wrong, binary, gone, at_last = logged()
    assert missing == gone
    assert missing.endswith(f"No such file or directory: '{file}'")
    assert again == at_last == f"the replicas are read from {file} again"
    assert f"{file}: line 2 should be like http://10.0.0.5:8080" in wrong
    assert "utf-8" in binary
    assert "secret" not in caplog.text


@pytest.mark.anyio
async def test_a_file_is_believed_when_two_looks_agree(tmp_path, monkeypatch):
    looks = iter([A, B, "", f"{A}\n{B[:-1]}", f"{A}\n{B}", f"{A}\n{B}", "", ""])
    read = "serving.router.fleet.discovery.content"
    monkeypatch.setattr(read, lambda _: next(looks, "").encode())
    async with following("file:///replicas") as seen:
        await until_async(lambda: len(seen) == 3)
    assert seen == [{A}, {A, B}, set()]


def pod(number, uid=None, host="10.0.0.{}", **conditions):
    return {
        "addresses": [host.format(number)],
        "conditions": conditions or {"ready": True, "serving": True, "terminating": False},
        "targetRef": {"kind": "Pod", "name": f"pod-{number}", "uid": uid or f"uid-{number}"},
    }


HTTP = {"name": "http", "port": 8080, "protocol": "TCP"}
METRICS = {"name": "metrics", "port": 9090, "protocol": "TCP"}
UDP = {"name": "udp", "port": 53, "protocol": "UDP"}


def piece(*pods, ports=(HTTP,), kind="IPv4"):
    return {"addressType": kind, "endpoints": list(pods), "ports": list(ports)}


class Cluster:
    """An API server with the EndpointSlices of one namespace, or an InferencePool and its pods.

    asked: requests, as "list" or "watch from" and a version. answers: statuses of the next answers;
    a 410 comes as an event of a watch that has begun.
    """

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.pool: dict[str, Any] = {}
        self.version = 100
        self.asked: list[str] = []
        self.queries: list[tuple[str, dict[str, str]]] = []
        self.answers: list[tuple[str, int]] = []
        self.watches: list[queue.Queue[Any]] = []
        self.lock = threading.Lock()
        self.port = 0
        self.start()

    def start(self) -> None:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                cluster.answer(self)

            def log_message(self, *args):
                pass

        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.01])
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.end_watches()
        self.server.server_close()

    def put(self, name: str, content: dict[str, Any] | None) -> None:
        """Add, change or (None) remove a slice, and notify its watches."""
        with self.lock:
            kind = ("MODIFIED" if name in self.slices else "ADDED") if content else "DELETED"
            self.version += 1
            about = {"name": name, "resourceVersion": str(self.version)}
            if content:
                self.slices[name] = content | {"metadata": about | content.get("metadata", {})}
            one = self.slices[name] if content else self.slices.pop(name)
            for watch in self.watches:
                watch.put({"type": kind, "object": one})

    def end_watches(self) -> None:
        with self.lock:
            while self.watches:
                self.watches.pop().put(None)

    def answer(self, request) -> None:
        path, query = urlsplit(request.path).path, dict(parse_qsl(urlsplit(request.path).query))
        kind = "watch" if query.get("watch") else "list"
        kind = "get" if "/inferencepools/" in path else kind
        with self.lock:
            version = query.get("resourceVersion", "")
            self.asked.append(f"watch from {version}" if kind == "watch" else kind)
            self.queries.append((path, query))
            status = 200
            if self.answers and self.answers[0][0] == kind:
                status = self.answers.pop(0)[1]
            found = {
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self.slices.values()),
            }
            told: queue.Queue[Any] = queue.Queue()
            if kind == "watch" and status == 200:
                self.watches.append(told)
        if path.endswith("/inferencepools/slipway"):
            found = {"spec": self.pool}
        fault = {"code": status, "reason": "Because", "message": f"no: {status}", "kind": "Status"}
        if kind != "watch" or status == 403:
            body = json.dumps(found if status == 200 else fault).encode()
            request.send_response(status)
            request.send_header("Content-Type", "application/json")
            request.send_header("Audit-Id", f"{len(self.asked)}")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
            return
        if status == 410:
            told.put({"type": "ERROR", "object": fault})
            told.put(None)
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        with contextlib.suppress(OSError):
            for event in iter(told.get, None):
                line = b"\n" + json.dumps(event).encode() + b"\n"
                request.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            request.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    it = Cluster()
    config = {
        "current-context": "ours",
        "contexts": [
            {"name": "ours", "context": {"cluster": "it", "user": "me", "namespace": "space"}}
        ],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{it.port}"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield it
    it.stop()


WHERE = "kubernetes://default/kubernetes.io/service-name=slipway"


@pytest.mark.anyio
async def test_endpoints_are_listed_and_watched(cluster):
    cluster.put("one", piece(pod(1), pod(2, ready=False)))
    async with following(WHERE) as seen:
        await until_async(lambda: seen == [{A}] and cluster.watches)
        cluster.put("two", piece(pod(3)))
        await until_async(lambda: seen[1:] == [{A, C}])
        cluster.put("one", piece(pod(1), pod(2)))
        await until_async(lambda: seen[2:] == [{A, B, C}])
        cluster.put("one", piece(pod(1, ready=False, serving=True, terminating=True), pod(2)))
        await until_async(lambda: seen[3:] == [{B, C}])
        cluster.put("two", None)
        await until_async(lambda: seen[4:] == [{B}])
        cluster.put("one", None)
        await until_async(lambda: seen[5:] == [set()])
    assert cluster.asked == ["list", "watch from 101"]
    for path, query in cluster.queries:
        assert path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
        assert query["labelSelector"] == "kubernetes.io/service-name=slipway"


def server(number: int, ready: bool = True, **about: str) -> dict[str, Any]:
    """A pod of a pool."""
    conditions = {"Initialized": True, "Ready": ready}
    told = [{"type": name, "status": str(value)} for name, value in conditions.items()]
    return {"metadata": about, "status": {"podIP": f"10.0.0.{number}", "conditions": told}}


@pytest.mark.anyio
async def test_the_pods_of_a_pool_are_listed_and_watched(cluster):
    labels = {"app": "slipway", "role": "decode"}
    cluster.pool = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": 8080}]}
    cluster.put("one", server(1))
    cluster.put("late", {"metadata": {}, "status": {"conditions": None}})
    async with following("inferencepool://default/slipway") as seen:
        await until_async(lambda: seen == [{A}] and cluster.watches)
        cluster.put("two", server(2, ready=False))
        cluster.put("two", server(2))
        await until_async(lambda: seen[1:] == [{A, B}])
        cluster.put("one", server(1, deletionTimestamp="2027-01-01T00:00:00Z"))
        await until_async(lambda: seen[2:] == [{B}])
        cluster.put("two", None)
        await until_async(lambda: seen[3:] == [set()])
        # Another copy of the model has another port. The pool is read with each watch.
        cluster.pool["targetPorts"].append({"number": 8081})
        cluster.put("three", server(3))
        await until_async(lambda: seen[4:] == [{C}])
        cluster.end_watches()
        await until_async(lambda: seen[5:] == [{C, "http://10.0.0.3:8081"}])
    assert cluster.asked[:3] == ["get", "list", "watch from 102"]
    pool = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools/slipway"
    pods = "/api/v1/namespaces/default/pods"
    assert [path for path, _ in cluster.queries[:3]] == [pool, pods, pods]
    assert {query["labelSelector"] for _, query in cluster.queries[1:3]} == {
        "app=slipway,role=decode"
    }


@pytest.mark.anyio
async def test_a_pool_that_is_not_there_is_told_once(cluster, caplog):
    cluster.answers = [("get", 404)] * 3
    cluster.pool = {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 8080}]}
    cluster.put("one", server(1))
    async with following("inferencepool:///slipway") as seen:
        await until_async(lambda: seen == [{A}])
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.endswith("the InferencePool slipway: the API server answers 404: no: 404")


@pytest.mark.anyio
async def test_our_own_namespace_when_none_is_named(cluster):
    cluster.put("one", piece(pod(1), ports=[METRICS, HTTP]))
    async with following("kubernetes:///a=b?port=metrics") as seen:
        await until_async(lambda: seen == [{"http://10.0.0.1:9090"}])
    assert cluster.queries[0][0] == "/apis/discovery.k8s.io/v1/namespaces/space/endpointslices"


@pytest.mark.anyio
@pytest.mark.parametrize("gone", [False, True])
async def test_after_a_watch_there_is_a_list_again(cluster, caplog, gone):
    cluster.put("one", piece(pod(1)))
    if gone:
        cluster.answers = [("watch", 410)]
    async with following(WHERE) as seen:
        await until_async(lambda: seen == [{A}] and cluster.watches)
        if not gone:
            cluster.end_watches()
            await until_async(lambda: cluster.watches)
        cluster.put("two", piece(pod(2)))
        await until_async(lambda: seen[1:] == [{A, B}])
    assert cluster.asked == ["list", "watch from 101"] * 2
    assert not caplog.records


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["list", "watch"])
async def test_a_role_that_may_not_is_told_once(cluster, caplog, kind):
    cluster.put("one", piece(pod(1)))
    cluster.answers = [(kind, 403)] * 4
    async with following(WHERE) as seen:
        await until_async(lambda: seen == [{A}] and cluster.watches)
        cluster.end_watches()
        await until_async(lambda: len(caplog.records) == 2)
    told, again = (record.getMessage() for record in caplog.records)
    assert told.endswith("slipway: the API server answers 403: no: 403")
    assert again.endswith("slipway again")
    refused = ["list"] if kind == "list" else ["list", "watch from 101"]
    expected = [*refused * 4, "list", "watch from 101"]
    assert cluster.asked[: len(expected)] == expected


@pytest.mark.anyio
async def test_replicas_stay_while_the_api_server_is_away(cluster, caplog):
    cluster.put("one", piece(pod(1)))
    async with following(WHERE) as seen:
        await until_async(lambda: seen == [{A}] and cluster.watches)
        cluster.stop()
        await until_async(lambda: caplog.records)
        await asyncio.sleep(0.2)
        cluster.put("one", piece(pod(2)))
        cluster.start()
        await until_async(lambda: seen[1:] == [{B}])
    assert len(caplog.records) == 1
    assert "Connection refused" in caplog.text


@pytest.mark.anyio
async def test_without_a_cluster_there_are_no_replicas(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    async with following(WHERE) as seen:
        await until_async(lambda: caplog.records)
        await asyncio.sleep(0.1)
    assert not seen
    assert len(caplog.records) == 1
    assert "Invalid kube-config file" in caplog.text


@pytest.mark.anyio
async def test_a_pod_finds_its_cluster_by_itself(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    async with following("kubernetes:///a=b"):
        await until_async(lambda: caplog.records)
    assert "Service token file does not exist" in caplog.text


@pytest.mark.parametrize(
    ("pieces", "port", "expected"),
    [
        ([piece(pod(1), ports=[METRICS, HTTP])], None, {A}),
        ([piece(pod(1), ports=[METRICS, HTTP])], "metrics", {"http://10.0.0.1:9090"}),
        ([piece(pod(1), ports=[METRICS])], None, {"http://10.0.0.1:9090"}),
        ([piece(pod(1), ports=[{"port": 8080}])], None, {A}),
        ([piece(pod(1), ports=[UDP, METRICS])], None, {"http://10.0.0.1:9090"}),
        ([piece(pod(1), ports=[])], 8080, {A}),
        ([piece(pod(1)), piece(pod(2), ports=[METRICS])], "http", {A}),
        ([piece(pod(1, host="fd00::{}"), kind="IPv6")], None, {"http://[fd00::1]:8080"}),
        ([piece(pod(1, host="fd00::{}"), kind="IPv6"), piece(pod(1))], None, {A}),
        ([piece(pod(1, host="a{}.example"), kind="FQDN")], None, {"http://a1.example:8080"}),
        ([piece({"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]})], None, {A, B}),
        ([piece(pod(1, serving=True))], None, {A}),
        ([piece(pod(1, ready=True, serving=True, terminating=True))], None, set()),
        ([piece(pod(1, ready=False, serving=True, terminating=False))], None, {A}),
        ([piece(pod(1, ready=False, serving=False, terminating=False))], None, set()),
        ([piece(pod(1, ready=False), ports=[])], None, set()),
        ([{"addressType": "IPv4", "endpoints": None, "ports": None}], "http", set()),
        ([], None, set()),
    ],
)
def test_endpoints_as_urls(pieces, port, expected):
    assert kubernetes.urls(parsed(pieces), port) == expected


@pytest.mark.parametrize(
    ("ports", "port", "fault"),
    [
        ([HTTP, METRICS], "grpc", r"the endpoints have the ports \['http', 'metrics'\], not grpc"),
        ([UDP], None, r"the endpoints have the ports \['udp'\], not one to use"),
        ([], None, r"the endpoints have the ports \[\], not one to use"),
    ],
)
def test_a_port_that_no_endpoint_has_is_a_fault(ports, port, fault):
    with pytest.raises(ValueError, match=fault):
        kubernetes.urls(parsed([piece(pod(1), ports=ports)]), port)


def parsed(pieces):
    from kubernetes.client import V1EndpointSlice

    return [V1EndpointSlice.from_dict(one) for one in pieces]


ODD_LISTS = {
    "no UTF-8": b"\xff\xfe\xff",
    "a zero byte": b"http://10.0.0.1:80\0",
    "no URL": b"10.0.0.1 10.0.0.2",
    "another scheme": b"file:///etc/passwd",
    "a path": b"http://10.0.0.1:80/v1/../admin",
    "a login": b"http://user:secret@10.0.0.1:80",
    "a port too high": b"http://10.0.0.1:99999",
    "no host": b"http://",
    "a query": b"http://10.0.0.1:80?x=1",
    "an address that is none": b"http://[::1",
    "a line without end": b"http://" + b"a" * 1_000_000,
    "too large": b"# " + b" " * (4 * 2**20),
    "half a pair": "http://\ud800".encode("utf-8", "surrogatepass"),
    "a header in a name": b"http://a\tb:80",
}


@pytest.mark.anyio
async def test_what_is_no_list_of_replicas_leaves_them_as_they_were(tmp_path, monkeypatch, caplog):
    """A later look finds the file correct again."""
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    file = tmp_path / "replicas"
    file.write_text("http://10.0.0.9:80")
    seen = []

    async def watch() -> None:
        async for urls in discovered(f"file://{file}"):
            seen.append(urls)

    watching = asyncio.create_task(watch())
    await until_async(lambda: seen)
    for name, odd in ODD_LISTS.items():
        caplog.clear()
        file.write_bytes(odd)
        await until_async(lambda: "stay as they were" in caplog.text, 10)
        assert len(seen) == 1, name
        file.write_text("http://10.0.0.9:80")
        await until_async(lambda: "are read from" in caplog.text, 10)
    file.unlink()
    file.mkdir()
    await until_async(lambda: "Is a directory" in caplog.text)
    file.rmdir()
    file.write_text("http://10.0.0.8:80")
    await until_async(lambda: seen[-1] == {"http://10.0.0.8:80"})
    watching.cancel()
