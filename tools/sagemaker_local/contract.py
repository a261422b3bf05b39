# SPDX-License-Identifier: Apache-2.0
"""SageMaker's contract, rule by rule, against a container that runs: which of them it keeps.

Each rule is a function that returns its observation, or raises Broken or NotTried. They run one
after the other, and those that may end the container last.
"""

import asyncio
import contextlib
import http
import io
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp

PING_S = 2.0
ACCEPT_S = 0.25
ANSWER_S = 60.0
STOP_S = 30.0
LEFT_S = 10.0  # for the engine to notice that a client has gone
HEADER_BYTES = 4096
ERROR_BYTES = 2048
MEGABYTE = 1_000_000
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
_NEW = re.compile(r"([a-zA-Z0-9](?:-*[a-zA-Z0-9])*);\sExpires=\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
_STACK = re.compile(r'Traceback|File "|\bat 0x[0-9a-f]{6}')
CLOSED_PATHS = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up"),
    *("/reset_prefix_cache", "/collective_rpc", "/docs", "/openapi.json", "/server_info"),
)


class Broken(Exception):
    """A rule that the container does not keep; the message has the observation."""


class NotTried(Exception):
    """A rule that could not be tried; the message says why."""


class Answer(NamedTuple):
    status: int
    reason: str
    headers: Mapping[str, str]
    header_bytes: int
    body: bytes

    @property
    def shown(self) -> str:
        return f"{self.status} {self.body[:120].decode(errors='replace')}".strip()


class Result(NamedTuple):
    rule: str
    verdict: str  # pass, fail or not tried
    says: str
    seen: str


class Container:
    """The container at a URL, and the inputs of the checks.

    body: a request that it answers, with the same words each time. adapter: a folder that the
    container sees by the same path. pid: its process, which gets a SIGTERM at the end.
    """

    def __init__(
        self, url: str, body: Mapping[str, Any], adapter: Path | None, pid: int | None
    ) -> None:
        self.url = url.rstrip("/")
        self.body = dict(body)
        self.adapter = adapter
        self.pid = pid
        self.session: str | None = None
        self.registered: str | None = None

    @contextlib.asynccontextmanager
    async def asking(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = ANSWER_S,
        accept_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer, from its head on. body: bytes, or a value to encode as JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        data = None if content is None else io.BytesIO(content)
        async with aiohttp.ClientSession(
            auto_decompress=False,
            max_line_size=2**20,
            max_field_size=2**20,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=accept_s),
        ) as session:
            try:
                async with session.request(
                    method, self.url + path, data=data, headers=headers, allow_redirects=False
                ) as response:
                    yield response
            except aiohttp.ConnectionTimeoutError:
                raise Broken(f"{method} {path}: not accepted within {accept_s} s") from None
            except TimeoutError:
                raise Broken(f"{method} {path}: no answer within {seconds:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise Broken(f"{method} {path}: {error!r}") from None

    async def ask(self, method: str, path: str, *args: Any, **more: Any) -> Answer:
        async with self.asking(method, path, *args, **more) as response:
            size = sum(len(name) + len(value) + 4 for name, value in response.raw_headers)
            body = await response.read()
            return Answer(response.status, response.reason or "", response.headers, size, body)

    async def invoke(
        self, body: object = None, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Answer:
        headers = {"Content-Type": "application/json", **(headers or {})}
        return await self.ask("POST", "/invocations", body or self.body, headers, **more)

    async def ping(self) -> float:
        """Seconds until /ping answered 200."""
        began = time.monotonic()
        answer = await self.ask("GET", "/ping", seconds=PING_S, accept_s=ACCEPT_S)
        require(answer.status == 200, f"GET /ping answered {answer.shown}")
        return time.monotonic() - began

    async def alive(self) -> None:
        """Raise Broken unless it still answers."""
        await self.ping()
        found = await self.invoke()
        require(found.status == 200, f"afterwards a request was answered {found.shown}")


Check = Callable[[Container], Awaitable[str]]
RULES: dict[str, tuple[str, Check]] = {}


def rule(name: str, says: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        RULES[name] = (says, check)
        return check

    return add


def require(kept: object, seen: str) -> None:
    if not kept:
        raise Broken(seen)


def refused(answer: Answer, what: str) -> str:
    require(400 <= answer.status < 500, f"{what} was answered {answer.shown}")
    return f"{what}: {answer.status}"


@rule("ping", "/ping answers 200 within 2 s, connections are accepted within 250 ms")
async def _ping(container: Container) -> str:
    return f"200 after {await container.ping():.3f} s"


@rule("ping-loaded", "the same while requests are under way")
async def _ping_loaded(container: Container) -> str:
    load = [asyncio.create_task(container.invoke()) for _ in range(8)]
    try:
        times = [await container.ping() for _ in range(20)]
    finally:
        answers = await asyncio.gather(*load, return_exceptions=True)
    failed = [it for it in answers if not isinstance(it, Answer) or it.status != 200]
    require(not failed, f"{len(failed)} of 8 requests failed: {failed[:1]}")
    return f"20 pings beside 8 requests, the slowest {max(times):.3f} s"


@rule("invocations", "/invocations answers JSON")
async def _invocations(container: Container) -> str:
    found = await container.invoke()
    require(found.status == 200 and _json(found) is not None, f"answered {found.shown}")
    return f"200 {found.headers.get('Content-Type')}"


@rule("content-type", "a missing Content-Type and one with a charset are understood")
async def _content_type(container: Container) -> str:
    charset = {"Content-Type": "application/json; charset=utf-8"}
    for name, headers in (("missing", {}), ("with a charset", charset)):
        found = await container.ask("POST", "/invocations", container.body, headers)
        require(found.status == 200, f"{name}: {found.shown}")
    return "200 and 200"


@rule("accept", "Accept: application/json is answered with JSON, and an unknown one is accepted")
async def _accept(container: Container) -> str:
    for accept in ("application/json", "*/*", "application/x-unheard-of"):
        found = await container.invoke(headers={"Accept": accept})
        require(found.status == 200, f"{accept}: {found.shown}")
        kind = found.headers.get("Content-Type", "")
        require("json" in kind or accept != "application/json", f"{accept}: answered as {kind}")
    return "200 to three of them"


@rule("headers-unknown", "headers that SageMaker may add are ignored")
async def _headers_unknown(container: Container) -> str:
    more = {"X-Amzn-SageMaker-Unheard-Of": "1", "X-Amzn-SageMaker-Inference-Id": "id 1"}
    found = await container.invoke(headers=more)
    require(found.status == 200, f"answered {found.shown}")
    return "200"


@rule("attributes", "CustomAttributes (route=/…) reach nothing that /invocations does not")
async def _attributes(container: Container) -> str:
    plain = _json(await container.invoke())
    for path in ("/v1/models", "/metrics", "/ping"):
        headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"}
        found = await container.invoke(headers=headers)
        same = isinstance(plain, dict) and (_json(found) or {}).keys() == plain.keys()
        refused = 400 <= found.status < 500
        require(
            refused or (same and found.status == 200), f"route={path} was answered {found.shown}"
        )
    return "refused, or the same answer, with three of them"


@rule("content-length", "an answer that is not a stream has a Content-Length, and is not chunked")
async def _content_length(container: Container) -> str:
    headers = (await container.invoke()).headers
    require("Content-Length" in headers, f"headers are {', '.join(headers)}")
    return f"Content-Length: {headers['Content-Length']}"


@rule("headers-small", "headers of answers and of errors stay within 4096 bytes")
async def _headers_small(container: Container) -> str:
    bad = {"prompt": 5, "inputs": {"x" * 6000: 1}, "model": "y" * 6000}
    sizes = [(await container.invoke(body)).header_bytes for body in (container.body, bad)]
    require(max(sizes) <= HEADER_BYTES, f"{max(sizes)} bytes")
    return f"{sizes[0]} and {sizes[1]} bytes"


@rule("reason-phrase", "the status line has no free text")
async def _reason_phrase(container: Container) -> str:
    for body in (container.body, b"{", {"prompt": {"secret": "words"}}):
        found = await container.invoke(body)
        with contextlib.suppress(ValueError):
            phrase = http.HTTPStatus(found.status).phrase
            known = (phrase, "", "-", "Request Entity Too Large", "Unprocessable Entity")
            require(found.reason in known, f"{found.status} {found.reason}")
    return "the statuses' own phrases"


@rule("error-body", "errors are 4xx with a short JSON body and no stack")
async def _error_body(container: Container) -> str:
    wrong = {**container.body, "max_tokens": "x", "prompt": {"a": 1}, "inputs": 5}
    seen = []
    for name, body in (("no JSON", b"{"), ("wrong types", wrong)):
        found = await container.invoke(body)
        seen.append(refused(found, name))
        require(_json(found) is not None, f"{name}: not JSON: {found.shown}")
        require(len(found.body) <= ERROR_BYTES, f"{name}: a body of {len(found.body)} bytes")
        require(not _STACK.search(found.body.decode(errors="replace")), f"{name}: {found.shown}")
    return ", ".join(seen)


@rule("json-depth", "deeply nested JSON is refused and does no harm")
async def _json_depth(container: Container) -> str:
    seen = refused(await container.invoke(b'{"prompt": ' + b"[" * 100_000), "100,000 levels")
    await container.alive()
    return seen


@rule("payload", "a request of 24 MB is answered")
async def _payload(container: Container) -> str:
    found = await container.invoke(_padded(container.body, 24 * MEGABYTE))
    require(found.status == 200, f"answered {found.shown}")
    return "200"


@rule("payload-large", "a request of 128 MB is answered or refused, and does no harm")
async def _payload_large(container: Container) -> str:
    try:
        found = await container.invoke(_padded(container.body, 128 * MEGABYTE))
    except Broken as broken:
        # A server may refuse from the head alone, and close while the body is still being sent.
        await container.alive()
        raise Broken(f"no answer to be read: {broken}") from None
    require(found.status in (200, 413), f"answered {found.shown}")
    await container.alive()
    return str(found.status) + (", without a limit" if found.status == 200 else "")


@rule("stream", "streams are chunked, and each write ends with an event")
async def _stream(container: Container) -> str:
    headers = {"Content-Type": "application/json"}
    chunks: list[bytes] = [b""]
    body = {**container.body, "stream": True}
    async with container.asking("POST", "/invocations", body, headers) as response:
        require(response.status == 200, f"answered {response.status}")
        chunked = response.headers.get("Transfer-Encoding") == "chunked"
        require(chunked, f"headers are {', '.join(response.headers)}")
        async for data, end in response.content.iter_chunks():
            chunks[-1] += data
            if end:
                chunks.append(b"")
    written = [chunk for chunk in chunks if chunk]
    require(len(written) > 1, "the whole stream was one write")
    cut = [chunk for chunk in written if not chunk.endswith(b"\n")]
    require(not cut, f"a write ended with {cut[:1]!r:.80}")
    return f"{len(written)} writes"


@rule("client-leaves", "a client that leaves ends its request, and does no harm")
async def _client_leaves(container: Container) -> str:
    long = {"max_tokens": 2000, "ignore_eos": True}
    body = {**container.body, **long, "stream": True}
    headers = {"Content-Type": "application/json"}
    async with container.asking("POST", "/invocations", body, headers) as response:
        require(response.status == 200, f"answered {response.status}")
        await response.content.readany()
        response.close()
    await container.alive()
    deadline = time.monotonic() + LEFT_S
    while (running := await _running(container)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    require(not running, f"{running:g} requests are still running {LEFT_S:g} s later")
    return "it answers" + ("" if running is None else ", and nothing is running")


@rule("openai", "/v1/chat/completions answers with an empty model, whole and streamed")
async def _openai(container: Container) -> str:
    body = {"model": "", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json"}
    found = await container.ask("POST", "/v1/chat/completions", body, headers)
    require(found.status == 200 and _json(found) is not None, f"answered {found.shown}")
    streamed = await container.ask(
        "POST", "/v1/chat/completions", {**body, "stream": True}, headers
    )
    whole = streamed.body.rstrip().endswith(b"[DONE]")
    require(streamed.status == 200 and whole, f"streamed: {streamed.shown}")
    return "200 and 200"


@rule("metrics", "/metrics is open and has series")
async def _metrics(container: Container) -> str:
    found = await container.ask("GET", "/metrics")
    lines = found.body.decode(errors="replace").splitlines()
    series = [line for line in lines if re.match(r"[a-zA-Z_:][\w:]*(\{.*\})? \S", line)]
    require(found.status == 200 and series, f"answered {found.shown}")
    return f"{len(series)} series"


@rule("execution-parameters", "/execution-parameters says how much batch transform may send")
async def _execution_parameters(container: Container) -> str:
    found = await container.ask("GET", "/execution-parameters")
    limits = _json(found)
    keys = {"MaxConcurrentTransforms", "BatchStrategy", "MaxPayloadInMB"}
    kept = found.status == 200 and isinstance(limits, dict) and limits.keys() >= keys
    require(kept, f"answered {found.shown}")
    return json.dumps(limits)


@rule("admin-closed", "the engine's own administration and documentation are not reachable")
async def _admin_closed(container: Container) -> str:
    # GET only: a POST would put the engine to sleep. A path that is there answers it with 405.
    open_ = [
        f"{path} ({found.status})"
        for path in CLOSED_PATHS
        if (found := await container.ask("GET", path)).status not in (401, 403, 404)
    ]
    require(not open_, ", ".join(open_))
    return f"{len(CLOSED_PATHS)} paths are not there"


@rule("adapter-unknown", "an unknown adapter is an error, never answered by the base model")
async def _adapter_unknown(container: Container) -> str:
    return refused(await container.invoke(headers={ADAPTER: "no-such-adapter"}), "unknown")


@rule("adapter-register", "POST /adapters takes its parameters from the query, the body is empty")
async def _adapter_register(container: Container) -> str:
    name = "123456789012-check-" + "a" * 44
    found = await _register(container, name, _adapter(container))
    require(found.status == 200, f"answered {found.shown}")
    container.registered = name
    return f"200, with a name of {len(name)} characters"


@rule("adapter-again", "the same POST can be repeated")
async def _adapter_again(container: Container) -> str:
    found = await _register(container, _registered(container), _adapter(container))
    require(found.status == 200, f"answered {found.shown}")
    return "200"


@rule("adapter-answers", "a registered adapter answers, and not the base model in its place")
async def _adapter_answers(container: Container) -> str:
    name = _registered(container)
    base, found = await container.invoke(), await container.invoke(headers={ADAPTER: name})
    require(found.status == 200, f"answered {found.shown}")
    named = (_json(found) or {}).get("model") == name
    require(named or _words(found) != _words(base), "it answers as the base model does")
    return "200, " + ("another text" if _words(found) != _words(base) else "under its own name")


@rule("adapter-update", "after DELETE and POST of another folder the adapter answers")
async def _adapter_update(container: Container) -> str:
    name, src = _registered(container), _adapter(container)
    with _copied(src, src.parent) as other:
        gone = await container.ask("DELETE", f"/adapters/{name}")
        require(gone.status == 200, f"DELETE answered {gone.shown}")
        again = await _register(container, name, other)
        require(again.status == 200, f"POST answered {again.shown}")
        found = await container.invoke(headers={ADAPTER: name})
        require(found.status == 200, f"answered {found.shown}")
    return "200"


@rule("adapter-delete", "DELETE removes an adapter, and can be repeated")
async def _adapter_delete(container: Container) -> str:
    name = _registered(container)
    first = await container.ask("DELETE", f"/adapters/{name}")
    require(first.status == 200, f"answered {first.shown}")
    after = refused(await container.invoke(headers={ADAPTER: name}), "invoked afterwards")
    again = await container.ask("DELETE", f"/adapters/{name}")
    require(again.status in (200, 404), f"the second time it answered {again.shown}")
    return f"200, {after}, again: {again.status}"


@rule("adapter-names", "names that are no ids are refused, and do no harm")
async def _adapter_names(container: Container) -> str:
    src = _adapter(container)
    for name in ("../../x", "a b\tc", "", "é" * 300, "a\nb: c"):
        found = await _register(container, name, src)
        if found.status == 200:
            await container.ask("DELETE", "/adapters/" + urlencode({"": name})[1:])
        refused(found, f"name={name[:20]!r}")
    await container.alive()
    return "five of them, 4xx each"


@rule("adapter-traversal", "an adapter outside of where adapters may be is refused")
async def _adapter_traversal(container: Container) -> str:
    src = _adapter(container)
    with _copied(src, None) as other:
        up = "/".join([".."] * (len(src.parts) - 1))
        found = await _register(container, "outside", Path(f"{src}/{up}{other}"))
        if found.status == 200:
            await container.ask("DELETE", "/adapters/outside")
        return refused(found, "a folder reached by ..")


@rule("session-new", "NEW_SESSION opens a session, announced as `ID; Expires=…Z`")
async def _session_new(container: Container) -> str:
    found = await container.invoke({"requestType": "NEW_SESSION"}, {SESSION: "NEW_SESSION"})
    announced = found.headers.get(SESSION) or found.headers.get(NEW_SESSION)
    require(found.status == 200 and announced, f"no session: {found.shown}")
    match = _NEW.fullmatch(announced or "")
    if not match:
        raise Broken(f"announced as {announced}")
    container.session = match[1]
    return match[0]


@rule("session-headers", "a new session is announced by both headers, LMI's and SageMaker's own")
async def _session_headers(container: Container) -> str:
    _session(container)
    found = await container.invoke({"requestType": "NEW_SESSION"}, {SESSION: "NEW_SESSION"})
    missing = [name for name in (SESSION, NEW_SESSION) if name not in found.headers]
    require(not missing, f"{' and '.join(missing)} is missing")
    return "both"


@rule("session-use", "a session that is open is accepted, whole and streamed")
async def _session_use(container: Container) -> str:
    headers = {SESSION: _session(container)}
    for body in (container.body, {**container.body, "stream": True}):
        found = await container.invoke(body, headers)
        require(found.status == 200, f"answered {found.shown}")
    return "200 and 200"


@rule("session-unknown", "a session that is unknown, or no id at all, is a 4xx")
async def _session_unknown(container: Container) -> str:
    _session(container)
    unknown = "01234567-89ab-cdef-0123-456789abcdef"
    seen = [
        refused(await container.invoke(headers={SESSION: name}), name[:12])
        for name in (unknown, "../../etc/passwd", "x" * 256)
    ]
    return ", ".join(seen)


@rule("session-close", "CLOSE ends a session and returns its id; using it afterwards is a 4xx")
async def _session_close(container: Container) -> str:
    session = _session(container)
    found = await container.invoke({"requestType": "CLOSE"}, {SESSION: session})
    closed = found.headers.get(CLOSED_SESSION)
    require(found.status == 200 and closed == session, f"{CLOSED_SESSION}: {closed}, {found.shown}")
    return refused(await container.invoke(headers={SESSION: session}), "used afterwards")


@rule(
    "sigterm", "after SIGTERM a stream ends whole or with an error in it, and within 30 s all ends"
)
async def _sigterm(container: Container) -> str:
    if container.pid is None:
        raise NotTried("--pid names no process")
    body = {**container.body, "stream": True, "max_tokens": 64, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    text = b""
    async with container.asking("POST", "/invocations", body, headers, STOP_S) as response:
        text += await response.content.readany()
        began = time.monotonic()
        os.kill(container.pid, signal.SIGTERM)
        try:
            text += await response.content.read()
        except TimeoutError:
            raise Broken(f"the stream was left open for {STOP_S:g} s") from None
        except aiohttp.ClientError as error:
            raise Broken(f"the stream was broken off: {error!r}") from None
    while _exists(container.pid):
        require(time.monotonic() - began < STOP_S, f"it is still there after {STOP_S:g} s")
        await asyncio.sleep(0.1)
    how = "with an error in it" if b'"error"' in text else "whole"
    return f"the stream ended {how}, the process after {time.monotonic() - began:.1f} s"


def _exists(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    except OSError:
        return False


def _json(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return None


def _words(answer: Answer) -> object:
    """The part of an answer that a model has written."""
    found = _json(answer)
    if isinstance(found, dict) and "choices" in found:
        return [choice.get("text") or choice.get("message") for choice in found["choices"]]
    return found


def _padded(body: Mapping[str, Any], size: int) -> bytes:
    """A request that is as large as one with a picture, and as cheap as one without."""
    return json.dumps(body).encode().ljust(size)


async def _running(container: Container) -> float | None:
    """The number of running requests according to vLLM, or None."""
    lines = (await container.ask("GET", "/metrics")).body.decode(errors="replace").splitlines()
    found = [float(it.split()[-1]) for it in lines if it.startswith("vllm:num_requests_running")]
    return sum(found) if found else None


async def _register(container: Container, name: str, src: Path) -> Answer:
    query = urlencode({"name": name, "src": str(src)})
    headers = {"X-Amzn-SageMaker-Adapter-Alias": "check"}
    return await container.ask("POST", f"/adapters?{query}", None, headers)


def _adapter(container: Container) -> Path:
    if not container.adapter:
        raise NotTried("--adapter names no folder")
    return container.adapter


def _registered(container: Container) -> str:
    _adapter(container)
    if not container.registered:
        raise NotTried("no adapter could be registered")
    return container.registered


def _session(container: Container) -> str:
    if not container.session:
        raise NotTried("no session could be opened")
    return container.session


@contextlib.contextmanager
def _copied(folder: Path, where: Path | None) -> Any:
    with tempfile.TemporaryDirectory(prefix="check-", dir=where) as other:
        yield shutil.copytree(folder, Path(other, "adapter"))


async def run(container: Container, only: Collection[str] = ()) -> list[Result]:
    """Try every rule, or some of them."""
    results = []
    for name, (says, check) in RULES.items():
        if only and name not in only:
            continue
        try:
            verdict, seen = "pass", await check(container)
        except Broken as broken:
            verdict, seen = "fail", str(broken)
        except NotTried as reason:
            verdict, seen = "not tried", str(reason)
        results.append(Result(name, verdict, says, seen))
    return results


def sheet(results: list[Result]) -> str:
    """The score sheet: a line for each rule, and the sum."""
    lines = [
        f"{it.verdict:10}{it.rule:22}{it.seen if it.verdict == 'pass' else f'{it.says}: {it.seen}'}"
        for it in results
    ]
    verdicts = [it.verdict for it in results]
    counts = [f"{verdicts.count(it)} {it}" for it in ("pass", "fail", "not tried")]
    return "\n".join([*lines, ", ".join(counts)])
