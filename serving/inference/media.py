# SPDX-License-Identifier: Apache-2.0
"""Media in requests: fetched, measured and named before the engine sees them.

vLLM would fetch them itself: it follows redirects, looks at no addresses, and reaches whatever this
machine reaches, its metadata service too. It is left with `data:` URIs alone. It decodes whatever
it is given, so the pixels of a request have a limit. And it keeps media in caches whose key is the
part's `uuid`, or else a digest of the content; both are the same for all clients, so each part gets
a `uuid` that only the clients have that share KV caches. Where an API has no place for one, as
agents' have none, serving/engine/requests/agents.py gives it to what vLLM makes of the request.
"""

import asyncio
import base64
import contextlib
import functools
import io
import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
from PIL import Image, UnidentifiedImageError

from serving.aio import in_thread
from serving.errors import BadRequest
from serving.inference.fields import PAIRS
from serving.kv_cache.salt import scoped_name

MEDIA = 32  # media that one request may have fetched; and audio, video and embeddings it may have
PICTURES = 512  # that one request may have
PIXELS = 1 << 28  # of all its pictures: 0.8 GB as vLLM holds them. vLLM limits each to 179 million.
FETCH_S = 10.0  # for one of them, from its host's name to its last byte; they are fetched at once
CONNECT_S = 3.0  # for each of a host's addresses
ANY = "*"  # among the hosts that media may come from: every host whose addresses are public
_CONVERSATIONS = ("messages", "input")
"""Keys of the parts that media may be in, as PAIRS are: limits.py lets both have so many."""


async def prepare(
    request: Mapping[str, Any],
    allowed: Collection[str],
    limit: int,
    sharers: str | None = None,
    pairs: bool = False,
) -> None:
    """Change a request so that the engine may have its media.

    allowed: hosts that media may come from, by their names in DNS, in any case, or ANY. limit:
    bytes that all fetched media of the request may have. sharers: what the clients have in common
    that share KV caches, or None where all do. pairs: whether the engine compares texts, which have
    the media then. Raises BadRequest for media that may not or cannot be fetched, or are too many
    or too large.
    """
    arguments = request.get("mm_processor_kwargs")
    if arguments and await in_thread(_has_place, arguments):
        raise BadRequest("mm_processor_kwargs may name no URLs or files", "mm_processor_kwargs")
    parts = [
        part
        for part in _parts([request.get(key) for key in (PAIRS if pairs else _CONVERSATIONS)])
        if _is_of_messages(part) or not part.keys().isdisjoint(_OF_MEDIA)
    ]
    if not parts:
        return
    for part in filter(_is_of_messages, parts):
        _as_url(part["source"])
    _require_few(parts)
    await _fetch_all(_remote(parts, {name.lower() for name in allowed}), limit)
    await in_thread(_look_at, parts, sharers)


# Only letters and the underscore matter: an escape of anything else is in no key that is looked at.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")


def may_have_media(body: bytes) -> bool:
    """Whether a JSON body is worth preparing. Python's json takes UTF-16 and UTF-32 too."""
    return (
        b'_url"' in body
        or b'uuid"' in body
        or b'input_audio"' in body
        or b'_embeds"' in body
        or b'"source"' in body
        or b'mm_processor_kwargs"' in body
        or json.detect_encoding(body) not in ("utf-8", "utf-8-sig")
        or _ESCAPED_LETTER.search(body) is not None
    )


def _has_place(value: Any) -> bool:
    """Whether there is a URL or a path in it.

    vLLM hands mm_processor_kwargs to the model's processor as arguments, and processors of
    transformers fetch what they find in `images`, `videos` or `audio`, or open it as a file.
    """
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str) and "/" in part:
            return True
        if isinstance(part, dict):
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return False


class _Media(NamedTuple):
    """One to fetch, and the key in the request that has its URL."""

    holder: dict[str, Any]
    key: str
    url: httpx.URL

    @property
    def host(self) -> str:
        return self.url.raw_host.decode("ascii")


def _remote(parts: list[dict[str, Any]], allowed: Collection[str]) -> list[_Media]:
    """The media to fetch. Raises BadRequest for one that may not be, or for too many."""
    media = []
    for _, holder, key in _urls(parts):
        url = holder[key]
        if url and url[:5].lower() != "data:":  # vLLM's own test
            media.append(_Media(holder, key, _checked(url, allowed)))
    if len(media) > MEDIA:
        raise BadRequest(
            f"a request may name {MEDIA} media by URL, and this one has {len(media)}", "messages"
        )
    return media


def _urls(parts: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The key of each URL in a part, and what has the URL, under which key.

    Every URL that may be read counts, by whatever type the part says it has.

    With a uuid vLLM overlooks the type, and without both it takes what is there.
    """
    for part in parts:
        source = part.get("source")
        if isinstance(source, dict) and isinstance(source.get("url"), str):
            yield "image_url", source, "url"
        for key in ("image_url", "audio_url", "video_url"):
            value = part.get(key)
            if isinstance(value, str):
                yield key, part, key
            elif isinstance(value, dict) and isinstance(value.get("url"), str):
                yield key, value, "url"


def _parts(value: Any, depth: int = 2) -> Iterator[dict[str, Any]]:
    """The content parts of messages, which may be in so many lists in a list.

    `input` has the messages of an embeddings request, or the items of Responses, and a batch has
    lists of messages. What a tool has answered is in parts, too: in `output` of an item, and in
    `content` of a part in Messages.
    """
    for item in value if isinstance(value, list) else ():
        if isinstance(item, list) and depth:
            yield from _parts(item, depth - 1)
        elif isinstance(item, dict):
            output = item.get("output")
            outputs = [output] if isinstance(output, dict) else output
            for part in (*_objects(item.get("content")), *_objects(outputs)):
                yield part
                yield from _objects(part.get("content"))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _is_of_messages(part: dict[str, Any]) -> bool:
    """Whether a part is a picture as Messages have them."""
    return part.get("type") == "image" and isinstance(part.get("source"), dict)


def _as_url(source: dict[str, Any]) -> None:
    """Give a picture of Messages that came as data the data: URI that vLLM makes of it."""
    if source.get("type") != "url":
        media_type, data = source.pop("media_type", "image/jpeg"), source.pop("data", "")
        source |= {"type": "url", "url": f"data:{media_type};base64,{data}"}


# In the order in which vLLM looks for them in a part that has no type, or a uuid.
_KEYS = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "audio_url",
    "input_audio",
    "video_url",
)
_BY_TYPE = {**{key: key for key in _KEYS}, "input_image": "image_url"}
_OF_MEDIA = {*_KEYS, "uuid"}


def _look_at(parts: list[dict[str, Any]], sharers: str | None) -> None:
    """_require_pixels() and _rename(): decoding and digests of some megabytes take their time."""
    _require_pixels(parts)
    _rename(parts, sharers)


def _require_few(parts: list[dict[str, Any]]) -> None:
    """Raise BadRequest for too many media, whether they are inside or to be fetched."""
    keys = [key for part in parts for key in _KEYS if part.get(key) is not None]
    keys += ["image_url" for part in parts if isinstance(part.get("source"), dict)]
    pictures = keys.count("image_url")
    for found, most, what in (
        (pictures, PICTURES, "pictures"),
        (len(keys) - pictures, MEDIA, "pieces of audio, video and embeddings"),
    ):
        if found > most:
            raise BadRequest(
                f"a request may have {most} {what}, and this one has {found}", "messages"
            )


def _require_pixels(parts: list[dict[str, Any]]) -> None:
    """Raise BadRequest for pictures with too many pixels, by their headers: none is decoded."""
    left = PIXELS
    for name, holder, key in _urls(parts):
        kind, _, data = holder[key][5:].partition(",")
        pictures = []
        if name == "image_url":
            pictures = [data]
        elif name == "video_url" and kind.partition(";")[0].lower() == "video/jpeg":
            pictures = data.split(",")  # a video as vLLM takes it, too: a picture for each frame
        for picture in pictures:
            left -= _pixels(picture)
            if left < 0:
                raise BadRequest(
                    f"the pictures of a request may have {PIXELS} pixels in all", "messages"
                )


# As vLLM has them, in its order: the first that takes a file for its own is the one that reads it.
FORMATS = (
    *("AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF"),
    *("ICNS", "ICO", "IM", "IMT", "IPTC", "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX"),
    *("PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER", "SUN", "TGA", "TIFF", "WEBP"),
    *("XBM", "XPM", "XVTHUMB"),
)
# Their headers have the size of what is decoded. In others, such as ICO, it can be larger.
_SIZED = {"AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"}
_LARGEST = 178_956_970  # pixels that vLLM and Pillow take


def _pixels(data: str) -> int:
    """What a picture, given in base64, has when it is decoded; 0 for what vLLM will refuse."""
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        raise BadRequest(
            "the data of a picture is not base64; send the file's bytes in it", "messages"
        ) from None
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return image.width * image.height if image.format in _SIZED else _LARGEST
    except UnidentifiedImageError:
        return 0
    except Image.DecompressionBombError:
        message = f"a picture has more than {_LARGEST} pixels"
    except Exception:  # of any of Pillow's readers
        message = "a picture cannot be read; save it again, as PNG or JPEG"
    raise BadRequest(message, "messages")


def _rename(parts: list[dict[str, Any]], sharers: str | None) -> bool:
    """Give parts the uuids that the engine may know them by, and say whether any got one.

    A client's own is replaced even where all share: as a key it stands beside digests of contents,
    and one that is equal to such a digest would be another client's picture.
    """
    names = [_name(part, sharers) for part in parts]
    for part, name in zip(parts, names, strict=True):
        if name:
            part["uuid"] = name
    return any(names)


def _name(part: dict[str, Any], sharers: str | None) -> str | None:
    """The uuid that a part is to have, or None where it needs none."""
    key = _key(part)
    if (uuid := part.get("uuid")) is not None:
        return scoped_name(sharers, "uuid", key or "", str(uuid))
    if sharers is None or not key or part.get(key) is None:
        return None
    for other in _KEYS:
        if other != key:
            part.pop(other, None)  # with a uuid vLLM would take the first of several
    return scoped_name(sharers, "content", key, _content(part[key]))


def _key(part: dict[str, Any]) -> str | None:
    """The key of a part's medium, or None where vLLM takes it for no medium."""
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return next((key for key in _KEYS if key in part), None)
    return _BY_TYPE.get(kind) if isinstance(kind, str) else None


def _content(value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        return str(value["url"])
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _checked(text: str, allowed: Collection[str]) -> httpx.URL:
    try:
        url = httpx.URL(text)
        if not 0 <= (url.port or 0) < 65536:  # httpx takes any number
            raise ValueError
    except (httpx.InvalidURL, ValueError):
        raise BadRequest(
            "a URL of media is not valid; it should be like https://host/path", "messages"
        ) from None
    if url.scheme not in ("http", "https"):
        raise BadRequest("media come from data:, https: and http: URLs only", "messages")
    host = url.raw_host.decode("ascii")
    if host not in allowed and ANY not in allowed:
        raise BadRequest(
            f"media may not come from {host!r:.140}; OPTION_ALLOWED_MEDIA_DOMAINS names the hosts "
            "they may come from, or is * for every public one",
            "messages",
        )
    if url.userinfo:
        raise BadRequest(
            f"the URL of media on {host} has a user or a password in it; leave them out", "messages"
        )
    return url


async def _fetch_all(media: list[_Media], limit: int) -> None:
    """Put media where their URLs are. Raises BadRequest."""
    if not media:
        return
    budget = _Budget(limit)
    try:
        async with asyncio.TaskGroup() as tasks:
            for medium in media:
                tasks.create_task(_inline(medium, budget))
    except* BadRequest as group:
        failure = group.exceptions[0]
    else:
        return
    raise failure


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
        reason = (
            f"answers with a redirect ({status}), and redirects are not followed; send the URL "
            "that it leads to"
        )
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
        raise BadRequest(
            f"media cannot be fetched: {host} is not known; check its name", "messages"
        ) from None
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
    ip = ipaddress.ip_address(address)
    if ip.version == 6 and ip not in _GLOBAL_UNICAST:
        return False
    return ip.is_global and not ip.is_multicast and not any(ip in special for special in _SPECIAL)
