# SPDX-License-Identifier: Apache-2.0
"""Stateful sessions, through the server and directly."""

import asyncio
import os
import re
import stat
import threading

import pytest

from serving.api import session_store as module
from serving.api.session_store import SessionStore
from serving.errors import BadRequest
from tests.serving.conftest import running

pytestmark = pytest.mark.anyio

NAME = "X-Amzn-SageMaker-Session-Id"
NEW = {"requestType": "NEW_SESSION"}
ID = r"[0-9a-f-]{36}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sessions") / "own"


@pytest.fixture(scope="module")
async def kept(anyio_backend, folder):
    async with running(sessions_path=str(folder)) as it:
        await create(it)
        yield it


async def create(served):
    answer = await served.invoke(NEW, headers={NAME: "NEW_SESSION"})
    (session,) = re.findall(rf"^Session ({ID}) created$", answer.json()["result"])
    return session, answer


async def test_begun_used_and_closed(kept):
    session, answer = await create(kept)
    for name in (NAME, "X-Amzn-SageMaker-New-Session-Id"):
        pattern = rf"{session}; Expires=\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        assert re.fullmatch(pattern, answer.headers[name])
    answer = await kept.invoke({"inputs": "a"}, headers={NAME: session})
    assert (answer.status_code, NAME in answer.headers) == (200, False)
    answer = await kept.invoke({"requestType": "CLOSE"}, headers={NAME: session})
    assert answer.json() == {"result": f"Session {session} closed"}
    assert answer.headers["X-Amzn-SageMaker-Closed-Session-Id"] == session
    for path in ("/invocations", "/v1/completions"):
        answer = await kept.post(path, {"prompt": "a"}, headers={NAME: session})
        assert answer.status_code == (424 if path == "/invocations" else 400)
        assert f"session not found: '{session}'" in answer.text


async def test_a_request_may_begin_one(kept):
    answer = await kept.invoke({"inputs": "a b"}, headers={NAME: "NEW_SESSION"})
    assert answer.json() == {"generated_text": "b a"}
    session = answer.headers[NAME].partition(";")[0]
    assert (await kept.invoke({"inputs": "a"}, headers={NAME: session})).status_code == 200


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@pytest.mark.parametrize("body", [b"{", b'{"prompt": "refuse"}', b'{"prompt": "break"}'])
async def test_a_request_that_is_not_answered_begins_none(kept, folder, path, body):
    before = sorted(folder.iterdir())
    answer = await kept.post(path, body, headers={NAME: "NEW_SESSION"})
    assert answer.status_code >= 400
    assert not [name for name in answer.headers if "session" in name]
    assert sorted(folder.iterdir()) == before


async def test_a_folder_that_hangs_holds_up_no_stream(tmp_path, monkeypatch):
    """The folder may be on a network."""
    hangs, opens = threading.Event(), os.open

    def slow(path, *more, **others):
        if os.fspath(path).startswith(str(tmp_path)) and hangs.is_set():
            released.wait(20)
        return opens(path, *more, **others)

    released = threading.Event()
    monkeypatch.setattr(module, "ANSWERS_S", 0.3)
    monkeypatch.setattr(os, "open", slow)
    async with running(sessions_path=str(tmp_path / "s")) as served:
        session, _ = await create(served)
        hangs.set()
        try:
            waiting = asyncio.create_task(served.invoke({"inputs": "a"}, headers={NAME: session}))
            answer = await asyncio.wait_for(served.invoke({"inputs": "a", "stream": True}), 15)
            assert answer.status_code == 200
            assert (await waiting).status_code == 200  # from memory
            unknown = "00000000-0000-4000-8000-000000000000"
            answer = await served.invoke({"inputs": "a"}, headers={NAME: unknown})
            assert answer.status_code == 503
        finally:
            released.set()


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [
        ({"requestType": "CLOSE"}, {}, "should name the session to close"),
        ({"requestType": "OPEN"}, {}, "it should be NEW_SESSION or CLOSE"),
        ({"requestType": "CLOSE"}, {NAME: "../../etc"}, "session not found: '../../etc'"),
        ({"inputs": "a"}, {NAME: "0" * 36}, "session not found"),
    ],
)
async def test_bad_ones(kept, body, headers, told):
    answer = await kept.invoke(body, headers=headers)
    assert answer.status_code == 424
    assert told in answer.json()["error"]


@pytest.mark.parametrize(
    "session",
    [
        b"../../../etc/passwd",
        b"/etc/passwd",
        b"%2e%2e%2fetc",
        b"a" * 5000,
        b"\xff\xfe",
        "é".encode(),
        b"new_session",
        b"NEW_SESSION\tx",
        b"0000000G-0000-4000-8000-000000000000",
        b"00000000-0000-4000-8000-000000000000/../x",
    ],
)
@pytest.mark.parametrize("body", [{"requestType": "CLOSE"}, {"inputs": "a"}])
async def test_what_is_no_id_reaches_no_file_and_no_header(kept, folder, session, body):
    before = sorted(folder.iterdir())
    answer = await kept.invoke(body, headers=[(NAME.encode(), session)])
    assert answer.status_code == 424
    assert "session not found" in answer.json()["error"]
    assert len(answer.text) < 500
    assert not [name for name in answer.headers if "session" in name]
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("end", [b"\r\nX-Evil: 1", b"\rX-Evil: 1", b"\nX-Evil: 1", b"\x00"])
async def test_line_ends_in_ids_end_no_answers_header(kept, end):
    host, port = kept.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"requestType": "CLOSE"}'
    head = b"POST /invocations HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n"
    writer.write(head % len(body) + NAME.encode() + b": abc" + end + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] in (b"400", b"424")
    assert b"x-evil" not in answer.partition(b"\r\n\r\n")[0].lower()


async def test_switched_off_nothing_is_asked_of_them():
    async with running(enable_stateful_sessions=False) as served:
        assert (await served.invoke({"inputs": "a"}, headers={NAME: "x"})).status_code == 200
        assert (await served.invoke(NEW)).status_code == 424


@pytest.fixture
def clock():
    class Clock:
        now = 1_000_000.0

        def __call__(self):
            return self.now

    return Clock()


async def test_each_use_moves_the_expiry_and_a_restart_forgets_nothing(tmp_path, clock):
    folder = tmp_path / "sessions"
    sessions = SessionStore(folder, 100, 10, clock)
    session, told = await sessions.create()
    assert told == f"{session}; Expires=1970-01-12T13:48:20Z"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    clock.now += 90
    await sessions.use(session)
    clock.now += 90
    (folder / "nonsense").write_text("{")
    again = SessionStore(folder, 100, 10, clock)
    await again.use(session)
    clock.now += 101
    with pytest.raises(BadRequest, match=f"session expired: {session}"):
        await again.use(session)
    clock.now += 100
    await again.create()
    with pytest.raises(BadRequest, match="session not found"):
        await again.use(session)
    assert not (folder / session).exists()
    assert (folder / "nonsense").exists()


async def test_servers_that_share_a_folder_know_each_others(tmp_path, clock):
    one, other = (SessionStore(tmp_path / "sessions", 100, 10, clock) for _ in range(2))
    session, _ = await one.create()
    for it in (other, one) * 3:
        clock.now += 90
        await it.use(session)
    for _ in range(3):  # the session stays alive on one server, whatever the other remembers
        clock.now += 90
        await one.use(session)
    await other.create()
    await other.use(session)
    await other.close(session)
    for it in (one, other, SessionStore(tmp_path / "sessions", 100, 10, clock)):
        with pytest.raises(BadRequest, match="session not found"):
            await it.use(session)
    assert not (tmp_path / "sessions" / session).exists()


async def test_a_server_that_was_restarted_removes_what_has_expired(tmp_path, clock):
    folder = tmp_path / "sessions"
    session, _ = await SessionStore(folder, 100, 10, clock).create()
    clock.now += 201
    await SessionStore(folder, 100, 10, clock).create()
    assert not (folder / session).exists()


async def test_who_only_begins_sessions_ends_no_others(tmp_path, clock):
    sessions = SessionStore(tmp_path / "sessions", 100, 10, clock)
    used = [(await sessions.create())[0] for _ in range(5)]
    for session in used:
        await sessions.use(session)
        sessions.answered(session)
    begun = []
    for _ in range(50):
        clock.now += 1
        begun.append((await sessions.create())[0])
        assert len(list((tmp_path / "sessions").iterdir())) <= 10
    for session in (*used, *begun[-5:]):
        await sessions.use(session)
    for session in begun[:-5]:
        with pytest.raises(BadRequest, match="session not found"):
            await sessions.use(session)


async def test_the_one_not_used_for_longest_gives_way_and_an_expired_one_before(tmp_path, clock):
    sessions = SessionStore(tmp_path / "sessions", 100, 3, clock)
    first, second, third = [(await sessions.create())[0] for _ in range(3)]
    for session in (second, third, first):
        clock.now += 1
        await sessions.use(session)
        sessions.answered(session)
    fourth, _ = await sessions.create()
    with pytest.raises(BadRequest, match="session not found"):
        await sessions.use(second)
    clock.now += 99.5  # the third has expired, the fourth was never used
    await sessions.create()
    await sessions.use(fourth)
    with pytest.raises(BadRequest, match="session not found"):
        await sessions.use(third)


async def test_one_that_another_server_uses_does_not_give_way(tmp_path, clock):
    one, other = (SessionStore(tmp_path / "sessions", 100, 1, clock) for _ in range(2))
    session, _ = await one.create()
    clock.now += 50
    await other.use(session)
    await one.create()
    await other.use(session)
    await one.use(session)


async def test_many_are_used_at_once(tmp_path, clock):
    one, other = (SessionStore(tmp_path / "sessions", 100, 100, clock) for _ in range(2))
    begun = [session for session, _ in await asyncio.gather(*(one.create() for _ in range(100)))]
    await asyncio.gather(*map(other.use, begun))
    await asyncio.gather(*map(one.close, begun))
    assert not list((tmp_path / "sessions").iterdir())


async def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(tmp_path, clock):
    (tmp_path / "file").write_text("")
    sessions = SessionStore(tmp_path / "file" / "sessions", 100, 2, clock)
    session, _ = await sessions.create()
    await sessions.use(session)
    await sessions.close(session)
    with pytest.raises(BadRequest, match="session not found"):
        await sessions.use(session)
