# SPDX-License-Identifier: Apache-2.0
"""SageMaker on the wire: requests checked against botocore's service models, event streams, tokens.

botocore's own client checks types, required members and minima; patterns, maxima and enumerations
are the service's to check, and here they are. Nothing in this file does I/O.
"""

import base64
import binascii
import functools
import hmac
import json
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import botocore.session
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.model import (
    ListShape,
    MapShape,
    OperationModel,
    ServiceModel,
    Shape,
    StringShape,
    StructureShape,
)

ENVIRONMENT_BYTES = 32 * 1024  # of all keys and values together; each has its own maximum
TOKEN_PREFIX = "sagemaker-api-key-"
TOKEN_S = 12 * 3600
SIGNED_S = 900
"""By which the time of a signature may differ from ours, as at AWS."""

_SIGNED = "AWS4-HMAC-SHA256 "
_TIME = "%Y%m%dT%H%M%SZ"


class Key(NamedTuple):
    """The key for signatures of requests: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""

    id: str
    secret: str


def new_key() -> Key:
    """An unguessable text."""
    return Key(f"LOCAL{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))


class Refused(Exception):
    """A call that is answered with an error.

    code: the exception's name as boto3 shows it. more: further members of the answer.
    """

    def __init__(self, message: str, code: str = "", status: int = 400, **more: object) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.more = more


@functools.cache
def _service(name: str) -> ServiceModel:
    return botocore.session.get_session().get_service_model(name)


def operation(service: str, name: str) -> OperationModel:
    return _service(service).operation_model(name)


def check(shape: Shape, value: Any) -> None:
    """Raise Refused, worded as SageMaker does it, where a request is not as its shape has it."""
    found = [*_faults(shape, value, "")]
    if found:
        errors = "1 validation error" if len(found) == 1 else f"{len(found)} validation errors"
        raise Refused(f"{errors} detected: " + "; ".join(found))


_KINDS: Mapping[str, Any] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "blob": (bytes,),
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float),
}


def _faults(shape: Shape, value: Any, path: str) -> Iterator[str]:
    kind = shape.type_name
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"Value at '{path}' failed to satisfy constraint: Member must be a {kind}"
        return
    if isinstance(shape, StructureShape):
        for name in shape.required_members:
            if value.get(name) is None:
                yield (
                    f"Value null at '{_under(path, name)}' failed to satisfy constraint: "
                    "Member must not be null"
                )
        for name, member in shape.members.items():
            if value.get(name) is not None:
                yield from _faults(member, value[name], _under(path, name))
        return
    if broken := _broken(shape, value):
        shown = "" if shape.metadata.get("sensitive") else f"'{str(value)[:200]}' "
        yield f"Value {shown}at '{path}' failed to satisfy constraint: {broken}"
    if isinstance(shape, ListShape):
        for place, item in enumerate(value, 1):
            yield from _faults(shape.member, item, f"{path}.{place}.member")
    elif isinstance(shape, MapShape):
        for key, item in value.items():
            yield from _faults(shape.key, key, f"{path}.key")
            yield from _faults(shape.value, item, f"{path}.{key}")


def _under(path: str, name: str) -> str:
    return f"{path}.{name[0].lower()}{name[1:]}".lstrip(".")


def _broken(shape: Shape, value: Any) -> str | None:
    """The first constraint of its shape's that a value breaks."""
    told, bounds = shape.metadata, (("min", "greater"), ("max", "less"))
    number = isinstance(value, int | float)
    size = value if number else len(value)
    for bound, compared in bounds:
        if bound in told and (size < told["min"] if bound == "min" else size > told["max"]):
            what = "value" if number else "length"
            return f"Member must have {what} {compared} than or equal to {told[bound]}"
    if isinstance(shape, StringShape) and shape.enum and value not in shape.enum:
        known = ", ".join(shape.enum[:20])
        return f"Member must satisfy enum value set: [{known}]"
    if "pattern" in told and not _pattern(told["pattern"]).fullmatch(value):
        return f"Member must satisfy regular expression pattern: {told['pattern']}"
    return None


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    """A Java expression of the service model's in Python's terms."""
    for java, python in (
        (r"\p{ASCII}", r"[\x00-\x7f]"),
        (r"\p{Print}", r"\x20-\x7e"),
        (r"\p{L}\p{Z}\p{N}", r"\w\s"),
        (r"\z", r"\Z"),
    ):
        text = text.replace(java, python)
    return re.compile(text)


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise Refused for variables that are too large together; shapes have the other limits."""
    size = sum(len(f"{key}{value}".encode()) for key, value in environment.items())
    if size > ENVIRONMENT_BYTES:
        raise Refused(f"Environment has {size} bytes; it may have {ENVIRONMENT_BYTES}")


def header_members(shape: StructureShape) -> dict[str, str]:
    """The members that travel as headers: header's name → member's."""
    return {
        member.serialization["name"]: name
        for name, member in shape.members.items()
        if member.serialization.get("location") == "header"
    }


def part(data: bytes) -> bytes:
    """An event of a response stream with some of the container's bytes."""
    return _message(
        {":event-type": "PayloadPart", ":content-type": "application/octet-stream"}, "event", data
    )


def stream_error(kind: str, **members: str) -> bytes:
    """The event that ends a response stream with an exception."""
    headers = {":exception-type": kind, ":content-type": "application/json"}
    return _message(headers, "exception", json.dumps(members).encode())


def _message(headers: Mapping[str, str], kind: str, payload: bytes) -> bytes:
    """A message in the framing of application/vnd.amazon.eventstream."""
    head = b""
    for name, value in {**headers, ":message-type": kind}.items():
        head += struct.pack(f">B{len(name)}sBH", len(name), name.encode(), 7, len(value))
        head += value.encode()
    prelude = struct.pack(">II", 16 + len(head) + len(payload), len(head))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + head + payload
    return message + struct.pack(">I", zlib.crc32(message))


def check_signature(
    key: Key, method: str, url: str, headers: Mapping[str, str], body: bytes, now: float
) -> None:
    """Raise Refused unless the request has a signature of this key's (AWS Signature Version 4).

    url: with the host that the request names. now: seconds since 1970.
    """
    authorization = headers.get("Authorization", "")
    if not authorization.startswith(_SIGNED):
        raise Refused("Missing Authentication Token", "MissingAuthenticationToken", 403)
    fields = dict(
        it.strip().partition("=")[::2] for it in authorization.removeprefix(_SIGNED).split(",")
    )
    names = fields.get("SignedHeaders", "").split(";")
    timestamp = headers.get("X-Amz-Date", "")
    said = headers.get("X-Amz-Content-SHA256", sha256(body).hexdigest())
    request = AWSRequest(
        method, url, data=body, headers={it: headers[it] for it in names if it in headers}
    )
    try:
        began = datetime.strptime(timestamp, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        began = 0
    signed = _signature(SigV4Auth, key, request, fields.get("Credential", ""), timestamp)
    whole = {"host", "x-amz-date"} <= {*names} and said == sha256(body).hexdigest()
    if not whole or not _equal(signed, fields.get("Signature", "")):
        raise Refused(
            "The request signature we calculated does not match the signature you provided. The "
            "stand-in prints the key to sign with when it starts",
            "InvalidSignatureException",
            403,
        )
    if abs(now - began) > SIGNED_S:
        raise Refused(f"Signature expired: {timestamp}", "InvalidSignatureException", 403)


def _signature(
    kind: type[SigV4Auth], key: Key, request: AWSRequest, credential: str, timestamp: str
) -> bytes:
    """The signature of a request, b"-" where its credential is not this key's. kind: of signature.
    credential: ID/date/region/service/aws4_request.
    """
    access_key, *scope = credential.split("/")
    if access_key != key.id or len(scope) != 4 or scope[2:] != ["sagemaker", "aws4_request"]:
        return b"-"
    if scope[0] != timestamp[:8]:
        return b"-"
    request.context["timestamp"] = timestamp
    request.context["payload_signing_enabled"] = True
    signer = kind(Credentials(key.id, key.secret), "sagemaker", scope[1])
    try:
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return str(signer.signature(text, request)).encode()
    except UnicodeError:  # a header that is no UTF-8
        return b"-"


def _equal(signed: bytes, said: str) -> bool:
    return hmac.compare_digest(signed, said.encode(errors="surrogateescape"))


def check_token(key: Key, authorization: str, now: float | None = None) -> None:
    """Raise Refused unless this is a bearer token as SageMaker's generator makes it, still valid,
    and signed with this key. The token is a presigned URL for CallWithBearerToken.
    """
    token = authorization.removeprefix("Bearer ")
    try:
        url = base64.b64decode(token.removeprefix(TOKEN_PREFIX), validate=True).decode()
        query = {name: values[0] for name, values in parse_qs(url.partition("?")[2]).items()}
        began = datetime.strptime(query["X-Amz-Date"], _TIME).replace(tzinfo=UTC)
        lasts = int(query["X-Amz-Expires"])
        whole = query["Action"] == "CallWithBearerToken" and query["X-Amz-Signature"]
    except (binascii.Error, ValueError, KeyError):
        whole = ""
    if not whole or token == authorization or not token.startswith(TOKEN_PREFIX):
        raise Refused(
            "The bearer token is not one of SageMaker's; sagemaker.core.token_generator makes them",
            "AccessDeniedException",
            403,
        )
    if not 0 < lasts <= TOKEN_S or began.timestamp() + lasts < (now or time.time()):
        raise Refused("The bearer token has expired", "ExpiredTokenException", 403)
    place, _, asked = url.removeprefix("https://").partition("?")
    # What the generator has added once it was signed.
    own = [it for it in asked.split("&") if not it.startswith(("X-Amz-Signature=", "Version="))]
    request = AWSRequest("POST", f"https://{place}?{'&'.join(own)}")
    credential, timestamp = query.get("X-Amz-Credential", ""), query["X-Amz-Date"]
    signed = _signature(SigV4QueryAuth, key, request, credential, timestamp)
    if not _equal(signed, query["X-Amz-Signature"]):
        raise Refused(
            "The bearer token is not signed with the key that the stand-in has printed",
            "AccessDeniedException",
            403,
        )
