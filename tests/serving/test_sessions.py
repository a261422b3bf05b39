"""Stateful sessions, through the server and by themselves."""

import asyncio
import re
import stat

import pytest

from serving.errors import BadRequest, NotReady
from serving.sessions import Sessions
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


def test_each_use_moves_the_expiry_and_a_restart_forgets_nothing(tmp_path, clock):
    folder = tmp_path / "sessions"
    sessions = Sessions(folder, 100, 10, clock)
    session, told = sessions.create()
    assert told == f"{session}; Expires=1970-01-12T13:48:20Z"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    clock.now += 90
    sessions.use(session)
    clock.now += 90
    (folder / "nonsense.json").write_text("{")
    again = Sessions(folder, 100, 10, clock)
    again.use(session)
    clock.now += 101
    with pytest.raises(BadRequest, match=f"session expired: {session}"):
        again.use(session)
    clock.now += 100
    again.create()
    with pytest.raises(BadRequest, match="session not found"):
        again.use(session)
    assert not (folder / f"{session}.json").exists()


def test_servers_that_share_a_folder_know_each_others(tmp_path, clock):
    one, other = (Sessions(tmp_path / "sessions", 100, 10, clock) for _ in range(2))
    session, _ = one.create()
    for it in (other, one) * 3:
        clock.now += 90
        it.use(session)
    for _ in range(3):  # it lives on where it is used, whatever the other remembers
        clock.now += 90
        one.use(session)
    other.create()
    other.use(session)
    other.close(session)
    with pytest.raises(BadRequest, match="session not found"):
        Sessions(tmp_path / "sessions", 100, 10, clock).use(session)


def test_there_are_only_so_many(tmp_path, clock):
    sessions = Sessions(tmp_path / "sessions", 100, 2, clock)
    first, _ = sessions.create()
    sessions.create()
    with pytest.raises(NotReady, match="OPTION_MAX_SESSIONS"):
        sessions.create()
    sessions.close(first)
    sessions.create()
    clock.now += 101
    sessions.create()


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(tmp_path, clock):
    (tmp_path / "file").write_text("")
    sessions = Sessions(tmp_path / "file" / "sessions", 100, 2, clock)
    session, _ = sessions.create()
    sessions.use(session)
    sessions.close(session)
