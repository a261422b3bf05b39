"""A client's request as it is read, and as it is sent on."""

import random
import re

from serving.errors import INVOCATIONS_PATH, ServingError
from serving.router.upstream import HOP_BY_HOP

# What else is not passed on: the framing is ours, and 100-continue was dealt with.
_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}

_INFERENCE = re.compile(INVOCATIONS_PATH + r"|/v1/(chat/completions|completions|embeddings)")
_OTHER = re.compile(r"/v1/models|/execution-parameters|(/models/[^/]+)?/adapters(/[^/]+)?")
_CHANGES = re.compile(r"(/models/[^/]+)?/adapters(/[^/]+(/update)?)?")

# Targets as they are sent to a forward proxy (RFC 9112, 3.2.2).
_PROXIED = re.compile(rb"http://[^/?#]*", re.IGNORECASE)

REQUEST_ID = b"x-request-id"


class Request:
    """id: what it is called in logs, the client's name for it or ours. length: bytes that the body
    will have, None where the client does not tell. size: bytes of it that have come. counted: those
    of them that count as held. complete: whether all of its body has come. streamed: whether the
    body is sent on before all of it is here. ended: whether a streamed body was sent on to its end.
    expects: whether the client waits for a "100 Continue". inference: whether strategies choose its
    replica. refusal: why it is not answered as asked.
    """

    method = b""
    target = b""
    path = ""
    id = b""
    length: int | None = None
    http10 = False
    keep_alive = False
    size = 0
    counted = 0
    complete = False
    streamed = False
    ended = False
    expects = False
    inference = False
    refusal: ServingError | None = None
    _head = b""
    _parted = False

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.named: dict[bytes, bytes] = {}
        self.body = bytearray()

    def heads_in(self, method: bytes, version: str, keep_alive: bool) -> None:
        """Its head is whole."""
        self.method = method
        self.http10 = version == "1.0"
        self.keep_alive = keep_alive and not self.http10
        self.named = dict(self.headers)
        length = self.named.get(b"content-length", b"")
        self.length = int(length) if length.isdigit() else None
        self.expects = not self.http10 and self.named.get(b"expect", b"").lower() == b"100-continue"
        self.id = self.named.get(REQUEST_ID, b"")
        if not self.id:
            self.id = b"%032x" % random.getrandbits(128)
            self.headers.append((REQUEST_ID, self.id))
        if not self.target.startswith(b"/") and (found := _PROXIED.match(self.target)):
            rest = self.target[found.end() :]
            self.target = rest if rest.startswith(b"/") else b"/" + rest
        self.path = self.target.partition(b"?")[0].decode("latin-1")
        self.inference = method == b"POST" and bool(_INFERENCE.fullmatch(self.path))

    @property
    def passes(self) -> bool:
        """Whether one replica answers it."""
        reads = self.method in (b"GET", b"HEAD") and _OTHER.fullmatch(self.path)
        return self.inference or bool(reads)

    @property
    def for_all(self) -> bool:
        """Whether it changes what all replicas have."""
        return self.method in (b"POST", b"DELETE") and bool(_CHANGES.fullmatch(self.path))

    @property
    def allowed(self) -> list[str]:
        """The methods that its path answers. None where there is no such path."""
        methods = ((_INFERENCE, "POST"), (_OTHER, "GET, HEAD"), (_CHANGES, "POST, DELETE"))
        return [found for path, found in methods if path.fullmatch(self.path)]

    @property
    def kept(self) -> bool:
        """Whether all that has come of it is here, to be sent, or sent once more."""
        return not self._parted

    def head(self, authority: bytes) -> bytes:
        """Its head for a replica, whose host and port are the authority."""
        if not self._head:
            dropped = _DROPPED
            if b"connection" in self.named:
                connection = b",".join(it for name, it in self.headers if name == b"connection")
                dropped = dropped | {it.strip().lower() for it in connection.split(b",")}
            lines = [b"%b: %b\r\n" % it for it in self.headers if it[0] not in dropped]
            if not self.streamed:
                if self.body or self.method == b"POST":
                    lines.append(b"content-length: %d\r\n" % len(self.body))
            elif self.length is None:
                lines.append(b"transfer-encoding: chunked\r\n")
            else:
                lines.append(b"content-length: %d\r\n" % self.length)
            self._head = b"".join(lines) + b"\r\n"
        line = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (self.method, self.target, authority)
        return line + self._head

    def framed(self) -> bytes:
        """The body, or what has come of it since the last call where it is streamed."""
        body = bytes(self.body)
        if not self.streamed:
            return body
        self.body.clear()
        self._parted = True
        self.ended = self.complete
        if self.length is not None:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk + b"0\r\n\r\n" if self.complete else chunk
