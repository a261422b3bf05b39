# SPDX-License-Identifier: Apache-2.0
"""Adapters with a fake engine: the calls of SageMaker and LMI, bad input, and random sequences of
calls.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import boto3
import psutil
import pytest

from lmi_config.facts.model import Tensor
from serving.errors import AdapterFailed, NoSlot
from serving.lora.adapter_files import AdapterFiles
from serving.lora.adapter_registry import AdapterRegistry
from serving.user_code import Limits, start_user_code
from tests.serving.conftest import running
from tests.support.harness.wait import turns, until_async

MODULE = "model.layers.0.self_attn.q_proj"
BASE = {f"{MODULE}.weight": Tensor("BF16", (16, 8))}
LIMITS = Limits(formatter_s=2, handler_s=2, memory=2**30)
IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"
HEADER = {IDENTIFIER: "one"}


def tensors(rank=2, wide=8, out=16, module=MODULE, dtype="F32"):
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": (dtype, [rank, wide]),
        f"{name}.lora_B.weight": (dtype, [out, rank]),
    }


def write(folder: Path, content=0, shapes=None, **config) -> Path:
    """An adapter whose weights are all the same byte."""
    header, end = {}, 0
    for name, (dtype, shape) in (tensors() if shapes is None else shapes).items():
        size = shape[0] * shape[1] * (4 if dtype == "F32" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    weights = len(text).to_bytes(8, "little") + text + bytes([content]) * end
    (folder / "adapter_model.safetensors").write_bytes(weights)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "adapters"


def registry(engine, root, slots=(2, 2), limit=100, code=True) -> AdapterRegistry:
    """slots: those of the batch, and of the engine. code: whether adapters may have code."""
    files = AdapterFiles((root.resolve(),), ("mine",), root.parent / "store", 20_000)
    start = functools.partial(start_user_code, tokenizer=root, limits=LIMITS, of_adapter=True)
    given = (*slots, limit, start if code else None, engine.names)
    return AdapterRegistry(engine, files, BASE, 16, *given)


@pytest.fixture
async def served(root, shared):
    """A server with a separate registry."""
    engine = shared.engine
    for kept in (engine.loads, engine.loaded, engine.misused, engine.bodies):
        kept.clear()
    engine.fails_to_load = False
    engine.may_load.set()
    engine.gate.clear()
    shared.pipeline.adapters = registry(engine, root)
    yield shared
    engine.may_load.set()
    for it in shared.pipeline.adapters.listed():
        await shared.pipeline.adapters.unregister(it.name)
    shared.pipeline.adapters = None
    engine.gate.set()


async def test_each_of_a_list_of_inputs_may_name_its_own(served, root):
    for name in ("one", "two"):
        await register(served, name, write(root / name))
    body = {"inputs": ["a b", "c d", "e f"], "adapters": ["one", "", "two"], "model": "one"}
    assert (await served.invoke(body)).json() == [
        {"generated_text": text} for text in ("b a", "d c", "f e")
    ]
    models = {it["prompt"]: it["model"].partition("@")[0] for it in served.engine.bodies}
    base = served.engine.names[0]
    assert models == {"a b": "one", "c d": base, "e f": "two"}
    for wrong, message in (
        (body | {"adapters": 5}, "Expected `str | array | null`, got `int` - at `$.adapters`"),
        (body | {"adapters": []}, "a list of 0; inputs should be a list of as many"),
        ({"inputs": "a", "adapters": []}, "a list of 0; inputs should be a list of as many"),
        ({"inputs": None, "adapters": []}, "a list of 0; inputs should be a list of as many"),
        ({"adapters": []}, "a list of 0; inputs should be a list of as many"),
        (body | {"adapters": ["one", "two"]}, "a list of 2; inputs should be a list of as many"),
        (body | {"adapters": ["one", "two", "nobody"]}, "'nobody' is not registered"),
        (body | {"inputs": ["a", "b", "refuse"]}, "not like this"),
        (body | {"stream": True}, "cannot be streamed"),
    ):
        answer = await served.invoke(wrong)
        assert answer.status_code == 424
        assert message in answer.json()["error"]
    answer = await served.post("/v1/completions", {"prompt": ["a"], "adapters": ["one"]})
    assert answer.status_code == 400


async def test_the_query_may_name_one(served, root):
    for name in ("one", "two"):
        await register(served, name, write(root / name))
    base = served.engine.names[0]
    for query, body, headers, expected in (
        ("?adapter=one", {}, {}, "one"),
        ("?adapter=one", {"model": base}, {}, "one"),
        ("?adapter=one", {"model": "two"}, {}, "one"),
        ("?adapter=one", {"adapters": "two"}, {}, "two"),
        ("?adapter=one", {}, {IDENTIFIER: "two"}, "two"),
        ("?adapter=", {"model": "one"}, {}, base),
        ("?model_name=x", {"model": "one"}, {}, "one"),
    ):
        for path in ("/invocations", f"/predictions/{base}"):
            served.engine.bodies.clear()
            answer = await served.post(path + query, {"prompt": "a b"} | body, headers=headers)
            assert answer.status_code == 200, answer.text
            [sent] = served.engine.bodies
            assert sent["model"].partition("@")[0] == expected
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await served.post("/v1/chat/completions?adapter=two", chat)).status_code == 200
    assert served.engine.bodies[-1]["model"].startswith("two@")


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("?adapter=nobody", "adapter 'nobody' is not registered"),
        ("?adapter=one&adapter=two", "the query has 2 adapters"),
        ("?adapter=one&adapter=one", "the query has 2 adapters"),
    ],
)
async def test_what_the_query_may_not_name_never_gets_the_base(served, root, query, told):
    for name in ("one", "two"):
        await register(served, name, write(root / name))
    for path, status in (("/invocations", 424), ("/v1/completions", 400)):
        answer = await served.post(path + query, {"prompt": "a b"})
        assert answer.status_code == status
        assert told in answer.text
    assert served.engine.bodies == []


async def test_equal_requests_for_two_adapters_are_two(served, root):
    for name in ("one", "two"):
        await register(served, name, write(root / name))
    asked = [
        asyncio.create_task(
            served.post(
                f"/invocations?adapter={name}",
                {"prompt": "wait"},
                headers={"X-Amzn-SageMaker-Inference-Id": "same"},
            )
        )
        for name in ("one", "two")
    ]
    await until_async(lambda: len(served.engine.bodies) == 2)
    served.engine.gate.set()
    for task in asked:
        assert (await task).status_code == 200
    models = {it["model"].partition("@")[0] for it in served.engine.bodies}
    assert models == {"one", "two"}


async def test_a_pin_that_is_not_to_be_loaded_is_refused(served, root):
    src = write(root / "one")
    answer = await register(served, "one", src, 400, pin="true", preload="false")
    assert "pin=true keeps the adapter loaded, and preload=false does not" in answer["message"]
    await register(served, "one", src)
    wrong = {"pin": "true", "preload": "false"}
    answer = await served.client.post("/adapters/one/update", params=wrong)
    assert answer.status_code == 400
    await register(served, "two", write(root / "two"), pin="true")
    assert (await served.client.get("/adapters/two")).json()["preload"] is True


async def test_preloading_as_lmi_does(served, root, monkeypatch):
    """OPTION_LMI_PRELOAD=true: a registered adapter is loaded, unless the call says otherwise."""
    settings = dataclasses.replace(served.settings, lmi_preload=True)
    monkeypatch.setattr(served.pipeline, "_settings", settings)
    await register(served, "one", write(root / "one"))
    assert len(served.engine.loaded) == 1
    await register(served, "two", write(root / "two"), preload="false")
    assert len(served.engine.loaded) == 1


async def test_the_components_own_name_is_in_the_messages(served, root):
    write(root / "one")
    alias = {"X-Amzn-SageMaker-Adapter-Alias": "french"}
    parameters = {"name": "x-123", "src": str(root / "one")}
    answer = await served.client.post("/adapters", params=parameters, headers=alias)
    assert answer.json() == {"status": "Adapter french registered"}
    answer = await served.client.delete("/adapters/x-123", headers=alias)
    assert answer.json() == {"status": "Adapter french unregistered"}


async def register(served, name, src, status=200, **more):
    answer = await served.client.post("/adapters", params={"name": name, "src": str(src), **more})
    assert answer.status_code == status, answer.text
    return answer.json()


async def ask(served, name, status=200):
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": name}
    answer = await served.invoke({"prompt": "a b"}, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


pytestmark = pytest.mark.anyio


async def test_registered_described_listed_and_taken_away(served, root):
    src = write(root / "one")
    answer = await register(served, "one", src)
    assert answer == {"status": "Adapter one registered"}
    described = {"name": "one", "src": str(src), "preload": False, "pin": False}
    assert (await served.client.get("/adapters/one")).json() == described
    assert (await served.client.get("/adapters")).json() == {"adapters": [described]}
    assert served.engine.loads == []
    answer = await served.client.delete("/adapters/one")
    assert answer.json() == {"status": "Adapter one unregistered"}
    assert (await served.client.get("/adapters/one")).status_code == 404
    assert (await served.client.delete("/adapters/one")).status_code == 404


async def test_parameters_may_be_in_a_json_body_and_the_model_in_the_path(served, root):
    body = {"name": "one", "src": str(write(root / "one")), "preload": True}
    name = served.engine.names[0]
    answer = await served.post(f"/models/{name}/adapters", body)
    assert answer.status_code == 200
    assert served.engine.loaded == served.engine.loads
    assert (await served.client.get("/models/other/adapters")).status_code == 404


async def test_a_page_at_a_time(served, root):
    for number in range(5):
        await register(served, f"a{number}", write(root / str(number)))
    page = (await served.client.get("/adapters", params={"limit": 2})).json()
    assert [it["name"] for it in page["adapters"]] == ["a0", "a1"]
    parameters = {"limit": 3, "next_page_token": page["nextPageToken"]}
    page = (await served.client.get("/adapters", params=parameters)).json()
    assert [it["name"] for it in page["adapters"]] == ["a2", "a3", "a4"]
    assert "nextPageToken" not in page
    assert (await served.client.get("/adapters?limit=0")).status_code == 400


async def test_the_same_again_is_no_fault_and_other_content_is(served, root):
    await register(served, "one", write(root / "one"))
    await register(served, "one", write(root / "copy"))
    answer = await register(served, "one", write(root / "other", content=1), 409)
    assert answer["code"] == 409
    assert "is registered with other content" in answer["message"]


async def test_it_is_loaded_at_first_use_once_for_all_who_wait(served, root):
    await register(served, "one", write(root / "one"))
    served.engine.may_load.clear()
    asked = [asyncio.create_task(ask(served, "one")) for _ in range(20)]
    while not served.engine.loads:
        await asyncio.sleep(0.01)
    served.engine.may_load.set()
    answers = await asyncio.gather(*asked)
    assert len(served.engine.loads) == 1
    assert {answer["model"] for answer in answers} == {"one"}
    inner = {body["model"] for body in served.engine.bodies}
    assert inner == {served.engine.loads[0]}
    assert len({body["cache_salt"] for body in served.engine.bodies}) == 1


async def test_a_failed_load_is_told_to_each_and_can_be_tried_again(served, root):
    await register(served, "one", write(root / "one"))
    served.engine.fails_to_load = True
    answers = await asyncio.gather(*(ask(served, "one", 424) for _ in range(5)))
    assert {answer["error"] for answer in answers} == {"the engine cannot load it"}
    await register(served, "two", write(root / "two"), 424, preload="true")
    assert (await served.client.get("/adapters/two")).status_code == 404
    served.engine.fails_to_load = False
    await ask(served, "one")


async def test_the_one_used_longest_ago_makes_room(served, root):
    for name in ("one", "two", "three"):
        await register(served, name, write(root / name))
    for name in ("one", "two", "one", "three"):
        await ask(served, name)
    assert [name.partition("@")[0] for name in served.engine.loaded] == ["one", "three"]
    series = (await served.client.get("/metrics")).text.splitlines()
    assert "slipway_adapters_registered 3.0" in series
    assert "slipway_adapters_loaded 2.0" in series
    assert "slipway_adapter_slots 2.0" in series
    assert any(it.startswith('slipway_adapter_requests_total{adapter="three"}') for it in series)


async def test_pinned_ones_stay_and_may_fill_all_slots(served, root):
    for name in ("one", "two"):
        await register(served, name, write(root / name), pin="true")
    await register(served, "three", write(root / "three"))
    assert "OPTION_MAX_LORAS" in (await ask(served, "three", 507))["error"]
    await register(served, "four", write(root / "four"), 507, preload="true")
    await served.client.delete("/adapters/one")
    await ask(served, "three")


async def test_what_is_in_use_is_never_unloaded(served, root):
    for name in ("one", "two", "three"):
        await register(served, name, write(root / name))
    held = [
        asyncio.create_task(
            served.invoke({"prompt": "wait"}, headers={"X-Amzn-SageMaker-Adapter-Identifier": name})
        )
        for name in ("one", "two")
    ]
    while served.engine.running < 2:
        await asyncio.sleep(0.01)
    third = asyncio.create_task(ask(served, "three"))
    gone = asyncio.create_task(served.client.delete("/adapters/one"))
    await until_async(lambda: "one" not in served.pipeline.adapters)
    await until_async(lambda: served.pipeline.adapters.get("three").wanted)
    assert len(served.engine.loaded) == 2
    assert not third.done()
    assert not gone.done()
    await ask(served, "one", 424)  # new requests do not see it any longer
    served.engine.gate.set()
    assert {(await request).status_code for request in held} == {200}
    assert (await gone).status_code == 200
    await third


async def test_what_has_changed_in_its_folder_is_not_taken_for_what_it_was(served, root):
    await register(served, "one", write(root / "one"))
    write(root / "one", content=1)
    assert "has changed since" in (await ask(served, "one", 424))["error"]
    (root / "one").rename(root / "elsewhere")
    assert "cannot be read" in (await ask(served, "one", 424))["error"]
    await register(served, "one", write(root / "back"))
    await ask(served, "one")


async def test_a_change_that_keeps_size_and_time_is_one_nevertheless(served, root):
    weights = write(root / "one") / "adapter_model.safetensors"
    os.utime(weights, (1, 1))
    await register(served, "one", root / "one")
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(weights, (1, 1))
    assert "has changed since" in (await ask(served, "one", 424))["error"]


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("words.json", True),
        ("lib/text.py", True),
        ("lib/deeper/names.txt", True),
        ("lib/__pycache__/text.pyc", False),
        (".notes", False),
    ],
)
async def test_every_file_that_code_may_read_is_part_of_a_version(served, root, file, changes):
    for name in ("v1", "v2"):
        path = with_code(root / name, "one") / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    await register(served, "one", root / "v1")
    before = served.pipeline.adapters.get("one").digest
    answer = await served.client.post("/adapters/one/update", params={"src": str(root / "v2")})
    assert answer.status_code == 200
    assert (served.pipeline.adapters.get("one").digest != before) == changes


async def test_an_update_of_what_code_reads_is_done(served, root):
    for name in ("v1", "v2"):
        folder = with_code(root / name, "unused")
        (folder / "lib").mkdir()
        (folder / "lib" / "__init__.py").write_text("")
        (folder / "lib" / "text.py").write_text(f"NAME = {name!r}")
        (folder / "model.py").write_text(CODE.replace("from helper", "from lib.text"))
    await register(served, "one", root / "v1")
    assert (await ask(served, "one"))["processed_by"] == "v1"
    await served.client.post("/adapters/one/update", params={"src": str(root / "v2")})
    assert (await ask(served, "one"))["processed_by"] == "v2"


async def test_without_code_only_what_the_engine_reads_counts(served, root):
    await register(served, "one", write(root / "one"))
    (write(root / "copy") / "README.md").write_text("of other words")
    await register(served, "one", root / "copy")


CODE = """
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter
from helper import NAME


@output_formatter
def mark(answer):
    answer.processed_by = NAME
    return answer
"""


def with_code(folder: Path, name: str, content=0) -> Path:
    write(folder, content)
    (folder / "model.py").write_text(CODE)
    (folder / "helper.py").write_text(f"NAME = {name!r}")
    return folder


async def test_each_adapter_has_formatters_of_its_own(served, root, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    text = CODE.replace("from helper import NAME", "NAME = 'base'")
    text += "\n\n@input_formatter\ndef own(payload):\n    payload['seen'] = 1\n    return payload\n"
    (base / "model.py").write_text(text)
    served.pipeline.code = await start_user_code(base, base, LIMITS)
    try:
        await register(served, "one", with_code(root / "one", "one"))
        await register(served, "two.x", with_code(root / "two", "two"))
        await register(served, "two-x", write(root / "plain", 1))
        for name, by in (("one", "one"), ("two.x", "two"), ("two-x", "base")):
            assert (await ask(served, name))["processed_by"] == by
            assert served.engine.bodies[-1]["seen"] == 1  # the input formatter is the base's
        answer = await served.invoke({"prompt": "a"})
        assert answer.json()["processed_by"] == "base"
        new = with_code(root / "new", "new")
        await served.client.post("/adapters/one/update", params={"src": str(new)})
        assert (await ask(served, "one"))["processed_by"] == "new"
        await served.client.delete("/adapters/two.x")
        assert (await ask(served, "one"))["processed_by"] == "new"
        processes = [it for it in psutil.Process().children() if "handlers.custom" in it.cmdline()]
        assert len(processes) == 2  # the base's and the one adapter's that is loaded
    finally:
        await served.pipeline.code.stop()
        served.pipeline.code = None


async def test_code_that_cannot_be_loaded_refuses_the_adapter(served, root):
    (with_code(root / "one", "one") / "model.py").write_text("def broken(:\n")
    answer = await register(served, "one", root / "one", 424)
    assert "model.py, line 1: invalid syntax" in answer["message"]
    (root / "one" / "model.py").write_text("import no_such_module\n")
    answer = await register(served, "one", root / "one", 424, preload="true")
    assert "No module named 'no_such_module' (model.py, line 1)" in answer["message"]
    assert served.engine.loads == []
    await register(served, "one", root / "one")
    assert "no_such_module" in (await ask(served, "one", 424))["error"]


def packed(folder: Path, *more: tarfile.TarInfo, within=".") -> Path:
    """As SageMaker's tools pack it: the files at the archive's root."""
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, f"{within}/{path.name}")
        for member in more:
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return archive


async def test_an_archive_is_unpacked(served, root):
    archive = packed(write(root / "one"))
    shutil.rmtree(root / "one")
    await register(served, "one", archive)
    await register(served, "two", f"file://{archive}")
    assert (await ask(served, "one"))["model"] == "one"
    shutil.rmtree(root.parent / "store")  # a cleaner of /tmp does this
    assert (await ask(served, "two"))["model"] == "two"


def member(name, size=0, kind=tarfile.REGTYPE, target=""):
    found = tarfile.TarInfo(name)
    found.size, found.type, found.linkname = size, kind, target
    return found


def pax(name, **headers):
    found = member(name)
    found.pax_headers = headers
    return found


def raw(name, size, kind=tarfile.REGTYPE) -> bytes:
    """A header with arbitrary values, which tarfile would not write."""
    block = bytearray(member(name, kind=kind).tobuf(tarfile.GNU_FORMAT))
    number = size.to_bytes(11, signed=True)  # as GNU tar writes numbers too large for octal digits
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + number
    block[148:156] = b" " * 8
    block[148:155] = b"%06o\0" % sum(block)
    return bytes(block)


HOSTILE = [
    ([raw("x", 2**26, tarfile.XHDTYPE), bytes(2**26)], "67108864 bytes is longer than 65536"),
    ([raw("x", 2**26, tarfile.XGLTYPE), bytes(2**26)], "67108864 bytes is longer than 65536"),
    ([raw("x", 2**26, tarfile.GNUTYPE_LONGNAME), bytes(2**26)], "is longer than 65536"),
    ([raw("x", 600, tarfile.XHDTYPE), b"600 a=b".ljust(1024)], "a pax header is damaged"),
    ([raw("x", 9, tarfile.XHDTYPE), bytes(512)], "a pax header is damaged"),
    ([raw("a", 1024), bytes(1024), raw("b", -2048), bytes(1024)], "the size of 'b' is negative"),
    ([raw("d", -(2**30), tarfile.DIRTYPE)], "the size of 'd' is negative"),
    (
        [raw("x", 65_536, tarfile.XHDTYPE) + b"65536 a=".ljust(65_535) + b"\n"] * 300,
        "more than 4194304 bytes of extended headers",
    ),
    (
        [raw("x", 65_000, tarfile.XHDTYPE) + (b"5 a=\n" * 13_000).ljust(65_024, b"\0")] * 240,
        "a pax header has more than 64 records",
    ),
    ([raw("x", 512, tarfile.XHDTYPE), b"999999 ".ljust(512)], "a pax header is damaged"),
    ([raw("x", 512, tarfile.XHDTYPE), b"2 \n".ljust(512)], "a pax header is damaged"),
    ([raw("x", 8**11 - 1, tarfile.XHDTYPE)], "is longer than 65536"),
    ([raw("x", 65_536, tarfile.GNUTYPE_LONGLINK), bytes(65_536)] * 100, "of extended headers"),
    ([raw("x", 65_536, tarfile.XGLTYPE), bytes(65_536)] * 100, "of extended headers"),
    ([raw(f"{it}", 0) for it in range(1001)], "it has more than 1000 files and folders"),
    ([raw("a/" * 40 + "b", 0)], "is more than 20 folders deep"),
    ([raw("../b", 0)], "leads out of the archive's folder"),
    ([raw("/b", 0)], "leads out of the archive's folder"),
    ([raw("b", 0, tarfile.SYMTYPE)], "is a link, a device or a sparse file"),
    ([raw("b", 0, tarfile.LNKTYPE)], "is a link, a device or a sparse file"),
    ([raw("b", 0, tarfile.CHRTYPE)], "is a link, a device or a sparse file"),
    ([raw("b", 0, tarfile.FIFOTYPE)], "is a link, a device or a sparse file"),
    ([raw("b", 0, tarfile.GNUTYPE_SPARSE)], "is a link, a device or a sparse file"),
    ([raw("", 0)], "a file in it has no name"),
    ([b"PK\x03\x04".ljust(512)], "it is not a whole and safe tar.gz archive"),
    ([bytes(1024), bytes(2**26)], "more than 16777216 bytes beside its files"),
    ([raw("a", 9000), bytes(700)], "it ends within a file"),
    ([b"no tar at all".ljust(512)], "it is not a whole and safe tar.gz archive"),
]


def hostile(archive: Path, *parts: bytes) -> Path:
    archive.parent.mkdir(exist_ok=True)
    archive.write_bytes(gzip.compress(b"".join(parts), 1))
    return archive


@pytest.mark.parametrize(("parts", "message"), HOSTILE)
async def test_an_archive_that_lies_leaves_nothing(served, root, parts, message):
    answer = await register(served, "one", hostile(root / "bad.tar.gz", *parts), 424)
    assert message in answer["message"]
    store = root.parent / "store"
    assert disk_usage(store) == 0
    # A failed archive no longer counts.
    await register(served, "one", packed(write(root / "good"), member("large", 18_000)))
    assert disk_usage(store) > 18_000


async def test_the_headers_of_an_archive_are_not_held_in_memory(served, root):
    archive = hostile(root / "bad.tar.gz", raw("x", 2**26, tarfile.XHDTYPE), bytes(2**26))
    tracemalloc.start()
    await register(served, "one", archive, 424)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


async def test_an_archive_that_cannot_be_unpacked_takes_no_room_from_others(served, root, bucket):
    src = bucket(write(root / "other"), "other")
    await register(served, "other", src)
    await ask(served, "other")
    store = root.parent / "store"
    files = {*store.rglob("adapter_model.safetensors")}
    archive = packed(write(root / "one"), member("bomb", 10**6))
    await register(served, "one", archive, 507)
    cut = packed(write(root / "two"), member("large", 19_000))
    cut.write_bytes(cut.read_bytes()[:-50])
    await register(served, "two", cut, 424)
    assert len(files) == 1
    assert {*store.rglob("adapter_model.safetensors")} == files


async def test_only_what_a_server_fetched_makes_room(served, root):
    store = root.parent / "store"
    for name in ("somebodys-models", "0" * 24):
        (store / name).mkdir(parents=True)
        (store / name / "large").write_bytes(bytes(19_000))
    served.pipeline.adapters = registry(served.engine, root)
    await register(served, "one", packed(write(root / "one"), member("large", 18_000)))
    assert (store / "somebodys-models/large").stat().st_size == 19_000
    assert not (store / ("0" * 24)).exists()


def disk_usage(folder: Path) -> int:
    return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())


async def test_what_tar_programs_write_is_unpacked(served, root):
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        folder = write(root / f"f{form}")
        name = f"{'folder' * 10}/{'long' * 30}-ä.txt"
        (folder / name).parent.mkdir()
        if form != tarfile.USTAR_FORMAT:
            (folder / name).write_text("found")
        archive = folder.with_suffix(".tgz")
        with tarfile.open(archive, "w:gz", format=form) as file:
            file.add(folder, ".")
        await register(served, f"f{form}", archive)
        await ask(served, f"f{form}")
    found = [it.read_text() for it in (root.parent / "store").rglob("*.txt")]
    assert found == ["found"] * 2


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ([member("../outside")], 424, "leads out of the archive's folder"),
        ([member("/outside")], 424, "leads out of the archive's folder"),
        ([member("a/" * 20 + "deep")], 424, "is more than 20 folders deep"),
        ([member("model.py", kind=tarfile.SYMTYPE, target="/etc/passwd")], 424, "is a link"),
        ([member("model.py", kind=tarfile.LNKTYPE, target="/etc/passwd")], 424, "is a link"),
        ([member("pipe", kind=tarfile.FIFOTYPE)], 424, "a device or a sparse file"),
        ([member("sparse", kind=tarfile.GNUTYPE_SPARSE)], 424, "a device or a sparse file"),
        ([member("disk", kind=tarfile.BLKTYPE)], 424, "a device or a sparse file"),
        ([pax("lib", **{"GNU.sparse.major": "1"})], 424, "a device or a sparse file"),
        ([pax("lib", path="../outside")], 424, "leads out of the archive's folder"),
        ([pax("lib", size="-512")], 424, "the size of 'lib' is '-512'"),
        ([pax("lib", size="9" * 30)], 424, "the size of 'lib' is '9999"),
        ([member("bomb", 10**6)], 507, "OPTION_ADAPTER_DISK"),
        ([member(f"{n}") for n in range(1001)], 424, "more than 1000 files and folders"),
        (None, 424, "Compressed file ended"),
    ],
)
async def test_a_bad_archive_harms_nobody(served, root, more, status, message):
    archive = packed(write(root / "one"), *(more or ()))
    if more is None:
        archive.write_bytes(archive.read_bytes()[:-50])
    answer = await register(served, "one", archive, status)
    assert message in answer["message"]
    assert sum(it.stat().st_size for it in (root.parent / "store").rglob("*")) < 100_000
    assert not (root.parent / "store" / "outside").exists()
    deeper = packed(write(root / "deeper"), within="deeper")
    answer = await register(served, "one", deeper, 424)
    assert "has no adapter_model.safetensors" in answer["message"]


@pytest.fixture
def bucket(aws):
    with contextlib.suppress(aws.client.exceptions.BucketAlreadyOwnedByYou):
        aws.client.create_bucket(Bucket="mine")

    def put(path: Path, prefix: str) -> str:
        for file in path.iterdir() if path.is_dir() else [path]:
            key = f"{prefix}/{file.name}"
            aws.client.put_object(Bucket="mine", Key=key, Body=file.read_bytes())
        aws.fetched.clear()
        return f"s3://mine/{prefix}"

    return put


async def test_from_s3_the_weights_come_at_first_use(served, root, bucket, aws):
    write(root / "one")
    (root / "one" / "large.txt").write_bytes(bytes(9000))
    src = bucket(root / "one", "adapters/one")
    await register(served, "one", src)
    assert "adapters/one/large.txt" not in aws.fetched
    assert (await ask(served, "one"))["model"] == "one"
    assert aws.fetched.count("adapters/one/large.txt") == 1
    bucket(write(root / "other", content=1), "adapters/one")
    await served.client.delete("/adapters/one")
    await register(served, "one", src)
    await ask(served, "one")
    assert len({*served.engine.loads}) == 2
    await register(served, "two", src)
    bucket(write(root / "third", content=2), "adapters/one")
    assert "has changed since" in (await ask(served, "two", 424))["error"]
    answer = await register(served, "none", "s3://mine/nothing", 424)
    assert "there are no objects below it" in answer["message"]


@pytest.fixture
def clients(monkeypatch):
    """The sessions that made clients of S3, one for each client."""
    sessions = []
    make = boto3.session.Session.client

    def counted(session, *given, **named):
        sessions.append(session)
        return make(session, *given, **named)

    monkeypatch.setattr(boto3.session.Session, "client", counted)
    return sessions


@pytest.mark.parametrize("packing", [lambda folder: folder, packed])
async def test_what_is_checked_and_fetched_from_s3_was_listed_once(
    served, root, bucket, aws, clients, packing
):
    files = packing(write(root / "one"))
    src = bucket(files, "listed")
    if files.is_file():
        src = f"{src}/{files.name}"
    aws.listed.clear()
    await register(served, "one", src, preload="true")
    assert len(aws.listed) == 1
    # One client has short time-outs, in case S3 does not answer; the other one is for transfers.
    assert len(clients) == 2
    assert clients[0] is clients[1]
    await ask(served, "one")
    assert len(aws.listed) == 1


async def test_a_load_at_first_use_lists_again(served, root, bucket, aws, clients):
    """The registered files may have changed since."""
    src = bucket(write(root / "one"), "later")
    aws.listed.clear()
    await register(served, "one", src)
    assert (len(aws.listed), len(clients)) == (1, 1)
    await ask(served, "one")
    assert (len(aws.listed), len(clients)) == (2, 3)


async def test_an_archive_from_s3(served, root, bucket):
    archive = packed(write(root / "one"))
    src = bucket(archive, "archives")
    await register(served, "one", f"{src}/one.tar.gz")
    assert (await ask(served, "one"))["model"] == "one"
    answer = await register(served, "two", f"{src}/two.tar.gz", 424)
    assert "there is no such object" in answer["message"]


async def test_files_from_s3_make_room_for_others_on_disk(served, root, bucket, aws):
    for name in ("one", "two", "three"):
        (write(root / name) / "large.txt").write_bytes(bytes(9000))
        await register(served, name, bucket(root / name, name))
    for name in ("one", "two", "three", "one"):
        await ask(served, name)
    assert aws.fetched.count("one/large.txt") == 2
    assert len(list((root.parent / "store").glob("*/*/large.txt"))) == 2


async def test_an_update_changes_the_version(served, root):
    await register(served, "one", write(root / "one"))
    await ask(served, "one")
    new = write(root / "new", content=1)
    answer = await served.client.post("/adapters/one/update", params={"src": str(new)})
    assert answer.json() == {"status": "Adapter one updated"}
    await ask(served, "one")
    before, after = served.engine.bodies
    assert before["model"] != after["model"]
    assert before["cache_salt"] != after["cache_salt"]
    assert served.engine.loaded == [after["model"]]
    wrong = write(root / "wrong", shapes=tensors(rank=32))
    answer = await served.client.post("/adapters/one/update", params={"src": str(wrong)})
    assert answer.status_code == 424
    assert (await ask(served, "one"))["model"] == "one"


@pytest.mark.parametrize("update", [{}, {"src": "new"}, {"pin": "true"}])
async def test_an_update_keeps_what_it_does_not_name(served, root, update):
    write(root / "new", content=1)
    await register(served, "one", write(root / "one"), preload="true")
    update = {name: str(root / value) if name == "src" else value for name, value in update.items()}
    assert (await served.client.post("/adapters/one/update", params=update)).status_code == 200
    described = (await served.client.get("/adapters/one")).json()
    assert described["preload"] is True
    assert served.engine.loaded == [served.pipeline.adapters.get("one").inner]


async def test_an_update_may_take_preloading_back(served, root):
    await register(served, "one", write(root / "one"), preload="true")
    update = await served.client.post("/adapters/one/update", params={"preload": "false"})
    assert update.status_code == 200
    assert (await served.client.get("/adapters/one")).json()["preload"] is False


async def test_selection(served, root):
    await register(served, "one", write(root / "one"))
    inner = f"one@{served.pipeline.adapters.get('one').digest}"
    for body, headers in (
        ({"prompt": "a", "adapters": "one"}, {}),
        ({"prompt": "a", "model": "one"}, {}),
        ({"inputs": "a", "adapters": "one"}, {}),
        ({"messages": [{"role": "user", "content": "a"}], "model": "fake"}, HEADER),
    ):
        assert (await served.invoke(body, headers=headers)).status_code == 200
        assert served.engine.bodies[-1]["model"] == inner
    for body in (
        {"prompt": "a", "adapters": "", "model": "one"},
        {"inputs": "a", "adapters": "", "model": "one"},
    ):
        await served.invoke(body)
        assert served.engine.bodies[-1]["model"] == served.engine.names[0]
        assert "cache_salt" not in served.engine.bodies[-1]
    answer = await served.post("/v1/completions", {"prompt": "a", "model": inner})
    assert answer.status_code == 404
    models = (await served.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [*served.engine.names, "one"]


async def test_each_event_of_a_stream_has_the_name_that_clients_know(served, root):
    await register(served, "one", write(root / "one"))
    body = {"prompt": "a b c", "model": "one", "stream": True}
    answer = await served.post("/v1/completions", body)
    events = [it.removeprefix("data: ") for it in answer.text.split("\n\n")]
    assert [json.loads(it)["model"] for it in events if it.startswith("{")] == ["one"] * 3


BAD = [
    ({}, 400, "name is missing"),
    ({"name": "one"}, 400, "src is missing"),
    ({"name": "../one", "src": "{root}/one"}, 400, "should be letters"),
    ({"name": "a@b", "src": "{root}/one"}, 400, "should be letters"),
    (
        {"name": "one", "src": "s3://bucket/one"},
        409,
        "OPTION_ADAPTER_BUCKETS does not name 'bucket'",
    ),
    ({"name": "one", "src": "/etc"}, 400, "adapters may be under"),
    ({"name": "one", "src": "{root}/../../etc"}, 400, "adapters may be under"),
    ({"name": "one", "src": "{root}/link"}, 400, "adapters may be under"),
    ({"name": "one", "src": "{root}/inner"}, 400, "is a link to elsewhere"),
    ({"name": "one", "src": "{root}/nothing"}, 424, "cannot be read"),
    ({"name": "one", "src": "{root}/pickle"}, 424, "a pickle can run code"),
    ({"name": "one", "src": "{root}/short"}, 424, "bytes, but by its header"),
    ({"name": "one", "src": "{root}/large"}, 424, "its rank is 32"),
    ({"name": "one", "src": "{root}/wrong"}, 424, "made for 16 x 9"),
    ({"name": "one", "src": "{root}/unknown"}, 424, "which the model does not have"),
    ({"name": "one", "src": "{root}/dora"}, 424, "use_dora is True; vLLM does not support it"),
    ({"name": "one", "src": "{root}/int8"}, 424, "of type I8"),
    ({"name": "lmi", "src": "{root}/one"}, 409, "lmi is a name of the model itself"),
    ({"name": "one", "src": "{root}/hole"}, 424, "begins at byte 72, but the data before it ends"),
    ({"name": "one", "src": "{root}/shape"}, 424, "which does not fit its 64 bytes"),
    ({"name": "one", "src": "{root}/header"}, 424, "33554433 bytes is longer than 1049"),
    ({"name": "one", "src": "{root}/nested"}, 424, "more than 10000 lists and objects"),
    ({"name": "one", "src": "{root}/many"}, 424, "tensors: is it of another model?"),
    ({"name": "one", "src": "{root}/config"}, 424, "bytes, more than 4194304"),
    ({"name": "one", "src": "{root}/code"}, 424, "model.py has 1048577 bytes, more than 1048576"),
    ({"name": "one", "src": "{root}/one", "pin": "perhaps"}, 400, "should be true or false"),
]


def relaid(folder: Path, change, more=b"") -> None:
    """Change the header's entry for lora_B."""
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header[f"base_model.model.{MODULE}.lora_B.weight"])
    text = json.dumps(header).encode()
    data = content[end:] + more
    last = max(it["data_offsets"][1] for it in header.values())
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[:last])


async def test_a_body_that_is_no_text_is_refused(served):
    for path in ("/adapters", "/adapters/one/update"):
        answer = await served.post(path, b'{"name": "\xff\xfe"}')
        assert answer.status_code == 400
        assert answer.json()["message"] == "the body should be empty or a JSON object"


@pytest.mark.parametrize(("parameters", "status", "message"), BAD)
async def test_bad_input(served, root, tmp_path, parameters, status, message):
    write(root / "one")
    (root / "link").symlink_to(write(tmp_path / "outside"))
    write(root / "inner")
    (root / "inner" / "adapter_model.safetensors").unlink()
    (root / "inner" / "adapter_model.safetensors").symlink_to(
        tmp_path / "outside" / "adapter_model.safetensors"
    )
    write(root / "pickle")
    (root / "pickle" / "adapter_model.safetensors").rename(root / "pickle" / "adapter_model.bin")
    short = write(root / "short") / "adapter_model.safetensors"
    short.write_bytes(short.read_bytes()[:-10])
    write(root / "large", shapes=tensors(rank=32), r=32)
    write(root / "wrong", shapes=tensors(wide=9))
    write(root / "unknown", shapes=tensors(module="model.layers.7.q_proj"))
    write(root / "many", shapes=tensors() | tensors(module="model.layers.7.q_proj"))
    write(root / "nested", layer_replication=[[]] * 20_000)
    write(root / "dora", use_dora=True)
    write(root / "int8", shapes=tensors(dtype="I8"))
    relaid(write(root / "hole"), lambda it: it.update(data_offsets=[72, 72 + 128]), bytes(8))
    relaid(write(root / "shape"), lambda it: it.update(data_offsets=[64, 64 + 64]))
    header = (2**25 + 1).to_bytes(8, "little") + b"{" + b" " * 2**25
    (write(root / "header") / "adapter_model.safetensors").write_bytes(header)
    write(root / "config", padding="x" * 2**22)
    (write(root / "code") / "model.py").write_bytes(b"#" * (2**20 + 1))
    found = {name: value.format(root=root) for name, value in parameters.items()}
    answer = await served.client.post("/adapters", params=found)
    assert answer.status_code == status
    assert answer.json()["code"] == status
    assert message in answer.json()["message"]
    assert (await served.client.get("/adapters")).json() == {"adapters": []}


async def test_without_lora_it_says_so(anyio_backend):
    async with running() as it:
        answer = await it.client.post("/adapters", params={"name": "one", "src": "/one"})
        assert (answer.status_code, answer.json()["message"][:20]) == (400, "LoRA is not enabled.")
        assert (await it.invoke({"prompt": "a"}, headers=HEADER)).status_code == 424


async def leaving(served, name="one"):
    """A request whose client leaves after the engine has begun to load its adapter."""
    begun = len(served.engine.loads)
    asking = asyncio.create_task(served.invoke({"prompt": "a b"}, headers={IDENTIFIER: name}))
    while len(served.engine.loads) == begun:
        await asyncio.sleep(0.01)
    asking.cancel()
    while served.pipeline.adapters.get(name).wanted:
        await asyncio.sleep(0.01)


async def loaded(served) -> float:
    """The number of adapters that the registry counts as loaded; it must equal the engine's
    number.
    """
    lines = (await served.client.get("/metrics")).text.splitlines()
    (number,) = (float(it.split()[1]) for it in lines if it.startswith("slipway_adapters_loaded "))
    return number


async def test_an_adapter_that_nobody_waits_for_is_removed_after_its_load(served, root):
    await register(served, "one", write(root / "one"))
    served.engine.may_load.clear()
    await leaving(served)
    gone = asyncio.create_task(served.client.delete("/adapters/one"))
    while "one" in served.pipeline.adapters:
        await asyncio.sleep(0.01)
    served.engine.may_load.set()
    assert (await gone).status_code == 200
    assert (served.engine.loaded, await loaded(served)) == ([], 0)
    await register(served, "one", root / "one")
    await ask(served, "one")
    assert (len(served.engine.loaded), await loaded(served)) == (1, 1)
    assert served.engine.misused == []


async def test_one_that_loads_for_nobody_may_be_updated(served, root):
    await register(served, "one", write(root / "one"))
    served.engine.may_load.clear()
    await leaving(served)
    parameters = {"src": str(write(root / "two", content=1))}
    updated = asyncio.create_task(served.client.post("/adapters/one/update", params=parameters))
    await turns()
    served.engine.may_load.set()
    assert (await updated).status_code == 200
    assert (served.engine.loaded, await loaded(served)) == ([], 0)
    await ask(served, "one")
    assert served.engine.loaded == [served.pipeline.adapters.get("one").inner]
    assert served.engine.misused == []


async def test_one_that_waits_for_room_for_nobody_gives_up(served, root):
    served.pipeline.adapters = registry(served.engine, root, slots=(2, 1))
    for name in ("one", "two"):
        await register(served, name, write(root / name, content=ord(name[0])))
    held = asyncio.create_task(served.invoke({"prompt": "wait"}, headers={IDENTIFIER: "two"}))
    while not served.engine.running:
        await asyncio.sleep(0.01)
    asking = asyncio.create_task(ask(served, "one"))
    while not served.pipeline.adapters.get("one").wanted:
        await asyncio.sleep(0.01)
    asking.cancel()
    assert (await served.client.delete("/adapters/one")).status_code == 200
    served.engine.gate.set()
    assert (await held).status_code == 200
    assert len(served.engine.loads) == 1
    await ask(served, "two")
    assert (len(served.engine.loads), await loaded(served)) == (1, 1)


async def test_a_failure_that_nobody_waited_for_is_not_told_to_the_next(served, root):
    await register(served, "one", write(root / "one"))
    served.engine.may_load.clear()
    served.engine.fails_to_load = True
    await leaving(served)
    served.engine.may_load.set()
    while await loaded(served):
        await asyncio.sleep(0.01)
    served.engine.fails_to_load = False
    await ask(served, "one")
    assert len(served.engine.loads) == 2


async def test_what_the_engine_has_under_our_own_name_is_as_good_as_loaded(served, root):
    await register(served, "one", write(root / "one"))
    await served.engine.load_adapter(served.pipeline.adapters.get("one").inner, root / "one")
    await ask(served, "one")
    assert await loaded(served) == 1


async def test_where_a_change_fails_the_adapter_stays_as_it_was(served, root):
    src = write(root / "one")
    await register(served, "one", src)
    served.engine.fails_to_load = True
    for path in ("/adapters", "/adapters/one/update"):
        for other in (write(root / "copy"), write(root / "other", content=1)):
            parameters = {"name": "one", "src": str(other), "preload": "true"}
            answer = await served.client.post(path, params=parameters)
            assert answer.status_code in (409, 424)
            described = (await served.client.get("/adapters/one")).json()
            assert described == {"name": "one", "src": str(src), "preload": False, "pin": False}
    served.engine.fails_to_load = False
    await ask(served, "one")
    assert (len(served.engine.loaded), await loaded(served)) == (1, 1)


async def test_an_update_that_cannot_be_pinned_leaves_nothing_in_the_engine(served, root):
    await register(served, "one", write(root / "one"))

    async def refuse(name):
        raise AdapterFailed("the engine cannot pin it")

    served.engine.pin_adapter = refuse
    try:
        parameters = {"src": str(write(root / "two", content=1)), "pin": "true"}
        answer = await served.client.post("/adapters/one/update", params=parameters)
        assert answer.status_code == 424
        assert (served.engine.loaded, await loaded(served)) == ([], 0)
    finally:
        del served.engine.pin_adapter


@pytest.mark.parametrize("seed", range(3))
async def test_random_lives(served, root, seed):
    """Random calls run at once, clients leave, and loads succeed or fail. No request gets another
    version, no slot is lost, and the engine has exactly the adapters that the registry counts as
    loaded.
    """
    chance = random.Random(seed)
    folders = {name: [write(root / f"{name}{n}", n) for n in range(3)] for name in "abcd"}
    engine, statuses = served.engine, set()

    async def weather():
        """Let loads end at once, take long, or fail, by turns."""
        while True:
            engine.fails_to_load = chance.random() < 0.3
            (engine.may_load.set if chance.random() < 0.4 else engine.may_load.clear)()
            await asyncio.sleep(chance.random() / 10)

    async def act(name, src):
        match chance.randrange(8):
            case 0:
                parameters = {"name": name, "src": src, "preload": chance.choice(("", "true"))}
                return await served.client.post("/adapters", params=parameters)
            case 1:
                parameters = {"src": src, "preload": chance.choice(("", "true"))}
                return await served.client.post(f"/adapters/{name}/update", params=parameters)
            case 2:
                return await served.client.delete(f"/adapters/{name}")
        answer = await served.invoke({"prompt": "a"}, headers={IDENTIFIER: name})
        assert answer.status_code in (200, 424)
        assert answer.status_code == 424 or answer.json()["model"] == name
        return answer

    async def live():
        for _ in range(40):
            name = chance.choice("abcd")
            patience = chance.choice((None, 0.05))  # of a client that leaves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    answer = await act(name, str(chance.choice(folders[name])))
                    statuses.add(answer.status_code)
            assert len(engine.loaded) <= 2

    blowing = asyncio.create_task(weather())
    await asyncio.gather(*(live() for _ in range(6)))
    blowing.cancel()
    engine.fails_to_load = False
    engine.may_load.set()
    adapters = served.pipeline.adapters
    assert statuses <= {200, 404, 409, 424}
    async with asyncio.timeout(60):  # loads for clients that have left must also end
        while (
            any(it.wanted for it in adapters.listed())
            or {*engine.loaded} != {it.inner for it in adapters.listed() if it.loaded}
            or await loaded(served) != len(engine.loaded)
        ):
            await asyncio.sleep(0.01)
    for it in adapters.listed():
        await ask(served, it.name)
    assert await loaded(served) == len(engine.loaded) == min(2, len(adapters.listed()))
    assert engine.misused == []
    pairs = {(body["model"], body["cache_salt"]) for body in engine.bodies}
    assert len({model for model, _ in pairs}) == len(pairs)


def of_size(folder, name, size):
    """An archive of an adapter with code, of about this number of bytes."""
    path = folder / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file, content in (
            ("adapter_config.json", b"{}"),
            ("model.py", b"# " + name.encode()),
            ("adapter_model.safetensors", os.urandom(size)),
        ):
            info = tarfile.TarInfo(file)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def test_servers_that_share_a_folder_keep_each_others_adapters(tmp_path):
    """Two containers with one volume, both of port 8080: this process, and others."""
    store = tmp_path / "downloads" / "adapters-8080"
    one, two, three = (of_size(tmp_path, it, 600_000) for it in ("one", "two", "three"))
    first = AdapterFiles((tmp_path,), (), store, 1_000_000)
    copy = first.fetch(first.locate(one))
    second = AdapterFiles((tmp_path,), (), store, 1_000_000)
    with pytest.raises(NoSlot):  # the first one's files count
        second.fetch(second.locate(two))
    assert (copy.folder / "model.py").read_text() == "# one"
    with pytest.raises(NoSlot):
        first.fetch(first.locate(two))
    again = second.fetch(second.locate(one))  # both use it
    copy.release()
    with pytest.raises(NoSlot):
        first.fetch(first.locate(three))
    again.release()
    third = first.fetch(first.locate(three))
    assert (third.folder / "model.py").read_text() == "# three"
    assert not copy.folder.exists()
    third.release()


def test_a_server_that_died_holds_nothing(tmp_path):
    store = tmp_path / "store"
    one, two = (of_size(tmp_path, it, 600_000) for it in ("one", "two"))
    child = (
        "import os, sys; from pathlib import Path; "
        "from serving.lora.adapter_files import AdapterFiles; "
        "f = AdapterFiles((Path(sys.argv[1]),), (), Path(sys.argv[2]), 1_000_000); "
        "f.fetch(f.locate(sys.argv[3])); print('fetched', flush=True); "
        "sys.stdin.read(); os._exit(9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", child, str(tmp_path), str(store), one],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdout.readline() == b"fetched\n"
    files = AdapterFiles((tmp_path,), (), store, 1_000_000)
    with pytest.raises(NoSlot):
        files.fetch(files.locate(two))
    process.communicate()
    files.fetch(files.locate(two)).release()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
async def test_a_model_that_is_not_registered_does_not_reach_the_engine(served, root, path):
    """The engine may have more adapters than the registry."""
    await register(served, "one", write(root / "one"))
    served.engine.loaded.append("outside")
    given = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    for name in ("outside", "one@0123456789abcdef", "nobody"):
        answer = await served.post(path, given | {"model": name})
        assert answer.status_code == 404, answer.text
        assert "does not exist" in answer.text
    assert not served.engine.bodies
    for name in (None, *served.engine.names):
        assert (await served.post(path, given | {"model": name})).status_code == 200
    if path != "/invocations":
        answer = await served.post(path, given | {"model": "outside"})
        assert answer.json()["error"]["code"] in (404, "model_not_found")
