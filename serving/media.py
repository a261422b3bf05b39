"""Media that requests name by URL, fetched before the engine sees them.

vLLM would fetch them itself: it follows redirects, looks at no addresses, and reaches whatever this
machine reaches, its metadata service too. It is left with `data:` URIs alone.
"""

import asyncio
import base64
import contextlib
import functools
import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import httpx

from serving.errors import BadRequest
from serving.threads import in_thread

MEDIA = 32  # media that one request may have fetched
FETCH_S = 10.0  # for one of them, from its host's name to its last byte; they are fetched at once
CONNECT_S = 3.0  # for each of a host's addresses


async def inlined(body: bytes, allowed: Collection[str], limit: int) -> bytes:
    """The JSON body of a chat or embeddings request, with the media it names by URL inside.

    allowed: hosts that media may come from, by their names in DNS, in any case. limit: bytes that
    all fetched media of the request may have. A body with nothing to fetch is returned as it came,
    and so is one that is not JSON. Raises BadRequest for media that may not or cannot be fetched.
    """
    if not _may_name_media(body):
        return body
    with _nesting():
        try:
            request = json.loads(body)  # as vLLM reads it: of two equal keys the last one counts
        except ValueError:
            return body
    if not isinstance(request, dict):
        return body
    if _has_place(request.get("mm_processor_kwargs")):
        raise BadRequest("mm_processor_kwargs may name no URLs or files", "mm_processor_kwargs")
    media = _remote(request, {name.lower() for name in allowed})
    if not media:
        return body
    budget = _Budget(limit)
    try:
        async with asyncio.TaskGroup() as tasks:
            for it in media:
                tasks.create_task(_inline(it, budget))
    except* BadRequest as group:
        failure = group.exceptions[0]
    else:
        with _nesting():
            return json.dumps(request, separators=(",", ":")).encode()
    raise failure


# Only letters and the underscore matter: an escape of anything else is in no key that is looked at.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")


def _may_name_media(body: bytes) -> bool:
    """Whether it is worth reading. Python's json takes UTF-16 and UTF-32 too."""
    return (
        b'_url"' in body
        or b'mm_processor_kwargs"' in body
        or json.detect_encoding(body) not in ("utf-8", "utf-8-sig")
        or _ESCAPED_LETTER.search(body) is not None
    )


@contextlib.contextmanager
def _nesting() -> Iterator[None]:
    # Refused here, since the engine might have more of the stack left and read it after all.
    try:
        yield
    except RecursionError:
        raise BadRequest("the body is nested too deeply", "messages") from None


def _has_place(value: Any) -> bool:
    """Whether there is a URL or a path in it.

    vLLM hands mm_processor_kwargs to the model's processor as arguments, and processors of
    transformers fetch what they find in `images`, `videos` or `audio`, or open it as a file.
    """
    left = [value]
    while left:
        it = left.pop()
        if isinstance(it, str) and "/" in it:
            return True
        if isinstance(it, dict):
            left.extend(it.values())
        elif isinstance(it, list):
            left.extend(it)
    return False


class _Media(NamedTuple):
    """One to fetch, and the key in the request that has its URL."""

    holder: dict[str, Any]
    key: str
    url: httpx.URL

    @property
    def host(self) -> str:
        return self.url.raw_host.decode("ascii")


def _remote(request: dict[str, Any], allowed: Collection[str]) -> list[_Media]:
    """The media to fetch. Raises BadRequest for one that may not be, or for too many."""
    media = []
    for holder, key in _urls(request):
        url = holder[key]
        if url and url[:5].lower() != "data:":  # vLLM's own test
            media.append(_Media(holder, key, _checked(url, allowed)))
    if len(media) > MEDIA:
        raise BadRequest(
            f"a request may name {MEDIA} media by URL, and this one has {len(media)}", "messages"
        )
    return media


def _urls(request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key that a URL may be read from, by whatever type a part says it has.

    With a uuid vLLM overlooks the type, and without both it takes what is there. `input` has the
    messages of an embeddings request, and a batch has lists of messages in its list.
    """
    for part in _parts([request.get("messages"), request.get("input")]):
        for key in ("image_url", "audio_url", "video_url"):
            value = part.get(key)
            if isinstance(value, str):
                yield part, key
            elif isinstance(value, dict) and isinstance(value.get("url"), str):
                yield value, "url"


def _parts(value: Any, depth: int = 2) -> Iterator[dict[str, Any]]:
    """The content parts of messages, which may be in so many lists in a list."""
    for it in value if isinstance(value, list) else ():
        if isinstance(it, list) and depth:
            yield from _parts(it, depth - 1)
        elif isinstance(it, dict) and isinstance(it.get("content"), list):
            yield from (part for part in it["content"] if isinstance(part, dict))


def _checked(text: str, allowed: Collection[str]) -> httpx.URL:
    try:
        url = httpx.URL(text)
        if not 0 <= (url.port or 0) < 65536:  # httpx takes any number
            raise ValueError
    except (httpx.InvalidURL, ValueError):
        raise BadRequest("a URL of media is not valid", "messages") from None
    if url.scheme not in ("http", "https"):
        raise BadRequest("media come from data:, https: and http: URLs only", "messages")
    host = url.raw_host.decode("ascii")
    if host not in allowed:
        raise BadRequest(
            f"media may not come from {host!r:.140}; OPTION_ALLOWED_MEDIA_DOMAINS names the hosts "
            "they may come from",
            "messages",
        )
    if url.userinfo:
        raise BadRequest(f"the URL of media on {host} has a user or a password in it", "messages")
    return url


class _Budget:
    """Bytes that a request's media may still have."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, size: int) -> None:
        """Raises BadRequest where too few are left."""
        self._left -= size
        if self._left < 0:
            raise BadRequest(f"the media have more than {self._limit} bytes in all", "messages")


async def _inline(media: _Media, budget: _Budget) -> None:
    host = media.host
    try:
        async with asyncio.timeout(FETCH_S):
            media.holder[media.key] = await _fetch(media, budget)
    except TimeoutError:
        raise BadRequest(f"media from {host} took longer than {FETCH_S:g} s", "messages") from None
    except (httpx.TransportError, OSError):
        raise BadRequest(f"media from {host} cannot be fetched", "messages") from None


async def _fetch(media: _Media, budget: _Budget) -> str:
    """A data: URI. Raises BadRequest, TransportError or OSError where there is none to be had."""
    addresses = await _public_addresses(media.host)
    # One transport for each: a connection of a pool would serve another host at the same address,
    # whose certificate nobody has looked at. No httpx client: it logs URLs, and heeds proxies.
    async with httpx.AsyncHTTPTransport(verify=_tls()) as transport:
        for address in addresses[:-1]:
            with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await _get(transport, media, address, budget)
        return await _get(transport, media, addresses[-1], budget)


async def _get(
    transport: httpx.AsyncHTTPTransport, media: _Media, address: str, budget: _Budget
) -> str:
    request = httpx.Request(
        "GET",
        media.url.copy_with(host=address),
        headers={
            "host": media.url.netloc.decode("ascii"),
            "user-agent": "slipway",
            "accept": "*/*",
            "accept-encoding": "identity",
        },
        extensions={"sni_hostname": media.host, "timeout": {"connect": CONNECT_S}},
    )
    response = await transport.handle_async_request(request)
    _require_content(response, media.host)
    assert isinstance(response.stream, httpx.AsyncByteStream)
    content = bytearray()
    async for part in response.stream:
        budget.take(len(part))
        content += part
    return f"data:{_content_type(response)};base64,{base64.b64encode(content).decode('ascii')}"


def _require_content(response: httpx.Response, host: str) -> None:
    status = response.status_code
    if 300 <= status < 400:
        reason = f"answers with a redirect ({status}), and redirects are not followed"
    elif status != 200:
        reason = f"answers {status}"
    elif response.headers.get("content-encoding", "identity").lower() != "identity":
        reason = "answers with compressed content, which was not asked for"
    else:
        return
    raise BadRequest(f"media cannot be fetched: {host} {reason}", "messages")


_MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+", re.ASCII)


def _content_type(response: httpx.Response) -> str:
    found = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return found if _MEDIA_TYPE.fullmatch(found) else "application/octet-stream"


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # it reads some hundred certificates


async def _public_addresses(host: str) -> list[str]:
    """The host's addresses, which are connected to without another look at its name.

    Raises BadRequest where one of them is not public, or where there is none.
    """
    try:
        addresses = await _resolve(host)
    except (OSError, UnicodeError):
        raise BadRequest(f"media cannot be fetched: {host} is not known", "messages") from None
    if not addresses or not all(map(is_public, addresses)):
        raise BadRequest(f"media may not come from {host}: its address is not public", "messages")
    return addresses


async def _resolve(host: str) -> list[str]:
    found = await in_thread(socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


# What Python 3.11 takes for public all the same.
_SPECIAL = [
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's metadata
        "192.0.0.0/24",  # protocols; one of them is Oracle's metadata
        "192.88.99.0/24",  # 6to4
        "2001::/23",  # Teredo and other protocols
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
]
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, and leads there and nowhere else.

    IPv6 addresses that have an IPv4 address in them do not count: where they lead depends on it.
    """
    it = ipaddress.ip_address(address)
    if it.version == 6 and it not in _GLOBAL_UNICAST:
        return False
    return it.is_global and not it.is_multicast and not any(it in special for special in _SPECIAL)
