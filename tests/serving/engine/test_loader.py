# SPDX-License-Identifier: Apache-2.0
"""vLLM's default loader, which waits for each file."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.weights import loader
from serving.sources.arriving import Sign, Unfetched
from tests.support.models import tiny

TENSORS = {
    f"model-{number}-of-3.safetensors": {f"layer.{number}.{part}": value for part in "ab"}
    for number, value in enumerate((1.0, 2.0, 3.0), 1)
}


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """File → its bytes."""
    import torch
    from safetensors.torch import save

    return {
        name: save({key: torch.full((2, 2), value) for key, value in of_file.items()})
        for name, of_file in TENSORS.items()
    }


@pytest.fixture
def sign(tmp_path):
    return Sign(tmp_path / "arriving")


@pytest.fixture
def waiting(contents, sign):
    """The loader as vLLM makes it, by the options of the command line."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor import model_loader

    loader.register()
    sizes = {name: len(content) for name, content in contents.items()}
    made = model_loader.get_model_loader(LoadConfig(**loader.options(sizes, sign.path)))
    assert isinstance(made, model_loader.DefaultModelLoader)
    return made


def weights(waiting, folder, **attributes):
    config = SimpleNamespace(model=str(folder), revision=None)
    return waiting.get_all_weights(config, SimpleNamespace(**attributes))


def expected():
    return [(name, value) for it in TENSORS.values() for name, value in it.items()]


def found(tensors):
    return sorted((name, float(tensor[0, 0])) for name, tensor in tensors)


def test_weights_are_read_while_later_ones_are_not_there(waiting, tmp_path, contents):
    first, second, third = contents
    (tmp_path / first).write_bytes(contents[first])
    coming = weights(waiting, tmp_path)
    read = [next(coming), next(coming)]
    assert found(read) == expected()[:2]

    def arrive():
        for name in (second, third):
            part = tmp_path / f"{name}.0a1b"
            part.write_bytes(contents[name])
            part.rename(tmp_path / name)

    arriving = threading.Timer(0.2, arrive)
    arriving.start()
    assert found([*read, *coming]) == expected()
    arriving.join()


def test_a_fetch_that_fails_ends_the_load(waiting, tmp_path, contents, sign):
    first, *_ = contents
    (tmp_path / first).write_bytes(contents[first])
    coming = weights(waiting, tmp_path)
    next(coming)
    sign.fail("an object changed; start again")
    with pytest.raises(Unfetched, match="an object changed; start again"):
        list(coming)


@pytest.mark.parametrize("attribute", loader._OWN_FILES)
def test_models_that_choose_other_files_wait_for_all(waiting, tmp_path, contents, sign, attribute):
    choices: dict[str, Any] = {
        "allow_patterns_overrides": ["model-*"],
        "secondary_weights": (),
        "is_unused_checkpoint_weight": lambda name: False,
    }
    choice = choices[attribute]
    for name, content in [*contents.items()][:2]:
        (tmp_path / name).write_bytes(content)
    sign.fail("gone")
    if choice:
        with pytest.raises(Unfetched):
            next(weights(waiting, tmp_path, **{attribute: choice}))
    name, content = [*contents.items()][2]
    (tmp_path / name).write_bytes(content)
    assert found(weights(waiting, tmp_path, **{attribute: choice})) == expected()


def test_the_order_of_files_is_vllms():
    from vllm.model_executor.model_loader import weight_utils

    from lmi_config.facts import model

    names = [f"model-{number}-of-{many}.safetensors" for number in (10, 2, 1) for many in (9, 11)]
    assert sorted(names, key=model._natural) == sorted(names, key=weight_utils._natural_sort_key)


def test_vllms_command_line_takes_the_options(contents, sign):
    from vllm.engine.arg_utils import EngineArgs

    from lmi_config.plan.vllm import arguments
    from serving.engine import vllm

    sizes = {name: len(content) for name, content in contents.items()}
    options = loader.options(sizes, sign.path)
    args = vllm.parse(arguments({"model": "/m", **options}))
    made = EngineArgs.from_cli_args(args)
    assert (made.load_format, made.model_loader_extra_config) == (
        options["load_format"],
        options["model_loader_extra_config"],
    )


REAL = """
import os, shutil, sys, threading
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.utils.network_utils import get_open_port

from serving.engine.patches.engine_core import plugin
from serving.engine.weights import loader
from serving.sources.arriving import Sign

source, folder = map(Path, sys.argv[1:])
sizes = {file.name: file.stat().st_size for file in sorted(source.glob("*.safetensors"))}
for file in source.iterdir():
    if file.name not in sizes:
        shutil.copy(file, folder)

def arrive():
    for name in sizes:
        shutil.copy(source / name, folder / f"{name}.part")
        (folder / f"{name}.part").rename(folder / name)

plugin.want(os.environ, loader=True)
options = loader.options(sizes, Sign(folder / "arriving").path)
config = EngineArgs(str(folder), enforce_eager=True, **options).create_engine_config()
assert not [*folder.glob("*.safetensors")]
torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    threading.Timer(1, arrive).start()
    model = get_model(vllm_config=config)
print("loaded", type(model).__name__)
"""


def test_vllm_makes_its_configuration_and_a_model_before_the_weights_are_there(tmp_path):
    """vLLM itself checks that every weight of the model has been loaded."""
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tiny.make_shards()), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "loaded LlamaForCausalLM"
