# SPDX-License-Identifier: Apache-2.0
"""The rights and limits of an adapter's model.py: real processes, with a fake engine."""

import asyncio
import contextlib
import ctypes
import os
import resource
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from handlers import isolation
from lmi_config.options.declared import Settings
from serving import process
from tests.serving.conftest import running
from tests.serving.lora import test_registry
from tests.serving.lora.test_registry import ask, register, registry, write

pytestmark = pytest.mark.anyio
as_another = pytest.mark.skipif(not isolation._may_choose(), reason="only root can choose users")

FORMATTER = """
import decimal, email.mime.text, json.tool, os, resource, struct, sys  # not all of it is loaded yet
import numpy
from djl_python.output_formatter import output_formatter

def tried(what, *arguments):
    try:
        return str(what(*arguments))
    except Exception as error:
        return type(error).__name__

def read(path):
    with open(path, "rb") as file:
        return file.read()

"""
LOOKS = """
@output_formatter
def look(answer):
    server = os.getppid()
    return {
        "environment": dict(os.environ), "pid": os.getpid(), "user": os.getuid(),
        "groups": os.getgroups(),
        "kill": tried(os.kill, server, 0),
        "environ": tried(read, f"/proc/{server}/environ"),
        "memory": tried(read, f"/proc/{server}/maps"),
        "files": tried(os.listdir, f"/proc/{server}/fd"),
        "private": tried(read, "PRIVATE"),
        "root": tried(os.setuid, 0),
        "limit": tried(resource.setrlimit, resource.RLIMIT_DATA, (-1, -1)),
        "status": read("/proc/self/status").decode(),
    }
"""


@pytest.fixture
def adopting():
    """This process adopts orphans, as `serve` does."""
    process.adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.fixture
async def served(anyio_backend, root):
    async with running() as it:
        it.pipeline.adapters = registry(it.engine, root)
        yield it
        for adapter in it.pipeline.adapters.listed():
            await it.client.delete(f"/adapters/{adapter.name}")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "adapters"


def with_code(folder, text):
    write(folder)
    (folder / "model.py").write_text(FORMATTER + text)
    return folder


async def test_it_has_none_of_the_servers_secrets_and_rights(served, root, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-operator")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-operator")
    monkeypatch.setenv("OPTION_KV_L2_URL", "redis://:of-the-operator@host")
    private = tmp_path / "private"
    private.touch(0o600)
    text = LOOKS.replace("PRIVATE", str(private))
    await register(served, "one", with_code(root / "one", text))
    found = await ask(served, "one")
    assert "of-the-operator" not in str(found)
    assert {*found["environment"]} <= isolation._PASSED_ON | {"HOME", "HF_HUB_OFFLINE", "LC_CTYPE"}
    assert "PATH" in found["environment"]
    assert found["environ"] == found["memory"] == "PermissionError"
    assert "NoNewPrivs:\t1" in found["status"]
    if isolation._may_choose():
        assert found["files"] == "PermissionError"
        assert found["user"] in isolation._USERS
        assert found["groups"] == []
        assert found["kill"] == found["private"] == found["root"] == "PermissionError"
        assert found["limit"] == "ValueError"  # it cannot be raised
        assert "CapEff:\t0000000000000000" in found["status"]


@pytest.mark.skipif(isolation.landlock() < 6, reason="the kernel cannot isolate processes")
async def test_where_no_user_can_be_chosen_it_reads_and_signals_no_other(served, root, monkeypatch):
    """The engine's processes have the server's environment, and its user."""
    monkeypatch.setattr(isolation, "_may_choose", lambda: False)
    engine = await asyncio.create_subprocess_exec("sleep", "60", env={"HF_TOKEN": "hf_secret"})
    try:
        text = LOOKS.replace("os.getppid()", str(engine.pid))
        await register(served, "one", with_code(root / "one", text))
        found = await ask(served, "one")
        assert found["user"] == os.geteuid()
        for what in ("kill", "environ", "memory"):
            assert found[what] == "PermissionError"
    finally:
        engine.kill()
        await engine.wait()


REACHES = """
import glob, tempfile

def around():
    found = {"reached": [], "listed": [], "changed": []}
    for number in os.listdir("/proc/self/fd"):
        for up in range(1, 12):
            place = f"/proc/self/fd/{number}/" + "../" * up
            for name in ("customers.json", "open/customers.json", "SECRET", "etc/hostname"):
                try:
                    open(place + name).read()
                    found["reached"].append(os.path.realpath(place + name))
                except OSError:
                    pass
            try:
                found["listed"].append((os.path.realpath(place), os.listdir(place)))
            except OSError:
                pass
            try:
                open(place + "shared", "a").write("x")
                found["changed"].append(place)
            except OSError:
                pass
    return found

@output_formatter
def look(answer):
    with tempfile.TemporaryFile("w+") as file:
        file.write("written")
        file.seek(0)
        scratch = file.read()
    import xml.dom.minidom, sqlite3, concurrent.futures.process  # not loaded yet
    own = sorted(name for name in os.listdir(os.path.dirname(__file__)) if name[0] != "_")
    try:
        os.fchdir(max(map(int, os.listdir("/proc/self/fd"))))
    except OSError:
        pass
    return {**around(), "scratch": scratch, "own": own, "home": os.environ["HOME"],
            "hosts": bool(read("/etc/hosts")), "tokenizer": os.path.isdir(sys.argv[3])}
"""


@as_another
@pytest.mark.skipif(not isolation.landlock(), reason="the kernel cannot hide files from processes")
async def test_no_descriptor_leads_out_of_its_folder(served, tmp_path):
    """The adapter is in a folder that only root may enter, as downloaded ones are."""
    closed = tmp_path / "closed"
    root = closed / "open" / "adapters"
    root.mkdir(parents=True)
    closed.chmod(0o700)
    for secret in (closed / "customers.json", closed / "open" / "customers.json"):
        secret.write_text("names")
        secret.chmod(0o644)
    (closed / "open" / "shared").touch()
    (closed / "open" / "shared").chmod(0o666)
    served.pipeline.adapters = registry(served.engine, root)
    await register(served, "one", with_code(root / "one", REACHES))
    found = await ask(served, "one")
    assert [it for it in found["reached"] if "customers" in it] == []
    assert [
        it
        for it, _ in found["listed"]
        if str(closed) in it and it != str(root) and "/one" not in it
    ] == []
    assert (closed / "open" / "shared").read_text() == ""
    assert found["scratch"] == "written"
    assert found["own"] == ["adapter_config.json", "adapter_model.safetensors", "model.py"]
    assert found["hosts"]
    assert Path(found["home"]).is_dir()
    await served.client.delete("/adapters/one")
    assert not Path(found["home"]).exists()


@as_another
async def test_what_it_leaves_behind_ends_with_it(adopting, served, root):
    text = """
import subprocess

@output_formatter
def begin(answer):
    return {"left": subprocess.Popen(["sleep", "60"], start_new_session=True).pid}
"""
    await register(served, "one", with_code(root / "one", text))
    left = psutil.Process((await ask(served, "one"))["left"])
    await served.client.delete("/adapters/one")
    assert left.status() == psutil.STATUS_ZOMBIE
    os.waitpid(left.pid, 0)


@as_another
async def test_one_adapters_code_cannot_touch_anothers(served, root):
    await register(served, "one", with_code(root / "one", LOOKS))
    other = (await ask(served, "one"))["pid"]
    text = LOOKS.replace("os.getppid()", str(other))
    await register(served, "two", with_code(root / "two", text))
    found = await ask(served, "two")
    for what in ("kill", "environ", "memory", "files"):
        assert found[what] == "PermissionError"


async def test_where_it_is_off_an_adapter_with_code_is_refused(served, root):
    served.pipeline.adapters = registry(served.engine, root, code=False)
    await register(served, "plain", write(root / "plain"))
    answer = await register(served, "one", with_code(root / "one", LOOKS), 424)
    assert "it has a model.py, and its answers would be others without it" in answer["message"]
    assert "OPTION_ADAPTER_CODE=true" in answer["message"]
    assert (await ask(served, "plain"))["choices"]


@pytest.mark.parametrize(
    ("secure", "given", "runs"),
    [(False, None, True), (True, None, False), (True, True, True), (False, False, False)],
)
def test_it_is_on_as_in_lmi_and_off_in_secure_mode(secure, given, runs):
    assert Settings(secure_mode=secure, adapter_code=given).runs_adapter_code is runs


async def test_a_handle_of_an_adapters_is_refused(served, root):
    """The server would never call it, and nobody would notice."""
    answer = await register(served, "one", with_code(root / "one", "def handle(inputs): pass"), 424)
    assert "handle is called in the model's own model.py" in answer["message"]
    text = LOOKS + "handle = look\n"
    await register(served, "two", with_code(root / "two", text))
    assert "handle is called in the model's own" in (await ask(served, "two", 424))["error"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("struct.pack('<I', 2**32 - 1) + b'x'", "sent 4294967295 bytes at once"),
        ("struct.pack('<I', 3) + b'abc'", "sent an invalid answer"),
        # call 1, DONE, and a number of bytes to make
        (
            "(lambda it: struct.pack('<I', len(it)) + it)(b'\\x93\\x01\\xa4done\\xcf' + bytes(2) + "
            "b'\\xff' * 6)",
            "sent an invalid answer",
        ),
        (
            "(lambda it: struct.pack('<I', len(it)) + it)(b'\\x93\\x01\\xa4more\\xc0')",
            "sent an invalid answer",
        ),
    ],
)
async def test_nonsense_that_it_sends_is_its_own_failure(served, root, sent, message):
    text = f"""
@output_formatter
def send(answer):
    if "evil" in answer.choices[0].text:
        os.write(int(sys.argv[1]), {sent})
        import time
        time.sleep(600)
    return {{"fine": True}}
"""
    await register(served, "one", with_code(root / "one", text))
    headers = test_registry.HEADER
    answer = await served.invoke({"prompt": "evil"}, headers=headers)
    assert answer.status_code == 424
    assert message in answer.json()["error"]
    assert (await served.invoke({"prompt": "a"}, headers=headers)).json() == {"fine": True}


HOSTILE = """
import ctypes, json, signal, socket, subprocess, threading, time
from djl_python.output_formatter import output_formatter
number = int(sys.argv[1])

def send(data, count=1):
    connection = socket.socket(fileno=os.dup(number))
    connection.setblocking(True)
    for _ in range(count):
        connection.sendall(data)

def frame(kind, data, call=b"\\x02"):
    body = b"\\x93" + call + bytes([0xA0 + len(kind)]) + kind.encode() + data
    return struct.pack("<I", len(body)) + body

def lists(count):
    return b"\\xdd" + struct.pack(">I", count) + b"\\x90" * count

def forked(what):
    if not os.fork():
        os.setsid()
        try:
            what()
        finally:
            os._exit(0)

def printed(block):
    def go():
        while True:
            os.write(1, block)
    threading.Thread(target=go, daemon=True).start()

@output_formatter
def evil(answer):
    if "evil" in answer.choices[0].text:
        EVIL
    return {"fine": True}
"""
EVIL = {
    "empty lists as a head": "send(frame('head', lists(2**22)))",
    "empty lists as a result": "send(frame('done', lists(2**24)))",
    "empty lists as functions": "send(frame('loaded', lists(2**19)))",
    "a result as large as it may be": "send(frame('done', b'\\xc6' + struct.pack('>I', 2**27) + "
    "bytes(2**27)))",
    "a result that is shorter than it says": "send(frame('done', b'\\xc6\\xff\\0\\0\\0' "
    "+ bytes(2**21)))",
    "lists within lists": "send(frame('done', b'\\x91' * 2**20))",
    "data of a call that is over": "send(frame('done', b'\\xc6\\x04\\0\\0\\0', b'\\x63'))",
    "a head with a million names": "send(frame('head', b'\\x92\\x01\\xdf\\0\\x04\\0\\0' + "
    "b''.join(b'\\xa3%03x\\xa0' % (it % 4096) for it in range(2**17))), 20)",
    "a call without end": "send(frame('done', b'\\xc0', b'\\xcf' + b'\\xff' * 8))",
    "a million answers": "send(frame('heard', b'\\xc0') * 1000, 1000)",
    "no kind": "send(frame('none', b'\\xc0'))",
    "a length of nothing": "send(bytes(4))",
    "the half of a frame": "send(frame('done', b'\\xc4\\xff')); time.sleep(600)",
    "text that is none": "send(frame('failed', b'\\xa2\\xff\\xfe'))",
    "another's function": "send(frame('loaded', b'\\x91\\xa6handle'))",
    "short lines": "printed(b'x\\n' * 30000)",
    "lines that differ": "printed(b''.join(b'%d %s\\n' % (it, os.urandom(9).hex().encode()) "
    "for it in range(3000)))",
    "a line without end": "printed(b'x' * 2**16)",
    "bytes that are no text": "printed(bytes(range(256)) * 200)",
    "lines like the log's": "printed((json.dumps({'time': '', 'level': 'error', 'logger': []}) + "
    "'\\n').encode() * 500)",
    "what takes long to hide": "printed((b':/%3A' * 12000 + b'\\n') + b'-eyJ' * 15000 + b'\\n')",
    "no way to print": "os.close(1); os.close(2)",
    "no connection": "os.close(number)",
    "a child that holds all open": "forked(lambda: time.sleep(60)); os._exit(1)",
    "children that print": "[forked(lambda: printed(b'x\\n') or time.sleep(20)) for _ in range(3)]",
    "children that answer": "forked(lambda: send(frame('heard', b'\\xc0') * 1000, 10**5)); "
    "os._exit(1)",
    "a signal to the server": "[os.kill(os.getppid(), it) for it in (signal.SIGKILL,)]",
    "a signal to everybody": "os.kill(-1, signal.SIGSTOP)",
    "it stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "the server traced": "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "the server's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b').write(b'x')",
    "all memory": "bytearray(2**40)",
    "no more threads": "[threading.Thread(target=time.sleep, args=(60,)).start() "
    "for _ in range(3000)]",
    "the end": "os.abort()",
}


@as_another
@pytest.mark.parametrize("evil", EVIL)
async def test_nothing_that_it_does_stops_the_server(adopting, served, root, evil):
    """Its own request may fail. Other requests are answered, and the event loop keeps turning."""
    await register(served, "plain", write(root / "plain"))
    text = HOSTILE.replace("EVIL", EVIL[evil])
    await register(served, "one", with_code(root / "one", text))
    assert await ask(served, "one") == {"fine": True}
    longest, sent = 0.0, []

    async def tick():
        nonlocal longest
        while True:
            begun = time.thread_time()  # which other processes of the machine do not delay
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - begun)

    ticking = asyncio.create_task(tick())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        headers = test_registry.HEADER
        evil_one = asyncio.create_task(served.invoke({"prompt": "evil"}, headers=headers))
        for _ in range(10):
            sent.append((await served.client.get("/ping")).status_code)
            assert (await ask(served, "plain"))["choices"]
            await asyncio.sleep(0.05)
        assert (await evil_one).status_code in (200, 424)
        again = await served.invoke({"prompt": "a"}, headers=headers)
        if again.status_code != 200:  # its process was ended between two requests
            again = await served.invoke({"prompt": "a"}, headers=headers)
        assert again.json() == {"fine": True}
    finally:
        ticking.cancel()
    assert sent == [200] * 10
    assert longest < 0.5
    most = 600 if "as large" in evil else 100  # MiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < most * 1024


async def test_a_bounded_part_of_its_output_is_logged(served, root, caplog):
    text = """
@output_formatter
def evil(answer):
    for number in range(5000):
        print("line", number)
    print("x" * 10**6)
    return {"fine": True}
"""
    caplog.set_level("INFO")
    await register(served, "one", with_code(root / "one", text))
    assert await ask(served, "one") == {"fine": True}
    await served.client.delete("/adapters/one")
    lines = [it.getMessage() for it in caplog.records if it.name == "serving.user_code"]
    shown = [it for it in lines if ": line " in it]
    told = [it for it in lines if "more lines, which are not logged" in it]
    assert 1000 <= len(shown) < 3000
    assert "line 0" in shown[0]
    assert max(map(len, lines)) < 9000
    assert 1 <= len(told) <= 3


@as_another
async def test_what_it_may_not_read_is_told(served, root):
    folder = with_code(root / "one", LOOKS)
    (folder / "model.py").chmod(0o600)
    await register(served, "one", folder)
    error = (await ask(served, "one", 424))["error"]
    assert f"{folder / 'model.py'} cannot be read by user " in error
    assert f"`chmod -R a+rX {folder}` lets it" in error


async def test_private_files_in_an_archive_are_read(served, root):
    """The author of an archive may have packed files that only he could read."""
    folder = with_code(root / "one", "from helper import formatter\n")
    (folder / "helper.py").write_text(
        "from djl_python.output_formatter import output_formatter\n"
        "@output_formatter\ndef formatter(answer):\n    return {'by': 'helper'}\n"
    )
    with tarfile.open(root / "one.tar.gz", "w:gz") as members:
        for file in folder.iterdir():
            file.chmod(0o600)
            members.add(file, file.name)
    await register(served, "one", root / "one.tar.gz")
    assert await ask(served, "one") == {"by": "helper"}
