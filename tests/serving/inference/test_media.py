# SPDX-License-Identifier: Apache-2.0
import asyncio
import base64
import contextlib
import datetime
import io
import json
import logging
import socket
import ssl
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image

from serving.errors import BadRequest
from serving.inference.content import media
from serving.inference.content.media import is_public
from serving.protocol import ENGINE_PATHS
from tests.fake_engine import whole
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

PIXEL = b"\x89PNG and so on"
DATA = "data:image/png;base64,AAAA"


class Handler(BaseHTTPRequestHandler):
    """Answers by its path; `/at-once` waits for as many clients as a request may have media."""

    server: "Web"

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers.items())))
        what = self.path.partition("?")[0].strip("/")
        getattr(self, what.replace("-", "_"), self.pixel)()

    def answer(self, content=b"", status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def pixel(self):
        self.answer(PIXEL, Content_Type="image/png")

    def odd_type(self):
        self.answer(PIXEL, Content_Type='Image/WebP ; charset="x,y"')

    def wrong_type(self):
        self.answer(PIXEL, Content_Type="image/png,;base64")

    def no_type(self):
        self.answer(PIXEL)

    def redirect(self):
        self.answer(status=302, Location="/pixel")

    def missing(self):
        self.answer(PIXEL, status=404)

    def partial(self):
        self.answer(PIXEL, status=206)

    def packed(self):
        self.answer(PIXEL, Content_Encoding="gzip")

    def broken(self):
        self.answer(PIXEL, Content_Length="1000")

    def nonsense(self):
        self.wfile.write(b"this is not HTTP\r\n\r\n")

    def endless(self):
        self.answer()
        while True:
            self.wfile.write(bytes(1000))

    def drip(self):
        self.answer()
        while True:
            self.wfile.write(b".")
            time.sleep(0.02)

    def silent(self):
        self.server.over.wait(10)

    def at_once(self):
        self.server.barrier.wait(60)
        self.pixel()

    def handle(self):
        with contextlib.suppress(OSError):  # the client has left
            super().handle()

    def log_message(self, *args):
        pass


class Web(ThreadingHTTPServer):
    """A server with its requests, and the names that TLS connections asked for."""

    request_queue_size = 64

    def __init__(self, tls=None):
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.names: list[str] = []
        self.over, self.barrier = threading.Event(), threading.Barrier(media.MEDIA)
        super().__init__(("127.0.0.1", 0), Handler)
        self.tls = tls
        self.thread = threading.Thread(target=self.serve_forever, args=[0.01])
        self.thread.start()

    def get_request(self):
        connection, address = super().get_request()
        if self.tls:  # the handshake is left to the thread that answers
            connection = self.tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def url(self, path="pixel", host="media.test", scheme="http"):
        return f"{scheme}://{host}:{self.server_port}/{path}"

    def stop(self):
        self.over.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


@pytest.fixture(scope="module")
def server():
    web = Web()
    yield web
    web.stop()


@pytest.fixture
def web(server):
    server.asked.clear()
    return server


@pytest.fixture
def reachable(monkeypatch):
    """Every name resolves to this machine, whose address counts as public."""

    async def resolve(host):
        return ["127.0.0.1"]

    monkeypatch.setattr(media, "_resolve", resolve)
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")


def chat(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return body([{"type": "text", "text": "What is it?"}, *parts])


def body(content, **more):
    return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


def urls_in(found):
    content = json.loads(found)["messages"][0]["content"]
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def inside(content=PIXEL, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


async def prepared(request, allowed, limit, sharers=None):
    """A body as the engine gets it: the pipeline reads and prepares it in this way."""
    values = json.loads(request)
    if not media.may_have_media(request):
        return request
    before = json.dumps(values)
    await media.give_uuids(await media.fetch(values, allowed, limit), sharers)
    after = json.dumps(values)
    return request if after == before else after.encode()


async def inline(request, allowed=("media.test",), limit=10_000):
    return await prepared(request, allowed, limit)


async def refused(request, allowed=("media.test",), limit=10_000):
    with pytest.raises(BadRequest) as error:
        await prepared(request, allowed, limit)
    assert error.value.parameter == "messages"
    assert "secret" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "request_body",
    [
        chat(DATA),
        chat(DATA.replace("data", "DATA"), DATA),
        body("no parts at all"),
        body("a text with \"image_url\": 'http://other.test/'"),
        body([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
        body([{"type": "image_url", "image_url": {"url": ""}}]),
        body([{"type": "image_url", "image_url": None, "uuid": None}]),
        body("x", tools=[{"function": {"name": "f", "parameters": {"image_url": "http://a/"}}}]),
        body("Gr\u00fc\u00dfe"),  # json.dumps escapes these, and keys do not contain them
        body("x", mm_processor_kwargs={"size": {"shortest_edge": 10}, "device": "cuda:0"}),
    ],
)
async def test_what_names_nothing_to_fetch_is_returned_as_it_came(request_body):
    assert await prepared(request_body, [], 0) is request_body


def test_most_bodies_are_not_looked_at():
    assert not media.may_have_media(body("hello \u2013 \u00e9 <b>"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "URL", "detail": "low"}},
        {"type": "image_url", "image_url": "URL"},
        {"image_url": "URL"},
        {"image_url": {"url": "URL"}},
        {"type": "input_image", "image_url": "URL"},
        {"type": "text", "text": "it lies", "image_url": {"url": "URL"}},
        {"type": "audio_url", "image_url": {"url": "URL"}, "uuid": None},
        {"type": "audio_url", "audio_url": {"url": "URL"}},
        {"audio_url": "URL"},
        {"type": "video_url", "video_url": {"url": "URL"}},
        {"type": 1, "video_url": "URL"},
    ],
)
async def test_a_url_is_replaced_wherever_one_may_be_read(web, reachable, part):
    content = json.dumps([part]).replace("URL", web.url())
    found = json.loads(await inline(body(json.loads(content), model="m", n=10**30)))
    assert found["messages"][0]["content"] == json.loads(content.replace(web.url(), inside()))
    assert (found["model"], found["n"]) == ("m", 10**30)


async def test_messages_of_every_role_and_of_batches_and_inputs_are_looked_through(web, reachable):
    part = {"image_url": web.url()}
    roles = ("system", "assistant", "tool", "developer", "whatever")
    messages = [{"role": role, "content": [part]} for role in roles]
    for key in ("messages", "input"):
        for value in (messages, [messages, messages]):
            found = await inline(json.dumps({key: value}).encode())
            assert web.url() not in found.decode()


async def test_what_is_sent(web, reachable):
    await inline(chat(web.url("pixel?a=%20b&c=d#fragment")))
    [(path, headers)] = web.asked
    assert path == "/pixel?a=%20b&c=d"
    assert headers.pop("user-agent")
    expected = f"media.test:{web.server_port}"
    assert headers == {"host": expected, "accept": "*/*", "accept-encoding": "identity"}


async def test_proxies_of_the_environment_are_not_asked(web, reachable, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert urls_in(await inline(chat(web.url()))) == [inside()]


async def test_nothing_is_logged_of_urls(web, reachable, caplog):
    caplog.set_level(logging.DEBUG)
    await inline(chat(web.url("pixel?token=secret")))
    await refused(chat(web.url("missing?token=secret")))
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("odd-type", "image/webp"),
        ("wrong-type", "application/octet-stream"),
        ("no-type", "application/octet-stream"),
    ],
)
async def test_the_content_type_is_the_answers(web, reachable, path, kind):
    assert urls_in(await inline(chat(web.url(path)))) == [inside(kind=kind)]


@pytest.mark.parametrize("url", ["HTTP://media.test:{}/pixel", "http://MEDIA.Test:{}/pixel"])
async def test_schemes_and_hosts_in_any_case(web, reachable, url):
    found = await inline(chat(url.format(web.server_port)), ["Media.TEST"])
    assert urls_in(found) == [inside()]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://other.test/?secret", "other.test"),
        ("https://sub.media.test/", "sub.media.test"),
        ("http://media.test./", "media.test."),
        ("http://media.test@other.test/", "other.test"),
        ("http://media.test:secret@other.test/", "other.test"),
        ("http://media.test\\@other.test/", "other.test"),
        ("http://media%2etest/", "media%2etest"),
        ("http://169.254.169.254/latest/secret", "169.254.169.254"),
        ("http://2130706433/", "2130706433"),
        ("http://0x7f000001:80/", "0x7f000001"),
        ("http://[::ffff:127.0.0.1]:8080/", "::ffff:127.0.0.1"),
        ("http://m\u00e9dia.test/", "xn--mdia-bpa.test"),
        ("http:///secret", ""),
    ],
)
async def test_hosts_that_are_not_named_are_refused(url, host):
    message = await refused(chat(url))
    assert f"from {host!r};" in message
    assert "OPTION_ALLOWED_MEDIA_DOMAINS" in message


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/secret",
        "FILE://media.test/secret",
        "ftp://media.test/secret",
        "//media.test/secret",
        "media.test/secret",
        "/etc/secret",
        " http://media.test/secret",
        " data:secret",
        "s3://media.test/secret",
        "httpx://media.test/secret",
        "unix:/secret",
    ],
)
async def test_other_schemes_are_refused(url):
    assert "data:, https: and http: URLs only" in await refused(chat(DATA, url))


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://media.test:secret/",
        "http://media.test:8a/secret",
        "http://media.test:65536/secret",
        "http://media.test:-1/secret",
        "http://media.test/\r\nsecret",
        "http://media.test/\ud800secret",
        "http://media.test/" + "secret" * 20_000,
    ],
)
async def test_what_is_no_url_is_refused(url):
    assert "not valid" in await refused(chat(url))


async def test_users_in_urls_are_refused(web, reachable):
    url = web.url(host="me:secret@media.test")
    assert "media.test has a user or a password" in await refused(chat(url))
    assert not web.asked


@pytest.mark.parametrize("port", [0, 1])
async def test_ports_where_nobody_is(reachable, port):
    assert "media.test cannot be fetched" in await refused(chat(f"http://media.test:{port}/"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("redirect", "media.test answers with a redirect (302)"),
        ("missing", "media.test answers 404"),
        ("partial", "media.test answers 206"),
        ("packed", "media.test answers with compressed content"),
        ("broken", "from media.test cannot be fetched"),
        ("nonsense", "from media.test cannot be fetched"),
        ("endless", "more than 10000 bytes"),
    ],
)
async def test_answers_that_will_not_do(web, reachable, path, reason):
    assert reason in await refused(chat(web.url(f"{path}?secret")))
    assert len(web.asked) == 1


@pytest.mark.parametrize("path", ["silent", "drip"])
async def test_slow_servers(web, reachable, monkeypatch, path):
    monkeypatch.setattr(media, "FETCH_S", 0.2)
    started = time.monotonic()
    assert "media.test took longer than 0.2 s" in await refused(chat(web.url(path)))
    assert time.monotonic() - started < 10  # it sends nothing, or a few bytes, without an end


async def test_a_slow_name_server(reachable, monkeypatch):
    async def resolve(host):
        await asyncio.sleep(10)

    monkeypatch.setattr(media, "_resolve", resolve)
    monkeypatch.setattr(media, "FETCH_S", 0.1)
    assert "took longer" in await refused(chat("http://media.test/"))


async def test_the_limit_is_for_all_media_together(web, reachable):
    request = chat(web.url(), web.url())
    assert urls_in(await inline(request, limit=2 * len(PIXEL))) == [inside(), inside()]
    limit = 2 * len(PIXEL) - 1
    assert f"more than {limit} bytes in all" in await refused(request, limit=limit)


async def test_many_are_fetched_at_once(web, reachable):
    found = await inline(chat(DATA, *[web.url("at-once")] * media.MEDIA, DATA))
    assert urls_in(found) == [DATA, *[inside()] * media.MEDIA, DATA]


async def test_one_too_many(web, reachable):
    request = chat(*[web.url()] * (media.MEDIA + 1))
    assert "32 media by URL, and this one has 33" in await refused(request)
    assert not web.asked


async def test_one_refused_url_prevents_every_fetch(web, reachable):
    await refused(chat(web.url(), "http://other.test/"))
    assert not web.asked


async def test_one_failure_ends_the_others(web, reachable):
    started = time.monotonic()
    assert "404" in await refused(chat(web.url("silent"), web.url("missing"), web.url("silent")))
    assert time.monotonic() - started < media.FETCH_S


async def test_a_client_that_leaves_ends_the_fetching(web, reachable):
    task = asyncio.create_task(inline(chat(web.url("silent"))))
    while not web.asked:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:{}/"),
        ("127.0.0.1", "http://127.0.0.1:{}/"),
        ("127.0.0.1.", "http://127.0.0.1.:{}/"),
        ("127.1", "http://127.1:{}/"),
        ("0", "http://0:{}/"),
        ("2130706433", "http://2130706433:{}/"),
        ("0x7f000001", "http://0x7f000001:{}/"),
        ("017700000001", "http://017700000001:{}/"),
        ("::1", "http://[::1]:{}/"),
        ("::ffff:127.0.0.1", "http://[::ffff:127.0.0.1]:{}/"),
        ("::ffff:7f00:1", "http://[::ffff:7f00:1]:{}/"),
        ("10.0.0.1", "http://10.0.0.1:{}/"),
        ("169.254.169.254", "http://169.254.169.254:{}/"),
        ("fd00:ec2::254", "http://[fd00:ec2::254]:{}/"),
    ],
)
async def test_hosts_that_lead_inside_are_refused_although_they_are_named(web, host, url):
    for allowed in (host, "*"):
        message = await refused(chat(url.format(web.server_port)), [allowed])
        assert "not public" in message or "not known" in message
    assert not web.asked


async def test_every_public_host_may_be_allowed(web, reachable):
    assert urls_in(await inline(chat(web.url()), ["other.test", "*"])) == [inside()]
    assert "data:, https: and http: URLs only" in await refused(chat("file:///etc/secret"), ["*"])
    assert "a user or a password" in await refused(chat("http://me:secret@media.test/"), ["*"])
    redirect = "answers with a redirect (302), and redirects are not followed"
    assert redirect in await refused(chat(web.url("redirect")), ["*"])


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["8.8.8.8", "10.1.2.3"],
        ["2606:4700::1", "fe80::1%lo"],
        ["0.0.0.0"],
    ],
)
async def test_names_that_lead_inside_are_refused(monkeypatch, addresses):
    def getaddrinfo(host, *_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, 0)) for it in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for allowed in ("media.test", "*"):
        message = await refused(chat("http://media.test/"), [allowed])
        assert "media.test: its address is not public" in message


async def test_names_that_are_not_known(monkeypatch):
    def getaddrinfo(*_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert "media.test is not known" in await refused(chat("http://media.test/?secret"))


async def test_a_name_is_looked_up_once_and_that_address_connected_to(web, monkeypatch):
    answers = iter([["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1"]])

    async def resolve(host):
        return next(answers)

    monkeypatch.setattr(media, "_resolve", resolve)
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")
    assert urls_in(await inline(chat(web.url()))) == [inside()]
    assert next(answers) == ["169.254.169.254"]
    assert "not public" in await refused(chat(web.url()))


async def test_the_next_address_is_tried_where_one_does_not_answer(web, monkeypatch):
    async def resolve(host):
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr(media, "_resolve", resolve)
    monkeypatch.setattr(media, "is_public", lambda address: True)
    assert urls_in(await inline(chat(web.url()))) == [inside()]


PUBLIC = ["8.8.8.8", "52.216.0.1", "100.128.0.1", "172.32.0.1", "2606:4700::1", "2a00:1450::8a"]
INSIDE = [
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.1"),
    *("168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255"),
    *("192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1"),
    *("3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1"),
    "ff02::1",
]


def test_public_addresses():
    assert [it for it in PUBLIC if not is_public(it)] == []
    assert [it for it in INSIDE if is_public(it)] == []


@pytest.mark.parametrize(
    "request_body",
    [
        b'{"messages": {"image_url": "http://other.test/"}}',
        b'{"messages": ["image_url", 1, null, [[[{"content": [{"image_url": "ftp:"}]}]]]]}',
        b'{"messages": [{"content": {"image_url": "http://other.test/"}}]}',
        b'{"messages": [{"content": [["image_url"], "image_url", 1, null]}]}',
        b'{"messages": [{"content": [{"image_url": 1}, {"image_url": ["http://other.test/"]}]}]}',
        b'{"messages": [{"content": [{"image_url": {"url": {"url": "http://other.test/"}}}]}]}',
    ],
)
async def test_what_is_malformed_otherwise_is_left_to_the_engine(request_body):
    assert await inline(request_body) is request_body


async def test_nesting_without_end_is_refused(shared_by_all):
    depth = 100_000
    request = b'{"messages":[],"image_url":' + b"[" * depth + b"]" * depth + b"}"
    answer = await shared_by_all.post("/v1/chat/completions", request)
    assert answer.status_code == 400
    assert "nested too deeply" in answer.text


@pytest.mark.parametrize(
    "request_text",
    [
        '{"messages":[{"content":[{"image\\u005furl":%s}]}]}',
        '{"messages":[{"content":[{"image_ur\\u006C":%s}]}]}',
        '{"messages":[{"content":[{"image_url":{"\\u0075rl":%s}}]}]}',
        '{"\\u006d\\u0065ssages":[{"\\u0063ontent":[{"\\u0069mage\\u005F\\u0075rl":%s}]}]}',
        '{"messages":[],"messages":[{"content":[{"image_url":%s}]}]}',
        '{"messages":[{"content":"","content":[{"image_url":"data:,","image_url":%s}]}]}',
        '{"messages":[{"content":[{"image_url":{"url":"data:,","url":%s}}]}]}',
        '{"n":NaN,"messages":[{"content":[{"image_url":%s}]}]}',
        '{"s":"\\ud800","messages":[{"content":[{"image_url":%s}]}]}',
    ],
)
async def test_json_of_every_kind_is_read_as_vllm_reads_it(request_text):
    request = request_text % '"http://other.test/"'
    assert "'other.test'" in await refused(request.encode())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_other_encodings_are_read_too(web, reachable, encoding):
    request = chat("http://other.test/").decode().encode(encoding)
    assert "'other.test'" in await refused(request)
    request = chat(web.url()).decode().encode(encoding)
    assert urls_in(await inline(request)) == [inside()]
    request = chat(DATA).decode().encode(encoding)
    assert await inline(request) is request


async def test_the_last_of_two_equal_keys_counts(web, reachable):
    request = '{"messages":[{"content":[{"image_url":"http://other.test/","image_url":"URL"}]}]}'
    found = await inline(request.replace("URL", web.url()).encode())
    assert json.loads(found)["messages"][0]["content"] == [{"image_url": inside()}]
    assert b"other.test" not in found


async def test_the_rest_of_a_body_is_kept(web, reachable):
    more = '"a":1e999,"b":-0.0,"c":"\\ud800 \u00fc \\u0000","d":123456789012345678901234567890,'
    part = '"messages":[{"content":[{"image_url":"%s"}]}]'
    request = ("{" + more + part + "}") % web.url()
    found = await inline(request.encode())
    assert repr(json.loads(found)) == repr(json.loads(request.replace(web.url(), inside())))


@pytest.mark.parametrize(
    "value",
    [
        '{"videos": "http://169.254.169.254/"}',
        '{"images": ["https://media.test/"]}',
        '{"audio": "/etc/passwd"}',
        '{"images_kwargs": {"x": [[{"y": "file:///etc/passwd"}]]}}',
    ],
)
@pytest.mark.parametrize("key", ["mm_processor_kwargs", "mm\\u005fprocessor_kwargs"])
async def test_places_in_the_processors_arguments_are_refused(key, value):
    request = f'{{"{key}": {value}, "messages": []}}'
    with pytest.raises(BadRequest, match="must not name URLs or files") as error:
        await inline(request.encode())
    assert error.value.parameter == "mm_processor_kwargs"


def certified(folder, name):
    """A certificate for a host, signed by a separate authority: their files, and the
    authority's.
    """
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def certificate(subject, key, authority):
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        subject_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
        builder = x509.CertificateBuilder(issuer, subject_name, key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        if not authority:
            names = x509.SubjectAlternativeName([x509.DNSName(subject)])
            builder = builder.add_extension(names, critical=False)
        signed = builder.sign(keys[0], hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    (folder / "authority.pem").write_bytes(certificate("authority", keys[0], True))
    private = keys[1].private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "host.pem").write_bytes(private + certificate(name, keys[1], False))
    return folder


@pytest.fixture
def secure(tmp_path, monkeypatch):
    """A server with a certificate for media.test. It records the names that clients ask for."""
    folder = certified(tmp_path, "media.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "authority.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "host.pem")
    web = Web(context)
    context.sni_callback = lambda connection, name, _: web.names.append(name)
    media._tls.cache_clear()
    yield web
    media._tls.cache_clear()
    web.stop()


async def test_certificates_are_checked_by_name(secure, reachable):
    url = secure.url(scheme="https")
    assert urls_in(await inline(chat(url))) == [inside()]
    assert secure.names == ["media.test"]
    assert secure.asked[0][1]["host"] == f"media.test:{secure.server_port}"
    url = secure.url(scheme="https", host="other.test")
    assert "other.test cannot be fetched" in await refused(chat(url), ["other.test"])
    assert len(secure.asked) == 1


async def test_certificates_of_unknown_authorities_are_refused(secure, reachable, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    url = secure.url(scheme="https")
    assert "media.test cannot be fetched" in await refused(chat(url))
    assert not secure.asked


def with_media(*parts, **more):
    return {"messages": [{"role": "user", "content": [*parts]}], **more}


async def given(served, parts, tenant=None, **more):
    """The parts that the engine got."""
    headers = {} if tenant is None else {"X-Tenant": tenant}
    answer = await served.invoke(
        with_media(*parts, {"type": "text", "text": "a"}, **more), headers=headers
    )
    assert answer.status_code == 200, answer.text
    return [part for part in got(served)["messages"][0]["content"] if part["type"] != "text"]


def got(served):
    return served.engine.bodies[-1]


@pytest.fixture
async def tenants(anyio_backend):
    async with running(cache_salt_header="X-Tenant", max_request_size=64 << 20) as served:
        yield eat_parts(served)


@pytest.fixture
async def shared_by_all(anyio_backend):
    async with running(max_request_size=64 << 20) as served:
        yield eat_parts(served)


def eat_parts(served):
    """A fake engine that keeps its requests; the standard one answers only texts."""

    def keep(call):
        served.engine.bodies.append(call.request)
        return {"choices": []}

    served.engine.answers = dict.fromkeys(ENGINE_PATHS, whole(keep))
    return served


WITH_UUID: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DATA}},
    {"type": "image_url", "image_url": None},
    {"type": "image_url"},
    {"type": "input_image", "image_url": DATA},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "input_audio", "input_audio": None},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "audio_embeds", "audio_embeds": None},
    {"type": "video_embeds", "video_embeds": {"a": "AAAA"}},
    {"type": "image_pil", "image_pil": None},
]


@pytest.mark.parametrize("part", WITH_UUID)
async def test_a_uuid_is_its_senders_own(tenants, part):
    """It is the key of the engine's media caches, which ignore cache_salt."""
    named = {**part, "uuid": "invoice-1"}
    seen = [
        (await given(tenants, [named], tenant, **more))[0]
        for tenant in ("a", "b", None)
        for more in ({}, {"cache_salt": "mine"})
    ]
    assert len({it["uuid"] for it in seen}) == 6
    assert "invoice-1" not in json.dumps(seen)
    for it in seen:
        assert {**it, "uuid": 0} == {**part, "uuid": 0}
    again = await given(tenants, [named, {**part, "uuid": "invoice-2"}], "a")
    assert again[0] == seen[0] != again[1]


async def test_a_uuid_that_all_share_is_no_digest_of_a_content(shared_by_all):
    """In the engine, it would identify the content with this digest."""
    digest = "5" * 64
    [part] = await given(shared_by_all, [{"type": "image_url", "image_url": None, "uuid": digest}])
    assert part["uuid"] != digest
    [number] = await given(shared_by_all, [{"type": "image_url", "image_url": None, "uuid": 5}])
    assert isinstance(number["uuid"], str)


@pytest.mark.parametrize(
    "part", [it for it in WITH_UUID if any(it[key] for key in it if key != "type")]
)
async def test_media_without_a_uuid_get_one_where_not_all_share(tenants, shared_by_all, part):
    [a] = await given(tenants, [part], "a")
    [again] = await given(tenants, [part], "a")
    [b] = await given(tenants, [part], "b")
    assert a == again != b
    assert a.keys() == b.keys() == part.keys() | {"uuid"}
    [alone] = await given(shared_by_all, [part])
    assert alone == part
    [salted] = await given(shared_by_all, [part], cache_salt="mine")
    assert salted["uuid"] not in (a["uuid"], b["uuid"])


async def test_a_uuid_changes_nothing_of_how_a_part_is_read(tenants):
    parts = [
        {
            "type": "video_url",
            "video_url": {"url": "data:video/mp4;base64,AAAA"},
            "image_url": None,
        },
        {"type": "text", "text": "b", "image_url": DATA},
    ]
    [video] = await given(tenants, parts, "a")
    assert video.keys() == {"type", "video_url", "uuid"}
    assert "uuid" not in got(tenants)["messages"][0]["content"][1]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side):
    """An empty PNG: its file is small, whatever its decoded size."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    data = b"".join([packer.compress(row) for _ in range(side)] + [packer.flush()])
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def drawn(kind, side):
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, kind)
    return file.getvalue()


def picture(content, kind="image/png"):
    return {"type": "image_url", "image_url": {"url": inside(content, kind)}}


async def told(served, *parts):
    """The error for media that the engine did not get."""
    served.engine.bodies.clear()
    answer = await served.post("/v1/chat/completions", with_media(*parts))
    assert answer.status_code == 400, answer.text
    assert served.engine.bodies == []
    return answer.json()["error"]["message"]


async def test_the_pixels_of_all_pictures_together_have_a_limit(shared_by_all):
    side = 9000
    large = png(side)
    most = media.PIXELS // side**2
    assert len(large) < 20_000
    await given(shared_by_all, [picture(large)] * most)
    assert f"may have {media.PIXELS} pixels" in await told(
        shared_by_all, *[picture(large)] * (most + 1)
    )
    url = {"url": inside(large)}
    for part in (
        {"image_url": url},
        {"type": "input_image", "image_url": inside(large, "text/plain")},
        {"type": "text", "text": "it lies", "image_url": url},
        {"type": "image_url", "image_url": {"url": inside(large).replace("data:", "DATA:")}},
        {"type": "image_url", "image_url": url, "uuid": "1"},
    ):
        assert "pixels" in await told(shared_by_all, *[part] * (most + 1))
    frames = ",".join([base64.b64encode(large).decode()] * (most + 1))
    video = {"type": "video_url", "video_url": {"url": f"data:Video/JPEG;base64,{frames}"}}
    assert "pixels" in await told(shared_by_all, video)


async def test_the_size_of_some_formats_is_not_believed(shared_by_all):
    """An icon's file may declare 16 x 16 for a picture of any size: one icon is accepted, and two
    are refused.
    """
    icon = picture(drawn("ICO", 16), "image/x-icon")
    await given(shared_by_all, [icon])
    assert "pixels" in await told(shared_by_all, icon, icon)


async def test_a_picture_that_pillow_would_not_open_is_refused(shared_by_all):
    assert "more than 178956970 pixels" in await told(shared_by_all, picture(png(13_500)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
async def test_usual_pictures_pass(shared_by_all, kind):
    await given(shared_by_all, [picture(drawn(kind, 640), f"image/{kind.lower()}")] * 20)


async def test_a_large_photograph_and_many_frames_pass(shared_by_all):
    photo = drawn("JPEG", 64) + bytes(20 << 20)  # a JPEG may have any bytes after its end
    await given(shared_by_all, [picture(photo, "image/jpeg")])
    frame = picture(drawn("JPEG", 256), "image/jpeg")
    await given(shared_by_all, [frame] * 200)


@pytest.mark.parametrize("data", ["%%%", "AA\nAA", "A", "\u00e9"])
async def test_what_is_not_base64_is_refused(shared_by_all, data):
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    assert "not base64" in await told(shared_by_all, part)


async def test_the_number_of_media_has_a_limit_wherever_they_come_from(shared_by_all):
    small = picture(b"no picture")
    await given(shared_by_all, [small] * media.PICTURES)
    assert f"may have {media.PICTURES} pictures" in await told(
        shared_by_all, *[small] * (media.PICTURES + 1)
    )
    for sound in (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ):
        await given(shared_by_all, [sound] * media.MEDIA)
        assert f"may have {media.MEDIA} pieces" in await told(
            shared_by_all, *[sound] * (media.MEDIA + 1)
        )


def of_messages(**source):
    return [{"role": "user", "content": [{"type": "image", "source": source}]}]


def of_a_tool(**source):
    content = [{"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    return [{"role": "user", "content": [result]}]


@pytest.mark.parametrize("messages", [of_messages, of_a_tool])
async def test_pictures_of_messages_are_looked_at(messages, web, reachable):
    """Anthropic's API has different names for them than OpenAI's."""

    def body(**source):
        return json.dumps({"messages": messages(**source)}).encode()

    with pytest.raises(BadRequest, match=r"media may not come from 'other\.test'"):
        await prepared(body(type="url", url="http://other.test/"), {"media.test"}, 1000)
    bomb = base64.b64encode(png(20_000)).decode()
    with pytest.raises(BadRequest, match="pixels"):
        await prepared(body(type="base64", media_type="image/png", data=bomb), (), 1000)
    with pytest.raises(BadRequest, match="not base64"):
        await prepared(body(type="base64", media_type="image/png,AAAA", data=bomb), (), 1000)
    url = f"http://media.test:{web.server_port}/pixel"
    found = json.loads(await prepared(body(type="url", url=url), {"media.test"}, 1000))
    fetched = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert found["messages"] == messages(type="url", url=fetched)


def of_responses(url):
    return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}


def of_a_function(url):
    output = [{"type": "input_image", "image_url": url}]
    return {"type": "function_call_output", "call_id": "1", "output": output}


def of_a_computer(url):
    output = {"type": "computer_screenshot", "image_url": url}
    return {"type": "computer_call_output", "call_id": "1", "output": output}


@pytest.mark.parametrize("item", [of_responses, of_a_function, of_a_computer])
async def test_pictures_of_responses_are_looked_at(item):
    for url in ("http://other.test/", "file:///etc/passwd"):
        with pytest.raises(BadRequest, match="media"):
            await prepared(json.dumps({"input": [item(url)]}).encode(), {"media.test"}, 1000)
