# SPDX-License-Identifier: Apache-2.0
"""Files and answers far above their limits: only a bounded part of them is read."""

import asyncio
import contextlib
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from lmi_config.facts import handler
from lmi_config.facts.model import Folder, ModelError, json_object
from lmi_config.options import secure
from lmi_config.options.declared import Settings
from lmi_config.options.settings import SettingsError
from serving.http import tls
from serving.kv_cache import fingerprints
from serving.lora.shared_list import ListFolder
from serving.router.kv import tokenizer_workers
from serving.server import healthcheck, prepare
from serving.sources.hub import Hub

MIB = 1024**2
SIZE = 256 * MIB
MOST = 48 * MIB
"""The maximum of memory that a read may take: less than a fifth of the input."""

pytestmark = pytest.mark.anyio


def large(file, begin=b""):
    """A sparse file: it has no blocks on the disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as written:
        written.write(begin)
        written.truncate(SIZE)
    return file


def certificate(folder):
    file = large(folder / "own.pem", b"-----BEGIN")
    with pytest.raises(ValueError, match="has more than"):
        tls.pair(file, file)


def users_code(folder):
    large(folder / "model.py", b"#")
    assert handler.look(folder, None) is None


def configuration(folder):
    large(folder / "config.json", b"{")
    assert fingerprints._length(folder, {"max_model_len": 7}) == 7


def models_configuration(folder):
    large(folder / "config.json", b"{")
    with pytest.raises(ModelError, match="more than 33554432"):
        json_object(Folder(folder), "config.json")


def lists_of_a_model(folder):
    (folder / "config.json").write_bytes(b'{"a": [' + b"[]," * 5_000_000 + b"1]}")
    with pytest.raises(ModelError, match="more than 100000 lists"):
        json_object(Folder(folder), "config.json")


def template(folder):
    file = large(folder / "template.jinja", b"{{")
    options = Settings(engine={"chat_template": str(file)})
    with pytest.raises(SettingsError, match="more than"):
        prepare._chat_template(options)


def template_of_a_channel(folder):
    large(folder / "tokenizer_config.json", b"{")
    assert [it.template for it in secure.look(folder)] == [True]


def listed_adapter(folder):
    large(folder / "one.json")
    ListFolder(folder).put("one.json", b"{}")
    assert (folder / "one.json").read_bytes() == b"{}"


def reference_of_a_hub(folder):
    copy = folder / "snapshots" / "abc"
    file = large(folder / "refs" / "main")
    Hub("me/mine", None, None, None, None, offline=False)._name(copy)
    assert file.read_text() == "abc"


READERS = (
    certificate,
    users_code,
    configuration,
    models_configuration,
    lists_of_a_model,
    template,
    template_of_a_channel,
    listed_adapter,
    reference_of_a_hub,
)


@contextlib.contextmanager
def little_memory():
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reads", READERS, ids=lambda it: it.__name__)
def test_a_bounded_part_of_an_endless_file_is_read(tmp_path, reads):
    with little_memory():
        reads(tmp_path)


class Endless(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.send_header("content-length", str(SIZE))
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(SIZE // MIB):
                self.wfile.write(b"x" * MIB)

    def log_message(self, *_):
        """Log nothing."""


def test_a_bounded_part_of_a_pings_answer_is_reported():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with little_memory():
            told = healthcheck.fault(
                ["-m", "serving", "serve"], {"OPTION_PORT": f"{server.server_port}"}
            )
        server.shutdown()
    assert told
    assert told.startswith("xxx")
    assert len(told) < MIB


async def test_a_tokenizers_answer_has_a_length():
    reader = asyncio.StreamReader()
    reader.feed_data(b"\xff\xff\xff\xff" + b"x" * 100)
    with pytest.raises(OSError, match="4294967295 bytes"):
        await asyncio.wait_for(tokenizer_workers._frame(reader), 5)
