# SPDX-License-Identifier: Apache-2.0
"""Tokens of a real issuer, over HTTPS, through a real server and a real router."""

import asyncio
import base64
import gzip
import json
import logging
import re
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving import follow
from serving.access import issuer as module
from serving.access import tokens
from serving.access.access import Access
from serving.access.tokens import key_set
from serving.errors import Unauthorized
from tests.certificates import certify
from tests.serving.access.test_access import SECRET, bearer, salt, written
from tests.serving.conftest import running
from tests.serving.router.conftest import routing
from tests.support.harness.wait import until_async

pytestmark = pytest.mark.anyio

AUDIENCE = "slipway"
RSA, OTHER = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()


def jwk(key, name, **more):
    """A public key, as an issuer publishes it."""
    kind = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    name_of = next((it for known, it in kind.items() if isinstance(key, known)), "EdDSA")
    made = jwt.get_algorithm_by_name(name_of).to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": name, "use": "sig", **more}


NO_DISCOVERY = (
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"issuer": ' + b"[" * 900 + b"]" * 900 + b', "jwks_uri": "https://localhost/"}',
    b'{"issuer": 7, "jwks_uri": "https://localhost/"}',
    b'{"issuer": "a", "jwks_uri": ["https://localhost/"]}',
    b'{"issuer": "a", "jwks_uri": {"a": 1}}',
    b'{"issuer": "a", "jwks_uri": 1e400}',
    b'{"issuer": "a", "jwks_uri": %b}' % (b"9" * 5000),
)
NO_KEYS = (
    (b'{"keys": %b}' % (b"[" * 100_000), "should be a JWKS"),
    (b'{"keys": {"kty": "RSA"}}', "no key for signatures"),
    (b'{"keys": [[], 1, null, {"kty": []}, {"kty": {}, "crv": []}]}', "no key for signatures"),
    (b'{"keys": [{"kty": "RSA", "alg": ["RS256"], "n": "AQ", "e": "AQAB"}]}', "no key for sign"),
    (b'{"keys": [{"kty": "RSA", "n": "%b", "e": "AQAB"}]}' % (b"x" * 900_000), "no key for sign"),
    (b'{"keys": [{"kty": "RSA", "n": "!", "e": 7}]}', "no key for signatures"),
    (b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"}]}', "no key for signatures"),
    (b'{"keys": [{"kty": "oct", "k": "AQ"}]}', "no key for signatures"),
    (b'{"keys": [%b{}]}' % (b"{}," * 1000), "more than 100 keys"),
    (b"\xef\xbb\xbf\xff", "should be a JWKS"),
)
BOMB = gzip.compress(b" " * 50_000_000)

PUBLISHED = (jwk(RSA, "rsa"), jwk(EC, "ec"), jwk(ED, "ed", alg="EdDSA"))


class Issuer:
    """An issuer that publishes keys over HTTPS."""

    def __init__(self, folder):
        self.authority = str(folder / "ca.pem")

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):  # noqa: N805
                self.asked.append(handler.path)
                content = self.answers.get(handler.path, b"")
                handler.send_response(self.status if content else 404)
                for name, value in ({"content-length": str(len(content))} | self.headers).items():
                    handler.send_header(name, value)
                handler.end_headers()
                while self.drips:
                    handler.wfile.write(b" ")
                    time.sleep(0.05)
                handler.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "own.pem", folder / "own.key")
        self._server.socket = context.wrap_socket(
            self._server.socket,
            server_side=True,
            do_handshake_on_connect=False,  # with the first read, in a thread of the connection's
        )
        self.url = f"https://localhost:{self._server.server_port}"
        self.options = {"jwt_issuer": self.url, "jwt_audience": (AUDIENCE,)}
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02])
        self._thread.start()
        self.reset()

    def reset(self):
        self.status, self.asked, self.headers, self.drips = 200, [], {}, False
        self.answers = {
            module.DISCOVERY: self.discovery(),
            "/keys": json.dumps({"keys": PUBLISHED}).encode(),
        }

    def discovery(self, **more):
        said = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", **more}
        return json.dumps(said).encode()

    def publish(self, *keys):
        self.answers["/keys"] = json.dumps({"keys": keys}).encode()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def token(self, tenant="team-a", key=RSA, algorithm="RS256", name="rsa", head=None, **claims):
        now = time.time()
        whole = {"iss": self.url, "aud": AUDIENCE, "exp": now + 600, "sub": tenant, **claims}
        said = {field: value for field, value in whole.items() if value is not None}
        headers = {**({"kid": name} if name else {}), **(head or {})}
        return jwt.encode(said, key, algorithm, headers)


@pytest.fixture(scope="module")
def shared_issuer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("issuer")
    certify(folder)
    issuer = Issuer(folder)
    yield issuer
    issuer.close()


@pytest.fixture
def issuer(shared_issuer, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", shared_issuer.authority)
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    monkeypatch.setattr(logging.getLogger("serving"), "propagate", True)
    shared_issuer.reset()
    return shared_issuer


async def status(it, token, path="/v1/completions"):
    return (await it.post(path, {"prompt": "a"}, headers=bearer(token))).status_code


async def until(it, token, code):
    await until_async(lambda: _is(it, token, code))


async def _is(it, token, code):
    return await status(it, token) == code


async def verifying(it):
    """Wait until the issuer's keys are here."""
    await until_async(lambda: it.server._access._issuer._verifier.ready)


async def test_a_token_is_as_good_as_a_key(issuer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = {"api_keys_file": written(tmp_path / "keys.json"), **issuer.options}
    async with running(**options) as it:
        await verifying(it)
        for more in (
            {},
            {"key": EC, "algorithm": "ES256", "name": "ec"},
            {"key": ED, "algorithm": "EdDSA", "name": "ed"},
            {"algorithm": "PS512"},
            {"aud": ["another", AUDIENCE]},
            {"exp": time.time() - tokens.LEEWAY_S / 2, "nbf": time.time() + tokens.LEEWAY_S / 2},
        ):
            assert await salt(it, issuer.token(**more)) == await salt(it, "team-a")
        assert await salt(it, issuer.token("team-b")) == await salt(it, "team-b")
        token = issuer.token("auth0|somebody else")
        assert await salt(it, token) != await salt(it, "team-a")
        answer = await it.post("/v1/completions", {"prompt": "a"}, headers={"x-api-key": token})
        assert answer.status_code == 200
        assert (await it.client.get("/metrics", headers=bearer(token))).status_code == 403
        facts = [it.facts for it in caplog.records if it.name == "serving.access"]
        assert facts[-1]["key"] == "jwt:auth0|somebody else"
        assert token.rpartition(".")[2] not in caplog.text


def segment(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def public_pem(key):
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, public)


def with_public_key_as_secret(issuer):
    """A token that a verifier accepts if it lets the token choose the method of verification."""
    import hashlib
    import hmac

    claims = {"iss": issuer.url, "aud": AUDIENCE, "exp": time.time() + 600, "sub": "team-a"}
    signed = f"{segment({'alg': 'HS256', 'kid': 'rsa'})}.{segment(claims)}"
    digest = hmac.new(public_pem(RSA), signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def altered(issuer):
    head, _, signature = issuer.token().split(".")
    claims = {"iss": issuer.url, "aud": AUDIENCE, "exp": time.time() + 600, "sub": "team-b"}
    return f"{head}.{segment(claims)}.{signature}"


REFUSED = {
    "expired": (lambda it: it.token(exp=time.time() - tokens.LEEWAY_S - 1), "it has expired"),
    "not yet": (lambda it: it.token(nbf=time.time() + tokens.LEEWAY_S + 60), "not valid yet"),
    "for ever": (lambda it: it.token(exp=None), r"a claim is missing \('exp'\)"),
    "no time": (lambda it: it.token(exp="tomorrow"), "a time in it is no number"),
    "at the end of time": (lambda it: it.token(exp=10**400), "a time in it is no number"),
    "another audience": (lambda it: it.token(aud="another"), "for another audience"),
    "no audience": (lambda it: it.token(aud=None), r"a claim is missing \('aud'\)"),
    "another issuer": (lambda it: it.token(iss="https://a.example"), "of another issuer"),
    "no tenant": (lambda it: it.token(sub=None), "the tenant, is missing"),
    "a tenant that is a list": (lambda it: it.token(sub=["a"]), "the tenant, is missing"),
    "a tenant in two lines": (lambda it: it.token(sub="a\nb"), "cannot be printed"),
    "alg none": (lambda it: it.token(key=None, algorithm="none"), r"\('none'\)"),
    "the public key as a secret": (with_public_key_as_secret, r"its algorithm .*\('HS256'\)"),
    "an algorithm of another key's": (lambda it: it.token(name="ec"), r"\('RS256'\)"),
    "another's signature": (lambda it: it.token(key=OTHER), "its signature"),
    "altered": (altered, "its signature"),
    "an unknown key": (
        lambda it: it.token(key=OTHER, name="o"),
        r"not one of the issuer's \('o'\)",
    ),
    "no key": (lambda it: it.token(name=None), "not one of the issuer's"),
    "a key of its own": (
        lambda it: it.token(key=OTHER, name="o", head={"jwk": jwk(OTHER, "o")}),
        r"not one of the issuer's \('o'\)",
    ),
    "critical": (lambda it: it.token(head={"crit": ["a"], "a": 1}), "malformed"),
    "huge": (lambda it: it.token(more="x" * tokens.MAX_TOKEN), "longer than 8192 bytes"),
    "nonsense": (lambda it: "a.b.c", "malformed"),
}


@pytest.fixture(scope="module")
async def checked(anyio_backend, shared_issuer):
    """A server that accepts only tokens, for tests that leave it unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", shared_issuer.authority)
        shared_issuer.reset()
        async with running(**shared_issuer.options) as it:
            await verifying(it)
            yield it


@pytest.mark.parametrize("which", REFUSED)
async def test_what_is_no_token_of_the_issuers(issuer, checked, which, caplog, monkeypatch):
    monkeypatch.setattr(module, "NOTED_S", 0.0)
    make, reason = REFUSED[which]
    token = make(issuer)
    assert await status(checked, issuer.token()) == 200
    answer = await checked.post("/v1/completions", {"prompt": "a"}, headers=bearer(token))
    plain = await checked.post("/v1/completions", {"prompt": "a"}, headers=bearer("wrong"))
    assert (answer.status_code, answer.content) == (401, plain.content)
    (record,) = [it for it in caplog.records if it.name == module.__name__]
    assert re.search(f"a token was refused: .*{reason}", record.message)
    assert not [part for part in token.split(".") if len(part) > 3 and part in caplog.text]


async def test_a_token_ends_where_it_was_verified_before(issuer):
    now = [datetime.now(UTC)]
    access = Access(Settings(**issuer.options), now=lambda: now[0])
    await access.open()
    headers = [(b"authorization", f"Bearer {issuer.token()}".encode())]
    assert access.caller(headers).tenant == "team-a"
    now[0] += timedelta(seconds=610 + tokens.LEEWAY_S)
    with pytest.raises(Unauthorized):
        access.caller(headers)
    now[0] -= timedelta(seconds=20)
    assert access.caller(headers).tenant == "team-a"


async def test_reasons_are_not_logged_without_end(issuer, caplog):
    async with running(**issuer.options) as it:
        await verifying(it)
        for n in range(20):
            assert await status(it, issuer.token(name=f"key-{n}")) == 401
        assert caplog.text.count("a token was refused") == 1


async def test_keys_are_rotated(issuer, caplog):
    caplog.set_level(logging.INFO)
    async with running(**issuer.options) as it:
        await until(it, issuer.token(), 200)
        asked = len(issuer.asked)
        issuer.publish(jwk(RSA, "rsa"), jwk(OTHER, "new"))
        new = issuer.token(key=OTHER, name="new")
        assert await status(it, new) == 401
        await until(it, new, 200)
        assert len(issuer.asked) == asked + 2  # only an unknown key causes a fetch
        assert await status(it, issuer.token()) == 200
        issuer.publish(jwk(OTHER, "new"))
        await status(it, issuer.token(name="unknown"))
        await until(it, issuer.token(), 401)
        assert "signs tokens with 'rsa', 'new'" in caplog.text


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"status": 500}, r"/\.well-known/openid-configuration answered 500"),
        ({"/keys": b'{"keys": []}'}, "no key for signatures"),
        ({"/keys": b"nothing"}, "should be a JWKS"),
        ({"/keys": b" " * (module.MAX_BYTES + 1)}, "more than 1048576 bytes"),
        ({module.DISCOVERY: b"[]"}, "should have issuer and jwks_uri"),
        *(({module.DISCOVERY: said}, "should have issuer and jwks_uri") for said in NO_DISCOVERY),
        *(({"/keys": said}, reason) for said, reason in NO_KEYS),
        (
            {"headers": {"content-encoding": "gzip"}, "/keys": BOMB},
            "should be a JWKS|UnicodeDecode|utf-8",
        ),
        ({"headers": {"location": "https://127.0.0.1/"}, "status": 302}, "answered 302"),
        ({"headers": {"content-length": "9" * 5000}}, ""),
        ({"headers": {"x-long": "x" * 200_000}}, ""),
        ({"drips": True}, "did not answer within"),
    ],
)
async def test_while_the_issuer_is_broken_the_last_good_keys_stay(
    issuer, broken, reason, caplog, monkeypatch
):
    if "drips" in broken:
        monkeypatch.setattr(module, "FETCH_S", 0.5)
    async with running(**issuer.options) as it:
        await until(it, issuer.token(), 200)
        issuer.status = broken.get("status", 200)
        issuer.headers = broken.get("headers", {})
        issuer.drips = broken.get("drips", False)
        issuer.answers |= broken
        await status(it, issuer.token(name="unknown"))
        await until_async(lambda: "the issuer's keys stay as they were" in caplog.text)
        assert re.search(reason, caplog.text)
        assert "Traceback" not in caplog.text
        assert await status(it, issuer.token()) == 200
        issuer.reset()
        await until_async(lambda: "the issuer's keys are read from" in caplog.text)


async def test_keys_are_no_longer_followed_once_cancelled(issuer, monkeypatch):
    """Even if they are wanted at the same moment."""
    monkeypatch.setattr(module, "RETRY_S", 0)
    found = module.Issuer(Settings(**issuer.options))
    await found.require()
    following = asyncio.create_task(found.follow())
    await asyncio.sleep(0.01)
    found._wanted.set()
    await asyncio.sleep(0)
    following.cancel()
    done, _ = await asyncio.wait([following], timeout=1)
    following.cancel()
    assert done


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"issuer": "https://another.example"}, "of the issuer 'https://another.example'"),
        ({"jwks_uri": "http://another.example/keys"}, "http:// is for this machine alone"),
        ({"jwks_uri": None}, "should have issuer and jwks_uri"),
    ],
)
async def test_a_start_without_the_issuers_keys(issuer, said, reason, tmp_path, monkeypatch):
    """The server waits for them and then ends, unless it can let in other callers."""
    monkeypatch.setattr(module, "START_S", 2.0)
    monkeypatch.setattr(module, "START_PAUSE_S", 0.2)
    issuer.answers[module.DISCOVERY] = issuer.discovery(**said)
    with pytest.raises(SettingsError, match=f"OPTION_JWT_ISSUER: .*{reason}"):
        await Access(Settings(**issuer.options)).require()
    assert len(issuer.asked) > 1
    options = {"api_keys_file": written(tmp_path / "keys.json"), **issuer.options}
    await Access(Settings(**options)).require()
    async with running(**options) as it:
        assert await status(it, "team-a") == 200
        assert await status(it, issuer.token()) == 503
        issuer.reset()
        await until(it, issuer.token(), 200)


async def test_an_issuer_whose_certificate_is_nobodys_is_not_believed(issuer, monkeypatch):
    monkeypatch.setattr(module, "START_S", 0.0)
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(SettingsError, match="CERTIFICATE_VERIFY_FAILED"):
        await Access(Settings(**issuer.options)).require()


async def test_keys_at_a_place_of_their_own(issuer):
    """For issuers whose name is no URL."""
    options: dict[str, Any] = {
        "jwt_issuer": "me",
        "jwt_audience": ("a", "b"),
        "jwt_tenant_claim": "team",
    }
    async with running(**options, jwt_jwks_url=f"{issuer.url}/keys") as it:
        token = issuer.token(iss="me", aud="b", team="team-a", sub=None)
        await until(it, token, 200)
        assert {*issuer.asked} == {"/keys"}
        assert await status(it, issuer.token(iss="me", aud="b")) == 401


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"jwt_issuer": "https://a.example"}, "needs OPTION_JWT_AUDIENCE"),
        ({"jwt_issuer": "me", "jwt_audience": ("a",)}, "OPTION_JWT_ISSUER='me': should be a URL"),
        ({"jwt_issuer": "http://a.example", "jwt_audience": ("a",)}, "this machine alone"),
    ],
)
def test_what_stops_the_start(options, reason):
    with pytest.raises(SettingsError, match=reason):
        Access(Settings(**options))
    with pytest.raises(SettingsError, match="OPTION_JWT_ISSUER needs OPTION_ROUTER_SECRET"):
        Access(Settings(jwt_issuer="https://a.example", jwt_audience=("a",)), routes=True)


def test_a_file_says_of_tokens_what_is_taken(tmp_path):
    (tmp_path / "keys.yaml").write_text("jwt: []")
    with pytest.raises(SettingsError, match="`jwt` needs OPTION_JWT_ISSUER"):
        Access(Settings(api_keys_file=str(tmp_path / "keys.yaml")))


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"},
        jwk(RSA, "a", use="enc"),
        jwk(RSA, "a", alg="HS256"),
        jwk(RSA, "a", alg="ES256"),
        jwk(RSA, "a", d="AQAB"),
        jwk(rsa.generate_private_key(65537, 1024), "short"),
        jwk(ec.generate_private_key(ec.SECP256K1()), "a", crv="secp256k1"),
        {**jwk(RSA, "a"), "n": "!"},
        {**jwk(EC, "a"), "x": "AQAB"},
        {**jwk(RSA, "a"), "n": 5},
        {**jwk(RSA, "a"), "alg": []},
        {**jwk(EC, "a"), "crv": []},
        {**jwk(ED, "a"), "x": None},
        "a",
    ],
)
def test_keys_that_are_not_for_signatures_or_too_weak(key):
    with pytest.raises(ValueError, match="no key for signatures"):
        key_set(json.dumps({"keys": [key]}).encode())


async def test_what_tokens_allow_is_in_the_file(issuer, tmp_path):
    file = tmp_path / "keys.json"
    rows = [
        {"tenant": "team-a", "requests_per_minute": 3, "admin": True},
        {"tenant": "team-b", "models": []},
    ]
    file.write_text(json.dumps({"jwt": rows}))
    async with running(api_keys_file=str(file), **issuer.options) as it:
        assert it.server._access._only_tokens
        await verifying(it)
        tokens = [issuer.token(jti=str(n)) for n in range(2)]
        assert [await status(it, tokens[n % 2]) for n in range(4)] == [200, 200, 200, 429]
        assert (await it.client.get("/metrics", headers=bearer(tokens[0]))).status_code == 200
        assert await status(it, issuer.token("team-b")) == 403
        assert await status(it, issuer.token("team-c")) == 403
        file.write_text(json.dumps({"jwt": [*rows, {"priority": 5}]}))
        await until(it, issuer.token("team-c"), 200)
        assert it.server._access._listed.of_token("team-c").priority == 5


async def test_a_tenant_called_admin_is_a_tenant(issuer, tmp_path):
    """Neither its files nor its caches are the operator's."""
    folder = str(tmp_path / "batches")
    async with running(**issuer.options, admin_api_key="the-operators", batch_folder=folder) as it:
        await verifying(it)
        line = b'{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"a"}}\n'
        files: Any = {"file": ("x.jsonl", line), "purpose": (None, "batch")}
        operator = bearer("the-operators")
        made = await it.client.post("/v1/files", files=files, headers=operator)
        place = f"/v1/files/{made.json()['id']}/content"
        assert (await it.client.get(place, headers=operator)).status_code == 200
        salts = set()
        for headers in (operator, *(bearer(issuer.token(it)) for it in TENANTS_LIKE_THE_OPERATORS)):
            answer = await it.post("/v1/completions", {"prompt": "a"}, headers=headers)
            assert answer.status_code == 200
            salts.add(it.engine.bodies[-1]["cache_salt"])
            if headers is not operator:
                assert (await it.client.get(place, headers=headers)).status_code == 404
                listed = await it.client.get("/v1/files", headers=headers)
                assert listed.json()["data"] == []
        assert len(salts) == 1 + len(TENANTS_LIKE_THE_OPERATORS)
        series = (await it.client.get("/metrics", headers=operator)).text
        assert 'tenant="admin"' in series
        assert "\0" not in series
        status = (await it.client.get("/ui/status", headers=operator)).text
        assert "u0000" not in status


TENANTS_LIKE_THE_OPERATORS = ["admin", "operator", "0operator", "default"]


async def test_the_router_verifies_and_replicas_hear_whose_it_is(issuer):
    async with routing(1, **issuer.options, router_secret=SECRET) as it:
        token = issuer.token("auth0|one")
        answer = await it.client.post(
            "/v1/completions", json={"prompt": "a"}, headers=bearer(token)
        )
        assert answer.status_code == 200
        heard = it.fleet[0].asked[-1].headers
        assert "authorization" not in heard
        caller = it.fleet[0].asked[-1].caller(SECRET)
        assert (caller.name, caller.tenant) == ("jwt:auth0|one", "auth0|one")
        answer = await it.client.post(
            "/v1/completions", json={"prompt": "a"}, headers=bearer(issuer.token(key=OTHER))
        )
        assert answer.status_code == 401
    assert issuer.asked == [module.DISCOVERY, "/keys"]  # once for the start
