"""Adapters over a fake engine: the calls of SageMaker and LMI, bad input, and random lives."""

import asyncio
import contextlib
import functools
import io
import json
import random
import shutil
import tarfile
from pathlib import Path

import psutil
import pytest

from lmi_config.model import Tensor
from serving.adapter_files import AdapterFiles
from serving.adapters import Adapters
from serving.user_code import Limits, started
from tests.serving.conftest import running

MODULE = "model.layers.0.self_attn.q_proj"
BASE = {f"{MODULE}.weight": Tensor("BF16", (16, 8))}
LIMITS = Limits(seconds=2, handler_seconds=2, memory=2**30)
HEADER = {"X-Amzn-SageMaker-Adapter-Identifier": "one"}


def tensors(rank=2, wide=8, out=16, module=MODULE, dtype="F32"):
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": (dtype, [rank, wide]),
        f"{name}.lora_B.weight": (dtype, [out, rank]),
    }


def write(folder: Path, content=0, found=None, **config) -> Path:
    """An adapter whose weights are all the same byte."""
    header, end = {}, 0
    for name, (dtype, shape) in (tensors() if found is None else found).items():
        size = shape[0] * shape[1] * (4 if dtype == "F32" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    weights = len(text).to_bytes(8, "little") + text + bytes([content]) * end
    (folder / "adapter_model.safetensors").write_bytes(weights)
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "adapters"


def registry(engine, root, slots=(2, 2), limit=100) -> Adapters:
    files = AdapterFiles((root.resolve(),), ("mine",), root.parent / "store", 20_000)
    code = functools.partial(started, tokenizer=root, limits=LIMITS)
    return Adapters(engine, files, BASE, max_rank=16, slots=slots, limit=limit, code=code)


@pytest.fixture
async def served(root, shared):
    """A server with a registry of the test's own."""
    engine = shared.engine
    for kept in (engine.loads, engine.loaded, engine.bodies):
        kept.clear()
    engine.fails_to_load = False
    engine.gate.clear()
    engine.adapters = registry(engine, root)
    yield shared
    for it in engine.adapters.listed():
        await engine.adapters.unregister(it.name)
    engine.adapters = None
    engine.gate.set()


async def test_each_of_a_list_of_inputs_may_name_its_own(served, root):
    for name in ("one", "two"):
        await register(served, name, write(root / name))
    body = {"inputs": ["a b", "c d", "e f"], "adapters": ["one", "", "two"], "model": "one"}
    assert (await served.invoke(body)).json() == [
        {"generated_text": text} for text in ("b a", "d c", "f e")
    ]
    models = {it["prompt"]: it["model"].partition("@")[0] for it in served.engine.bodies}
    base = served.server.front.model_names[0]
    assert models == {"a b": "one", "c d": base, "e f": "two"}
    for wrong, message in (
        (body | {"adapters": 5}, "Expected `str | array | null`, got `int` - at `$.adapters`"),
        (body | {"adapters": []}, "a list of 0; inputs should be a list of as many"),
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
    told = await register(served, "one", src)
    assert told == {"status": "Adapter one registered"}
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
    name = served.server.front.model_names[0]
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
    told = await register(served, "one", write(root / "other", content=1), 409)
    assert told["code"] == 409
    assert "is registered with other content" in told["message"]


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
    await asyncio.sleep(0.1)
    assert len(served.engine.loaded) == 2
    assert not third.done()
    assert not gone.done()
    await ask(served, "one", 424)  # new requests do not see it any more
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
    served.engine.code = await started(base, base, LIMITS)
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
        await served.engine.code.stop()
        served.engine.code = None


async def test_code_that_cannot_be_loaded_refuses_the_adapter(served, root):
    (with_code(root / "one", "one") / "model.py").write_text("def broken(:\n")
    told = await register(served, "one", root / "one", 424)
    assert "model.py, line 1: invalid syntax" in told["message"]
    (root / "one" / "model.py").write_text("import no_such_module\n")
    told = await register(served, "one", root / "one", 424, preload="true")
    assert "No module named 'no_such_module' (model.py, line 1)" in told["message"]
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
    shutil.rmtree(root.parent / "store")  # what a cleaner of /tmp does
    assert (await ask(served, "two"))["model"] == "two"


def member(name, size=0, kind=tarfile.REGTYPE, target=""):
    found = tarfile.TarInfo(name)
    found.size, found.type, found.linkname = size, kind, target
    return found


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ([member("../outside")], 424, "is outside the destination"),
        ([member("model.py", kind=tarfile.SYMTYPE, target="/etc/passwd")], 424, "is a link"),
        ([member("model.py", kind=tarfile.LNKTYPE, target="/etc/passwd")], 424, "is a link"),
        ([member("pipe", kind=tarfile.FIFOTYPE)], 424, "is a link, or one too many"),
        ([member("bomb", 10**6)], 507, "OPTION_ADAPTER_DISK"),
        ([member(f"{n}") for n in range(1001)], 424, "one too many"),
        (None, 424, "Compressed file ended"),
    ],
)
async def test_a_bad_archive_harms_nobody(served, root, more, status, message):
    archive = packed(write(root / "one"), *(more or ()))
    if more is None:
        archive.write_bytes(archive.read_bytes()[:-50])
    told = await register(served, "one", archive, status)
    assert message in told["message"]
    assert sum(it.stat().st_size for it in (root.parent / "store").rglob("*")) < 100_000
    assert not (root.parent / "store" / "outside").exists()
    deeper = packed(write(root / "deeper"), within="deeper")
    told = await register(served, "one", deeper, 424)
    assert "has no adapter_model.safetensors" in told["message"]


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
    told = await register(served, "none", "s3://mine/nothing", 424)
    assert "there are no objects below it" in told["message"]


async def test_an_archive_from_s3(served, root, bucket):
    archive = packed(write(root / "one"))
    src = bucket(archive, "archives")
    await register(served, "one", f"{src}/one.tar.gz")
    assert (await ask(served, "one"))["model"] == "one"
    told = await register(served, "two", f"{src}/two.tar.gz", 424)
    assert "there is no such object" in told["message"]


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
    wrong = write(root / "wrong", found=tensors(rank=32))
    answer = await served.client.post("/adapters/one/update", params={"src": str(wrong)})
    assert answer.status_code == 424
    assert (await ask(served, "one"))["model"] == "one"


async def test_selection(served, root):
    await register(served, "one", write(root / "one"))
    inner = f"one@{served.engine.adapters.get('one').digest}"
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
        assert served.engine.bodies[-1]["model"] == served.server.front.model_names[0]
        assert "cache_salt" not in served.engine.bodies[-1]
    answer = await served.post("/v1/completions", {"prompt": "a", "model": inner})
    assert answer.status_code == 404
    models = (await served.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["fake", "one"]


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
    ({"name": "one", "src": "{root}/dora"}, 424, "use_dora is not supported"),
    ({"name": "one", "src": "{root}/int8"}, 424, "of type I8"),
    ({"name": "one", "src": "{root}/one", "pin": "perhaps"}, 400, "should be true or false"),
]


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
    write(root / "large", found=tensors(rank=32), r=32)
    write(root / "wrong", found=tensors(wide=9))
    write(root / "unknown", found=tensors(module="model.layers.7.q_proj"))
    write(root / "dora", use_dora=True)
    write(root / "int8", found=tensors(dtype="I8"))
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


@pytest.mark.parametrize("seed", range(3))
async def test_random_lives(served, root, seed):
    """Whatever is asked for at the same time: no request gets another version, no slot too many."""
    chance = random.Random(seed)
    folders = {name: [write(root / f"{name}{n}", n) for n in range(3)] for name in "abcd"}

    async def live():
        for _ in range(30):
            name = chance.choice("abcd")
            src = str(chance.choice(folders[name]))
            match chance.randrange(6):
                case 0:
                    await served.client.post("/adapters", params={"name": name, "src": src})
                case 1:
                    await served.client.post(f"/adapters/{name}/update", params={"src": src})
                case 2:
                    await served.client.delete(f"/adapters/{name}")
                case _:
                    answer = await served.invoke(
                        {"prompt": "a"}, headers={"X-Amzn-SageMaker-Adapter-Identifier": name}
                    )
                    assert answer.status_code in (200, 424)
                    assert answer.status_code == 424 or answer.json()["model"] == name
            assert len(served.engine.loaded) <= 2

    await asyncio.gather(*(live() for _ in range(6)))
    adapters = served.engine.adapters
    known = {it.inner for it in adapters.listed()}
    assert {*served.engine.loaded} <= known
    for it in adapters.listed():
        assert it.users == 0
        await ask(served, it.name)
    pairs = {(body["model"], body["cache_salt"]) for body in served.engine.bodies}
    assert len({model for model, _ in pairs}) == len(pairs)
