# SPDX-License-Identifier: Apache-2.0
"""The traffic of chaos: requests of every kind, and a judge who knows the right answers."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from tools.chaos.ledger import End, Ledger, Verdict

DEADLINE_S = 60.0
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
SESSION = "X-Amzn-SageMaker-Session-Id"
ERRORS = frozenset((500, 502, 503, 504))
"""Statuses that a request may get while an engine is away."""
CUT = 0
"""In the place of a status: a fault may cut connections, so that there is no whole answer."""
TOKENS = 12

_VOLATILE = ("created", "id", "logprob", "log_prob", "usage", "system_fingerprint", "object")


class Incomplete(Exception):
    """An answer that ends before its end."""


class Told(Exception):
    """An error in an answer that had begun, or in a line of it: its status and message."""


@dataclass(frozen=True)
class Ask:
    """A request. read: returns the part of a whole answer that must be equal. unique: whether the
    engine's answer has the request's id in it. survives: whether another server completes its
    stream if one fails, so that no fault excuses an error in it.
    """

    kind: str
    path: str
    body: bytes
    read: Callable[[bytes], Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    unique: bool = False
    slow: bool = False
    survives: bool = False


class Answer(NamedTuple):
    """failure: why there is no whole answer. began, ended: on the monotonic clock."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    failure: str
    began: float
    ended: float


# reading answers


def stripped(found: Any) -> Any:
    """Without what differs between two right answers."""
    if isinstance(found, dict):
        kept = {k: stripped(v) for k, v in found.items() if k not in _VOLATILE}
        if isinstance(found.get("id"), int):  # a token's
            kept["id"] = found["id"]
        return kept
    return [stripped(it) for it in found] if isinstance(found, list) else found


def error_in(found: Any) -> tuple[int, str] | None:
    """The status and message of an error in one of the documented shapes."""
    match found:
        case {"code": int(code), "error": str(told)}:
            return code, told
        case {"code": int(code), "type": str(), "message": str(told)}:
            return code, told
        case {"error": {"message": str(told), "type": str(), "code": int(code)}}:
            return code, told
    return None


def error_of(body: bytes) -> tuple[int, str] | None:
    """The same of an answer's body."""
    try:
        return error_in(json.loads(body))
    except ValueError:
        return None


def whole(body: bytes) -> Any:
    return stripped(json.loads(body))


def records(body: bytes) -> Any:
    """JSON lines, an answer each."""
    found = [json.loads(line) for line in body.splitlines()]
    for it in found:
        if error := error_in(it):
            raise Told(*error)
    return stripped(found)


def events(body: bytes) -> Any:
    """A stream of server-sent events, put together."""
    parts = [it.removeprefix(b"data: ") for it in body.split(b"\n\n") if it.startswith(b"data: ")]
    ended = parts[-1:] == [b"[DONE]"]
    found = [json.loads(it) for it in (parts[:-1] if ended else parts)]
    together = _together(found)
    if not ended and "tokens" not in together:
        raise Incomplete("a stream without [DONE]")
    return together


def lines(body: bytes) -> Any:
    """A stream of JSON lines, put together."""
    return _together([json.loads(line) for line in body.splitlines()])


def _together(found: list[Any]) -> dict[str, Any]:
    for it in found:
        if error := error_in(it):
            raise Told(*error)
    if not found:
        raise Incomplete("an empty stream")
    if "choices" not in found[0]:  # LMI's
        if found[-1].get("generated_text") is None:
            raise Incomplete("a stream without its last line")
        tokens = [it["token"] for it in found]
        text = found[-1]["generated_text"]
        if not text.endswith("".join(it["text"] for it in tokens)):
            raise ValueError("tokens are not the text's")
        return {"text": text, "tokens": [it["id"] for it in tokens]}
    choices = [it for event in found for it in event["choices"]]
    if not any(it.get("finish_reason") for it in choices):
        raise Incomplete("a stream without a finish_reason")
    return {
        "text": "".join(
            it.get("text") or it.get("delta", {}).get("content") or "" for it in choices
        ),
        "finish_reason": [it["finish_reason"] for it in choices if it.get("finish_reason")],
        "model": sorted({event["model"] for event in found}),
        "processed_by": sorted({event.get("processed_by", "") for event in found}),
    }


# judging


def judged(
    ask: Ask, answer: Answer, sent_id: str, expected: Any, allowed: Set[int], stopped_at: float
) -> Verdict:
    """allowed: the statuses of errors that a fault may have caused. stopped_at: when who answers
    was asked to stop.
    """
    late = answer.began > stopped_at
    if answer.failure:
        return _unanswered(answer.failure, allowed, late)
    try:
        if answer.status != 200:
            return _refused(answer, allowed, late)
        if answer.headers.get("x-request-id", sent_id) != sent_id:
            return Verdict(End.WRONG, "the answer has another request's id")
        value = ask.read(answer.body)
    except Incomplete as error:
        return _unanswered(str(error), allowed, late)
    except Told as error:
        status, told = error.args
        if status in allowed and not ask.survives:
            return Verdict(End.EXPLAINED, f"{status} in the answer: {told}")
        return Verdict(End.UNEXPLAINED, f"{status} in the answer: {told}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Verdict(End.WRONG, f"not what it should be: {error!r}: {answer.body[:300]!r}")
    if ask.unique and sent_id.encode() not in answer.body:
        return Verdict(End.WRONG, "the answer is another request's")
    if value != expected:
        return Verdict(End.WRONG, f"got {_short(value)}, not {_short(expected)}")
    return Verdict(End.RIGHT)


def _unanswered(why: str, allowed: Set[int], late: bool) -> Verdict:
    if late:
        return Verdict(End.REFUSED, why)
    return Verdict(End.EXPLAINED if CUT in allowed else End.LOST, why)


def _refused(answer: Answer, allowed: Set[int], late: bool) -> Verdict:
    error = error_of(answer.body)
    if not error or error[0] != answer.status:
        told = f"{answer.status} in no documented shape: {answer.body[:300]!r}"
        return Verdict(End.UNEXPLAINED, told)
    told = f"{answer.status} {error[1]}"
    if answer.status == 503 and "retry-after" not in answer.headers:
        return Verdict(End.UNEXPLAINED, f"{told} (without Retry-After)")
    if late and answer.status in ERRORS:
        return Verdict(End.REFUSED, told)
    return Verdict(End.EXPLAINED if answer.status in allowed else End.UNEXPLAINED, told)


def _short(value: Any) -> str:
    return json.dumps(value)[:300]


# asking


class Client:
    """Asks one server or router, and enters every end in the ledger.

    headers: of all requests. stopped_at: when it was asked to stop.
    """

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        deadline: float = DEADLINE_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url = url
        self.ledger = ledger
        self.deadline = deadline
        self._headers = headers
        self.stopped_at = float("inf")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        if self._session:
            await self._session.close()
            self._session = None

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        slow: bool = False,
    ) -> Answer:
        if not self._session:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, auto_decompress=False, headers=self._headers
            )
        began, failure, status = time.monotonic(), "", 0
        kept: Mapping[str, str] = {}
        parts: list[bytes] = []
        try:
            async with (
                asyncio.timeout(self.deadline),
                self._session.request(
                    method, self.url + path, data=body, headers=headers, allow_redirects=False
                ) as answer,
            ):
                status, kept = answer.status, answer.headers
                async for part in answer.content.iter_any():
                    parts.append(part)
                    if slow:
                        await asyncio.sleep(0.1)
        except TimeoutError:
            failure = f"no whole answer within {self.deadline:.0f} s (status {status})"
        except (aiohttp.ClientError, OSError) as error:
            failure = f"{type(error).__name__}: {error} (status {status})"
        return Answer(status, kept, b"".join(parts), failure, began, time.monotonic())

    async def answer(self, ask: Ask, **more: str) -> tuple[str, Answer]:
        """The request's id, and the answer."""
        number = uuid.uuid4().hex
        headers = {"content-type": "application/json", "x-request-id": number}
        headers |= {**ask.headers, **more}
        return number, await self.send("POST", ask.path, ask.body, headers, ask.slow)

    async def judge(self, ask: Ask, expected: Any, since: float | None = None, **more: str) -> None:
        """Ask, and enter how it ended. since, also: as enter() has them."""
        number, answer = await self.answer(ask, **more)
        self.enter(ask, expected, number, answer, since)

    def enter(
        self,
        ask: Ask,
        expected: Any,
        number: str,
        answer: Answer,
        since: float | None = None,
        also: Set[int] = frozenset(),
    ) -> None:
        """Judge an answer. since: from when on a fault may be what an error comes of. also: as
        Ledger.allowed() has it.
        """
        allowed = self.ledger.allowed(since or answer.began, answer.ended, also)
        self.ledger.count(ask.kind, judged(ask, answer, number, expected, allowed, self.stopped_at))

    def expect(
        self,
        kind: str,
        right: Callable[[Answer], bool],
        answer: Answer,
        since: float | None = None,
        also: Set[int] = frozenset(),
    ) -> bool:
        """Enter how a call ended that has no text to compare; whether it is right."""
        late = answer.began > self.stopped_at
        allowed = self.ledger.allowed(since or answer.began, answer.ended, also)
        if answer.failure:
            verdict = _unanswered(answer.failure, allowed, late)
        elif right(answer):
            verdict = Verdict(End.RIGHT)
        elif answer.status == 200:
            verdict = Verdict(End.WRONG, f"200 {answer.body[:200]!r}")
        else:
            verdict = _refused(answer, allowed, late)
        self.ledger.count(kind, verdict)
        return verdict.end is End.RIGHT


# requests

_WORDS = ("import", "name", "class", "value", "object", "method", "raise", "yield")


def words(seed: object, count: int) -> str:
    """So many words and numbers, always the same of a seed."""
    drawn = random.Random(str(seed))
    return " ".join(f"{drawn.choice(_WORDS)} {drawn.randrange(1000)}" for _ in range(count // 2))


def lmi(prompt: str | list[str], **more: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": TOKENS, "do_sample": False, "ignore_eos_token": True}
    if more.pop("full", False):
        parameters["return_full_text"] = True
    return {"inputs": prompt, "parameters": parameters, **more}


def completion(prompt: str, **more: Any) -> dict[str, Any]:
    base = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return base | more


def chat(prompt: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    base = {"messages": [message], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return base | more


def cases(seed: int, adapters: list[str], formatted: str, each: int = 3) -> list[Ask]:
    """Requests with answers that are recorded while no other traffic runs. formatted: the adapter
    that has a formatter.
    """
    invoke, sse = "/invocations", {"Accept": "text/event-stream"}
    texts, chats = "/v1/completions", "/v1/chat/completions"
    found: list[Ask] = []

    def add(kind: str, path: str, body: Any, read: Any, unique: bool = False, **more: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        survives = read is events and path in (texts, chats)
        headers = more.get("headers", {})
        found.append(Ask(kind, path, data, read, headers, unique, "slow" in more, survives))

    for n in range(each):

        def p(kind: str, count: int = 12, n: int = n) -> str:
            return words(f"{seed} {kind} {n}", count)

        add("LMI", invoke, lmi(p("lmi"), full=n == 0), whole)
        add("LMI, JSON lines", invoke, lmi(p("lines"), stream=True), lines)
        add("LMI, SSE", invoke, lmi(p("sse"), stream=True), events, headers=sse)
        add("list of inputs", invoke, lmi([p("l1"), p("l2"), p("l3")]), whole)
        add("completion", texts, completion(p("completion"), echo=n == 0), whole, True)
        add("completion, SSE", texts, completion(p("c-sse"), stream=True), events, True)
        add("completion on /invocations", invoke, completion(p("inv")), whole, True)
        add("chat", chats, chat(p("chat")), whole, True)
        add("chat, SSE", chats, chat(p("chat-sse"), stream=True), events, True)
        add("chat on /invocations, lines", invoke, chat(p("inv-c"), stream=True), lines, True)
        add("long prompt", texts, completion(p("long", 600)), whole, True)
        long = completion(p("slow", 20), stream=True, max_tokens=60)
        add("stream read slowly", texts, long, events, True, slow=True)
        for name in adapters:
            header = {ADAPTER: name}
            add("adapter by header", invoke, lmi(p(name)), whole, headers=header)
            add("adapter by body", invoke, lmi(p(name + "b"), adapters=name), whole)
            add("adapter by model", chats, chat(p(name + "m"), model=name), whole, True)
            body = completion(p(name + "s"), stream=True)
            add("adapter, SSE", invoke, body, events, True, headers=header | sse)
        header = {ADAPTER: formatted}
        add("formatter", invoke, chat(p("f")), whole, True, headers=header)
        body = chat(p("f-sse"), stream=True)
        add("formatter, SSE", chats, body, events, True, headers=header)
        mixed = [lmi(p("r1")), lmi(p("r2"), adapters=adapters[n % len(adapters)]), chat(p("r3"))]
        data = b"\n".join(json.dumps(it).encode() for it in mixed)
        kind = {"content-type": "application/jsonlines"}
        add("records", invoke, data, records, headers=kind)
        body = lmi([p("a1"), p("a2"), p("a3")], adapters=["", *adapters[:2]])
        add("list with adapters", invoke, body, whole)
    return found


def fresh(number: str, adapter: str) -> Ask:
    """A long prompt that was never asked before."""
    body = completion(words(number, 500), echo=True)
    headers = {ADAPTER: adapter} if adapter else {}
    kind = "fresh prompt, asked again"
    return Ask(kind, "/invocations", json.dumps(body).encode(), whole, headers, True)


# garbage: what is sent as it is, and which statuses refuse it rightly

_HEAD = b"POST %b HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"


def posted(body: bytes, path: bytes = b"/invocations", *more: bytes) -> bytes:
    head = _HEAD % path + b"".join(it + b"\r\n" for it in more)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def garbage() -> list[tuple[str, bytes, frozenset[int]]]:
    bad, missing = frozenset((400, 424)), frozenset((404, 424))
    v1 = b"/v1/completions"
    deep = b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    return [
        ("not HTTP", b"\x16\x03\x01\x00\xa5\x01\x00" * 30 + b"\r\n\r\n", frozenset((400,))),
        ("no version", b"GET /ping\r\n\r\n", frozenset((400,))),
        ("HTTP/3.0", b"GET /ping HTTP/3.0\r\nhost: a\r\n\r\n", frozenset((400,))),
        ("a header of 100 kB", posted(b"{}", v1, b"x: " + b"y" * 100_000), frozenset((431,))),
        ("two lengths", posted(b"{}", v1, b"content-length: 7"), bad),
        ("length and chunked", posted(b"{}", v1, b"transfer-encoding: gzip"), bad),
        ("bad chunk", _HEAD % v1 + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n", bad),
        ("100 GB announced", _HEAD % v1 + b"content-length: 100000000000\r\n\r\n{",
         frozenset((413,))),
        ("no JSON", posted(b'{"inputs": "a'), bad),
        ("no UTF-8", posted(b'{"inputs": "\xff\xfe"}'), bad),
        ("nothing", posted(b""), bad),
        ("nested 50,000 deep", posted(deep), bad),
        ("nested, OpenAI", posted(deep.replace(b"inputs", b"prompt"), v1), bad),
        ("NaN", posted(b'{"inputs":"a","parameters":{"temperature":NaN}}'), bad),
        ("infinity", posted(b'{"prompt":"a","temperature":1e999}', v1), bad),
        ("inputs is a number", posted(b'{"inputs": 5}'), bad),
        ("prompt is an object", posted(b'{"prompt": {"a": 1}}', v1), bad),
        ("tokens that are not there", posted(b'{"prompt": [99999999], "max_tokens": 1}', v1), bad),
        ("negative tokens", posted(b'{"prompt": [-1], "max_tokens": 1}', v1), bad),
        ("max_tokens is text", posted(b'{"prompt":"a","max_tokens":"many"}', v1), bad),
        ("temperature of -1", posted(b'{"inputs":"a","parameters":{"temperature":-1}}'), bad),
        ("too long", posted(json.dumps(completion("word " * 20_000)).encode(), v1), bad),
        ("messages without role", posted(b'{"messages":[{}]}'), bad),
        ("no such adapter", posted(b'{"inputs":"a","adapters":"nobody"}'), bad),
        ("no such model", posted(b'{"prompt":"a","model":"nobody"}', v1), missing),
        ("inner name", posted(b'{"prompt":"a","model":"one@0000"}', v1), missing),
        ("no such session", posted(b'{"inputs":"a"}', b"/invocations",
                                    b"X-Amzn-SageMaker-Session-Id: ../../etc/passwd"), bad),
        ("no such path", posted(b"{}", b"/v1/load_lora_adapter"), frozenset((404,))),
        ("no such method", b"PUT /invocations HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
         frozenset((405,))),
        ("adapter from elsewhere", posted(b"", b"/adapters?name=a&src=/etc"),
         frozenset((424, 400, 403))),
    ]  # fmt: skip


async def parted(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and body of an answer with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").lower().split("\r\n")
    named = dict(it.split(": ", 1) for it in rest if ": " in it)
    length = int(named.get("content-length", 0))
    return int(first.split()[1]), await reader.readexactly(length)


class Connected(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def connected(port: int) -> Connected:
    return Connected(*await asyncio.open_connection("127.0.0.1", port))


async def send_garbage(client: Client, port: int, it: tuple[str, bytes, frozenset[int]]) -> None:
    """Send it, and see that it is refused with an error in a documented shape."""
    name, data, allowed = it
    began = time.monotonic()
    status, body, failure = 0, b"", ""
    writer = None
    try:
        async with asyncio.timeout(client.deadline):
            reader, writer = await connected(port)
            writer.write(data)
            status, body = await parted(reader)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as broken:
        failure = repr(broken)
    finally:
        if writer:
            writer.close()
    ended = time.monotonic()
    error = error_of(body)
    if failure:
        explained = client.ledger.allowed(began, ended)
        verdict = _unanswered(f"{name}: {failure}", explained, began > client.stopped_at)
    elif status in allowed and error and error[0] == status:
        verdict = Verdict(End.EXPLAINED, f"garbage refused with {status}")
    elif began > client.stopped_at:
        verdict = Verdict(End.REFUSED)
    elif status in client.ledger.allowed(began, ended):
        verdict = Verdict(End.EXPLAINED, f"garbage: {status}")
    else:
        verdict = Verdict(End.WRONG if status == 200 else End.UNEXPLAINED,
                          f"{name}: {status} {body[:200]!r}")  # fmt: skip
    client.ledger.count("garbage", verdict)


async def drop(port: int, drawn: random.Random) -> None:
    """Leave early: before all is sent, before the answer, or in the middle of it."""
    body = json.dumps(completion(words(drawn.random(), 100), max_tokens=200, stream=True)).encode()
    data = posted(body, b"/v1/completions")
    try:
        reader, writer = await connected(port)
        how = drawn.randrange(4)
        if how == 0:
            writer.write(data[: drawn.randrange(len(data))])
        else:
            writer.write(data)
        await writer.drain()
        if how == 2:
            await asyncio.sleep(drawn.random())
        elif how == 3:
            async with asyncio.timeout(10):
                await reader.read(100)
        if drawn.random() < 0.5:
            writer.transport.abort()
        writer.close()
    except (OSError, TimeoutError):
        pass
