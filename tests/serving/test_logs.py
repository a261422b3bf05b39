"""What reaches standard error, and what does not."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving import logs
from serving.logs import Handler, JsonFormatter

ROOT = Path(__file__).parent.parent.parent
PRINTABLE = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["C", "Z"])
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="§"), max_size=40)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(logs, "_values", None)


def line(message, *arguments, facts=None, error=None, formatter=None):
    """What a call of the log would write."""
    written = io.StringIO()
    logger = logging.Logger("serving.test")
    logger.addHandler(Handler(written, formatter or JsonFormatter()))
    info = (type(error), error, error.__traceback__) if error else None
    logger.error(message, *arguments, exc_info=info, extra={"facts": facts or {}})
    return written.getvalue()


def places(secret, before, after):
    """The secret at every place of a line, as text, and as others show it."""
    text = f"{before}{secret}{after}"
    try:
        raise ValueError(text) from KeyError({"inner": [text]})
    except ValueError as error:
        raised = error
    yield line(text.replace("%", "%%"))
    yield line("%s and %r", text, [text])
    yield line("it", facts={text: text, "deep": [{"a": (text, {text})}, Path(text), {"k": text}]})
    yield line("it", facts={"json": json.dumps({"a": text}), "plain": json.dumps(text)})
    yield line("it", facts={"url": f"https://a/?q={urllib.parse.quote(text)}"})
    yield line("it", error=raised)
    yield line("%r", text, error=raised, formatter=logs._TextFormatter())


@given(st.text(PRINTABLE, min_size=8, max_size=50), WORDS, WORDS)
def test_no_secret_of_the_environment_comes_out(value, before, after):
    assume(value not in before + after)
    secret = f"§{value}"  # so that it is no word of the log's own
    logs._hide({"HF_TOKEN": secret, "HOME": "/root"})
    for written in places(secret, before, after):
        assert secret not in written
        assert value not in written
        if written.startswith("{"):
            parsed = json.loads(written)
            assert secret not in "".join(texts(parsed))
            assert secret not in urllib.parse.unquote(str(parsed.get("url")))


def texts(value):
    if isinstance(value, dict):
        yield from (text for pair in value.items() for it in pair for text in texts(it))
    elif isinstance(value, list):
        yield from (text for it in value for text in texts(it))
    else:
        yield str(value)


TOKEN = st.text("abcXYZ0189", min_size=20, max_size=40)
SHAPED = st.one_of(
    TOKEN.map(lambda it: (f"Bearer {it}", it)),
    TOKEN.map(lambda it: (f"sagemaker-api-key-{it}==", it)),
    TOKEN.map(lambda it: (f"hf_{it}", it)),
    TOKEN.map(lambda it: (f"redis://user:{it}@host:6379/0", it)),
    TOKEN.map(lambda it: (f"https://b/k?X-Amz-Signature={it}&a=b", it)),
    st.text("ABCXYZ0189", min_size=16, max_size=16).map(lambda it: (f"AKIA{it}", it)),
)


@given(SHAPED, st.text(" ,;:'\"[]{}\n", max_size=5), st.text(" ,;'\"[]{}\n", max_size=5))
def test_nothing_that_looks_like_a_secret_comes_out(shaped, before, after):
    text, hidden = shaped
    for written in places(text, before, after):
        assert hidden not in written


def test_what_is_harmless_stays():
    text = "https://example.org:8080/a@b hf_transfer bearer of AKIA news"
    assert logs.redacted(text) == text.replace("of", "[secret]")


def test_of_two_secrets_the_longer_is_hidden_whole():
    logs._hide({"A_TOKEN": "abcdefgh", "B_TOKEN": "abcdefghijkl", "C_KEY": "short", "D_URL": ""})
    assert logs.redacted("abcdefghijkl abcdefgh short") == "[secret] [secret] short"


def test_each_line_of_a_secret_with_several_is_hidden():
    logs._hide({"PEM_KEY": "-----BEGIN-----\nMIIEvQIBADANBg\n"})
    assert logs.redacted("then MIIEvQIBADANBg") == "then [secret]"


def test_a_line_that_comes_too_often_is_counted_and_told_once():
    written = io.StringIO()
    logger = logging.Logger("serving.test")
    handler = Handler(written, JsonFormatter())
    logger.addHandler(handler)
    for number in range(100):
        logger.error("the store %s is away", number)
        logger.error("%s", f"other {number // 25}")
    handler.tell_repeated()
    handler.tell_repeated()
    found = [json.loads(line) for line in written.getvalue().splitlines()]
    assert len([it for it in found if it["message"].startswith("the store")]) == logs._OFTEN
    assert len([it for it in found if it["message"].startswith("other")]) == 100
    (told,) = [it for it in found if "suppressed" in it]
    assert (told["suppressed"], told["like"]) == (100 - logs._OFTEN, "the store %s is away")


PROGRAM = r"""
import ctypes, logging, os, subprocess, sys, warnings
from serving import logs

logs.configure(os.environ)
logs.set_level("info")
child = '''
import logging, sys, multiprocessing
multiprocessing.current_process().name = "EngineCore"
from logging.config import dictConfig
import json, os
dictConfig(json.load(open(os.environ["VLLM_LOGGING_CONFIG_PATH"])))
logging.getLogger("vllm.core").info("ready at %d", 5)
logging.getLogger("vllm.core").debug("never")
try:
    raise ValueError("the token is " + os.environ["HF_TOKEN"])
except ValueError:
    logging.getLogger("vllm.core").exception("broke")
logging.getLogger("urllib3").warning("a library")
print("printed", flush=True)
raise RuntimeError("raw")
'''
os.environ.update(logs.for_engine(os.environ, "info"))
with logs.folded():
    logging.getLogger("serving.a").info("ours", extra={"facts": {"n": 1}})
    print("hello", os.environ["HF_TOKEN"])
    sys.stderr.write("[2026-11-22 01:02:03,4] LMCache \x1b[32mWARNING:\x1b[0m slow (a.py:1:b)\n")
    sys.stderr.write("WARNING:root:basic\n[W1122 01:02:03.4 utils.cpp:68] native\n 0%\r 50%\r99%\n")
    sys.stderr.flush()
    for odd in ("", '"}', '", "level": 5}', '", "a": ' + "[" * 100_000):
        print('{"time": "' + odd)
    os.write(1, b"not \xff text")
    os.write(1, b"\n")
    subprocess.run(["sh", "-c", "echo of a shell >&2"])
    subprocess.run([sys.executable, "-c", child])
    warnings.warn("mind")
print("too late", file=sys.stderr)
logging.getLogger("serving.a").info("causes", extra={"facts": {"causes": logs.causes(60)}})
"""


def test_all_that_is_written_becomes_lines_of_the_log():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"], "HF_TOKEN": "very-secret-token", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "very-secret" not in ended.stderr
    found = [json.loads(line) for line in ended.stderr.splitlines()]
    assert {line.pop("time")[-1] for line in found} == {"Z"}
    by_message = {line["message"]: line for line in found}

    def has(message, level, logger, **more):
        assert by_message[message] == {
            "level": level, "logger": logger, "message": message, **more
        }  # fmt: skip

    has("ours", "info", "serving.a", n=1)
    has("hello [secret]", "info", "output")
    has("slow (a.py:1:b)", "warning", "lmcache")
    has("basic", "warning", "root")
    has("utils.cpp:68] native", "warning", "output")
    has("99%", "info", "output")
    has("not \ufffd text", "info", "output")
    has("of a shell", "info", "output")
    has("ready at 5", "info", "vllm.core", process="EngineCore")
    has("a library", "warning", "urllib3", process="EngineCore")
    has("printed", "info", "output")
    assert by_message["broke"]["exception"].endswith("ValueError: the token is [secret]")
    assert by_message["RuntimeError: raw"]["exception"].startswith("Traceback")
    assert [line for line in found if "UserWarning: mind" in line["message"]]
    assert "never" not in by_message
    assert found[-1]["causes"] == ["ValueError: the token is [secret]", "RuntimeError: raw"]
    assert ended.stdout == ""


DEAF = """
import os, sys
from serving import logs

logs.configure(os.environ)
with logs.folded():
    for number in range(2000):
        print("nobody reads this")
        logs.access("id", {"n": number})
        logs.logging.getLogger("serving").error("nor %d", number)
os._exit(7)
"""


def test_a_log_that_nobody_reads_any_more_harms_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr
        process.stderr.close()
        assert process.wait(30) == 7


def test_signals_change_the_level_of_a_running_router(tmp_path):
    replicas = tmp_path / "replicas"
    replicas.write_text("http://127.0.0.1:9\n")
    with subprocess.Popen(
        [sys.executable, "-m", "serving", "route"],
        env={**os.environ, "OPTION_ROUTER_REPLICAS": f"file://{replicas}"}
        | {"OPTION_PORT": "18765"},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr
        levels = []
        for line in process.stderr:
            message = json.loads(line)["message"]
            if message == "routing":
                process.send_signal(signal.SIGUSR1)
            if message.startswith("the log's level"):
                levels.append(message.split()[4])
                process.send_signal(signal.SIGUSR2 if len(levels) < 3 else signal.SIGTERM)
    assert levels == ["debug", "info", "warning"]
    assert process.returncode == 0
