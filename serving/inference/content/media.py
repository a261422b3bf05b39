# SPDX-License-Identifier: Apache-2.0
"""Media in requests: fetched, measured and given a uuid before the engine gets them.

- vLLM would fetch media itself. It follows redirects and checks no addresses, so it reaches every
  host that this machine reaches, also its metadata service. It gets only `data:` URIs.
- vLLM decodes all media that it gets. So the pixels of a request have a limit.
- vLLM caches media. The key is the part's `uuid`, or else a digest of the content, and both are the
  same for all clients. So each part gets a `uuid` that only clients with shared KV caches have in
  common. Agents' APIs have no field for it: serving/engine/patches/frontend/media_names.py adds it
  to the parts that vLLM makes of the request.
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
from serving.inference.content.fields import PAIRS
from serving.kv_cache.salt import scoped_name

MEDIA = 32  # most media to fetch in a request; also most pieces of audio, video and embeddings
PICTURES = 512  # most pictures in a request
PIXELS = 1 << 28  # of a request's pictures: 0.8 GB in vLLM, which limits each to 179 million
FETCH_S = 10.0  # for one medium, from its host's name to its last byte; all are fetched at once
CONNECT_S = 3.0  # for each address of a host
ANY = "*"  # as a host that media may come from: every host with public addresses only
_CONVERSATIONS = ("messages", "input")
"""Keys whose parts may have media, as PAIRS may. checks.py limits the parts of both."""


async def fetch(
    request: Mapping[str, Any], allowed: Collection[str], limit: int, pairs: bool = False
) -> list[dict[str, Any]]:
    """Fetch and measure the media of a request, in place. Returns its parts with media.

    allowed: hosts that media may come from, by their DNS names, in any case, or ANY. limit: most
    bytes of all fetched media of the request. pairs: whether the engine compares texts, which then
    have the media. Raises BadRequest for media that must not or cannot be fetched, are too many or
    too large.
    """
    arguments = request.get("mm_processor_kwargs")
    if arguments and await in_thread(_has_place, arguments):
        raise BadRequest("mm_processor_kwargs must not name URLs or files", "mm_processor_kwargs")
    parts = [
        part
        for part in _parts([request.get(key) for key in (PAIRS if pairs else _CONVERSATIONS)])
        if _is_of_messages(part) or not part.keys().isdisjoint(_OF_MEDIA)
    ]
    for part in filter(_is_of_messages, parts):
        _as_url(part["source"])
    _require_few(parts)
    if parts:
        await _fetch_all(_remote(parts, {name.lower() for name in allowed}), limit)
        await in_thread(_require_pixels, parts)  # takes long for megabytes of data
    return parts


# The keys below consist of letters and the underscore, so other escapes do not matter.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")


def may_have_media(body: bytes) -> bool:
    """Whether a JSON body may have media. Python's json also accepts UTF-16 and UTF-32."""
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
    """Whether a value contains a URL or a path.

    vLLM passes mm_processor_kwargs to the model's processor as arguments. The processors of
    transformers fetch URLs in `images`, `videos` or `audio`, and open paths as files.
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
    """A medium to fetch, and the object and key in the request that have its URL."""

    holder: dict[str, Any]
    key: str
    url: httpx.URL

    @property
    def host(self) -> str:
        return self.url.raw_host.decode("ascii")


def _remote(parts: list[dict[str, Any]], allowed: Collection[str]) -> list[_Media]:
    """Return the media to fetch. Raises BadRequest for forbidden hosts, or for too many media."""
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
    """Yield the kind of each URL in the parts, the object that has the URL, and its key there.

    The type of a part is ignored, because vLLM may read each of these URLs: if a part has a uuid,
    vLLM ignores its type, and if it has neither, vLLM takes the first key that it finds.
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
    """Yield the content parts of messages, which may be nested in lists, `depth` levels deep.

    `input` has the messages of an embeddings request, or the items of Responses. A batch has lists
    of messages. The output of a tool also has parts: in `output` of an item of Responses, and in
    `content` of a part of Messages.
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
    """Whether a part is a picture in the format of Messages."""
    return part.get("type") == "image" and isinstance(part.get("source"), dict)


def _as_url(source: dict[str, Any]) -> None:
    """Replace the data of a picture of Messages by the data: URI that vLLM makes of them."""
    if source.get("type") != "url":
        media_type, data = source.pop("media_type", "image/jpeg"), source.pop("data", "")
        source |= {"type": "url", "url": f"data:{media_type};base64,{data}"}


# In vLLM's order of precedence for a part without a type, or with a uuid.
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


def _require_few(parts: list[dict[str, Any]]) -> None:
    """Raise BadRequest for too many media, whether they are inline or must be fetched."""
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
    """Raise BadRequest for pictures with too many pixels. Reads only the headers of pictures."""
    left = PIXELS
    for name, holder, key in _urls(parts):
        kind, _, data = holder[key][5:].partition(",")
        pictures = []
        if name == "image_url":
            pictures = [data]
        elif name == "video_url" and kind.partition(";")[0].lower() == "video/jpeg":
            pictures = data.split(",")  # vLLM also accepts a video as one picture for each frame
        for picture in pictures:
            left -= _pixels(picture)
            if left < 0:
                raise BadRequest(
                    f"the pictures of a request may have {PIXELS} pixels in all", "messages"
                )


# vLLM's formats, in its order: the first format that accepts a file reads it.
FORMATS = (
    *("AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF"),
    *("ICNS", "ICO", "IM", "IMT", "IPTC", "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX"),
    *("PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER", "SUN", "TGA", "TIFF", "WEBP"),
    *("XBM", "XPM", "XVTHUMB"),
)
# Their headers have the size of the decoded picture. In other formats, such as ICO, the decoded
# picture can be larger.
_SIZED = {"AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"}
_LARGEST = 178_956_970  # most pixels that vLLM and Pillow accept


def _pixels(data: str) -> int:
    """Return the pixels of a decoded picture, given in base64; 0 for a format that vLLM refuses.

    Raises BadRequest.
    """
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


async def give_uuids(parts: list[dict[str, Any]], sharers: str | None) -> None:
    """Give parts with media the uuids for the engine's caches, in place.

    sharers: the cache salt of the clients that share KV caches, or None if all clients do. A
    client's uuid is replaced even if all clients share KV caches. In vLLM's cache, uuids and
    digests of contents are keys of the same table. A uuid that is equal to such a digest would
    return another client's picture.
    """
    if sharers is None and not any("uuid" in it for it in parts):
        return
    names = await in_thread(lambda: [_name(it, sharers) for it in parts])
    for part, uuid in zip(parts, names, strict=True):
        if uuid:
            part["uuid"] = uuid


def _name(part: dict[str, Any], sharers: str | None) -> str | None:
    """Return the uuid for a part, or None if it needs none."""
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
    """Return the key of a part's medium, or None if vLLM sees no medium in it."""
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
    """Replace the URLs of media by their data. Raises BadRequest."""
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
    """The bytes that a request's media may still take."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, size: int) -> None:
        """Take bytes. Raises BadRequest if too few are left."""
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
    """Fetch a medium. Returns a data: URI. Raises BadRequest, TransportError or OSError."""
    addresses = await _public_addresses(media.host)
    # One transport for each medium: a pooled connection would also serve another host at the same
    # address, whose certificate was not checked. No httpx client: it logs URLs and uses proxies.
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
        reason = "answers with compressed content, although it was not requested"
    else:
        return
    raise BadRequest(f"media cannot be fetched: {host} {reason}", "messages")


_MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+", re.ASCII)


def _content_type(response: httpx.Response) -> str:
    found = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return found if _MEDIA_TYPE.fullmatch(found) else "application/octet-stream"


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reads more than a hundred certificates


async def _public_addresses(host: str) -> list[str]:
    """Resolve a host once. Returns its addresses, so that connecting needs no second lookup.

    Raises BadRequest if one of them is not public, or if there is none.
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


# Networks that are not public, although Python 3.11 says so.
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
    """Whether an IP address is a public one, which leads only to the internet.

    IPv6 addresses that embed an IPv4 address do not count, because they may lead to that address.
    """
    ip = ipaddress.ip_address(address)
    if ip.version == 6 and ip not in _GLOBAL_UNICAST:
        return False
    return ip.is_global and not ip.is_multicast and not any(ip in special for special in _SPECIAL)
