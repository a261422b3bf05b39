# SPDX-License-Identifier: Apache-2.0
"""A client's request as it was read, and as it is forwarded."""

import random
import re
from collections.abc import Set
from typing import NamedTuple

from handlers.multipart import FIELDS_SIZE
from serving.access.access import CREDENTIALS
from serving.access.caller import ANYBODY
from serving.errors import Malformed, ServingError, TooLarge
from serving.http.http1 import CHUNK, LAST_CHUNK
from serving.protocol import FILES, IDENTITY, REQUEST_ID, SAGEMAKER, TRACE_CONTEXT
from serving.router.http import buffers
from serving.router.http.buffers import Buffers
from serving.router.http.upstream import HOP_BY_HOP

Headers = list[tuple[bytes, bytes]]
NO_HEADERS: Headers = []

HEADER = 200
"""Approximate memory of a header besides its bytes."""

# What else is not passed on: the framing is ours, 100-continue was dealt with, and so was a page's
# origin, which is foreign to the host that the replica sees.
_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"origin", IDENTITY}

# Targets as they are sent to a forward proxy (RFC 9112, 3.2.2).
_PROXIED = re.compile(rb"http://[^/?#]*", re.IGNORECASE)


class Rules(NamedTuple):
    """Rules for requests beyond HTTP."""

    max_body: int
    """Bytes of a body."""
    max_file: int
    """Bytes of a file that is kept for batches."""
    tenant: bytes
    """The header that names the tenant, or b""."""
    end_to_end: Set[bytes]
    """Headers that no client may declare to be about the connection alone."""

    def check_size(self, path: str, size: int) -> None:
        """Raise TooLarge if a path's body may not have this many bytes."""
        if path == FILES:
            if size > self.max_file + FIELDS_SIZE:
                raise TooLarge(self.max_file, "OPTION_BATCH_FILE_SIZE")
        elif size > self.max_body:
            raise TooLarge(self.max_body)


class Request:
    """A request whose head is complete. Its body is here, or comes, or is sent on as it comes."""

    __slots__ = (
        "_buffers",
        "_forwarding",
        "_head",
        "body",
        "caller",
        "complete",
        "expects",
        "forwarded",
        "headers",
        "http10",
        "id",
        "keep_alive",
        "length",
        "method",
        "named",
        "overflowed",
        "path",
        "refusal",
        "size",
        "streamed",
        "target",
        "tenant",
        "weight",
    )

    def __init__(
        self,
        method: bytes,
        target: bytes,
        version: str,
        headers: Headers,
        memory: Buffers,
        *,
        keep_alive: bool,
        refusal: ServingError | None = None,
    ) -> None:
        """version: of HTTP, "1.0" or later. headers: with names in lower case."""
        named = dict(headers)
        request_id = named.get(REQUEST_ID, b"")
        if not request_id:
            request_id = b"%032x" % random.getrandbits(128)
            headers.append((REQUEST_ID, request_id))
        if not target.startswith(b"/") and (proxied := _PROXIED.match(target)):
            rest = target[proxied.end() :]
            target = rest if rest.startswith(b"/") else b"/" + rest
        length = named.get(b"content-length", b"")
        # head
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.headers = headers
        self.named = named
        self.id = request_id
        """Its id in logs: the client's, or ours."""
        self.http10 = version == "1.0"
        self.keep_alive = keep_alive and not self.http10
        self.length = int(length) if length.isdigit() and len(length) < 20 else None
        """Bytes that the body will have, None if the client does not declare them."""
        self.expects = not self.http10 and named.get(b"expect", b"").lower() == b"100-continue"
        """Whether the client keeps the body until it is asked for it."""
        self.caller = ANYBODY
        """Who sends it."""
        self.tenant: str | None = None
        """The sender's tenant, None if tenants are not distinguished."""
        self.refusal = refusal
        """Why it is not answered as the client wants."""
        # body
        self.body: bytes | bytearray = b""
        """The received part that is not forwarded yet. These bytes are never changed, only replaced
        or extended, so connections can write them without a copy.
        """
        self.size = 0
        """Bytes that have come."""
        self.complete = False
        """Whether the body is complete."""
        self.overflowed = False
        """Whether there was no room to hold it until it was complete."""
        self.streamed = False
        """Whether the body is forwarded before it is complete."""
        self.forwarded = False
        """Whether a streamed body was sent on to its end."""
        self._forwarding = False
        # memory, and the forwarded part of the head
        self._buffers = memory
        self.weight = HEADER * len(headers) + len(target)
        self.weight += sum([len(name) + len(value) for name, value in headers])
        """Bytes of memory that the head takes, about; 0 once it is released."""
        self._head = b""
        memory.heads += self.weight

    def check(self, rules: Rules) -> None:
        """Raise Malformed if a replica might read another tenant or other headers from the request,
        and TooLarge if its body will be too large.
        """
        tenant = rules.tenant
        if tenant and (count := sum(name == tenant for name, _ in self.headers)) > 1:
            raise Malformed(
                f"{tenant.decode('latin-1')} is there {count} times; what names the tenant has to "
                "replace the client's own header, not add to it"
            )
        if own := self.connections_own:
            lost = [name for name in own if name in rules.end_to_end or name.startswith(SAGEMAKER)]
            if lost:
                names = ", ".join(sorted(name.decode("latin-1") for name in lost))
                raise Malformed(f"Connection names {names}, which is not about the connection")
        rules.check_size(self.path, self.length or 0)

    @property
    def connections_own(self) -> set[bytes]:
        """The header names in its Connection headers."""
        if b"connection" not in self.named:
            return set()
        values = (value for name, value in self.headers if name == b"connection")
        return {name.strip().lower() for name in b",".join(values).split(b",")}

    # as it comes

    def invite(self) -> None:
        """The client was asked for the body that it keeps."""
        self.expects = False

    def receive(self, body: bytes) -> bool:
        """More of the body has come. Whether there is room to hold it."""
        room = self._buffers.add(body)
        if not self.body:  # mostly it comes at once
            self.body = body
        elif isinstance(self.body, bytes):
            self.body = bytearray().join((self.body, body))
        else:
            self.body += body
        self.size += len(body)
        if room and len(self.body) <= buffers.MAX_BODY:
            return True
        self.overflowed = True
        return False

    def end_body(self) -> None:
        """All of the body has come."""
        self.complete = True

    def take_turn(self) -> None:
        """It is answered now. The missing part of its body will be streamed."""
        self.streamed = not self.complete

    def refuse(self, error: ServingError) -> None:
        """It turned out to be invalid."""
        self.refusal = error

    def release(self) -> None:
        """It is over, and takes no more memory."""
        self._buffers.bodies -= len(self.body)
        self._buffers.heads -= self.weight
        self.weight = 0
        self.body = b""

    # as it is sent on

    def replace(self, path: str, body: bytes) -> None:
        """Forward this instead of the received body."""
        _, mark, query = self.target.partition(b"?")
        self.target = path.encode() + mark + query
        self._buffers.bodies += len(body) - len(self.body)
        self.body = body
        self._head = b""

    @property
    def repeatable(self) -> bool:
        """Whether the whole received part is still here, to be sent, or sent again."""
        return not self._forwarding

    def head(
        self,
        authority: bytes,
        context: Headers = NO_HEADERS,
        identity: bytes | None = None,
        front: int = 0,
    ) -> bytes:
        """Its head for a replica. authority: the replica's host and port. context: headers of the
        router's trace, instead of the client's. identity: tells the replica who sends the request,
        b"" for no identity; None if the replica reads the client's credentials. front: bytes that
        are put in front of a body that is not streamed.
        """
        if identity is None and not front:
            lines = self._head = self._head or self._lines(None, context)
        else:
            lines = self._lines(identity, context, front)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (self.method, self.target, authority)
        return head + b"".join([b"%b: %b\r\n" % header for header in context]) + lines

    def _lines(self, identity: bytes | None, context: Headers, front: int = 0) -> bytes:
        own = self.connections_own
        dropped = _DROPPED | own if own else _DROPPED
        if identity is not None:
            dropped |= CREDENTIALS
        if context:
            dropped |= frozenset(TRACE_CONTEXT)
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in dropped]
        if identity:
            lines.append(b"%b: %b\r\n" % (IDENTITY, identity))
        if not self.streamed:
            if self.body or self.method == b"POST":
                lines.append(b"content-length: %d\r\n" % (front + len(self.body)))
        elif self.length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            lines.append(b"content-length: %d\r\n" % self.length)
        return b"".join(lines) + b"\r\n"

    def framed(self) -> bytes | bytearray:
        """The body; if it is streamed, the part since the last call, which is forgotten here."""
        body = self.body
        if not self.streamed:
            return body
        self.body = b""
        self._buffers.bodies -= len(body)
        self._forwarding = True
        self.forwarded = self.complete
        if self.length is not None:
            return body
        chunk = CHUNK % (len(body), body) if body else b""
        return chunk + LAST_CHUNK if self.complete else chunk
