# SPDX-License-Identifier: Apache-2.0
"""The verb, with servers that start nothing and loads with known figures."""

import dataclasses
import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from lmi_config.options import arguments
from lmi_config.options.settings import SettingsError
from serving.server.prepare import prepare
from serving.tune import load, tune, workload
from serving.tune.load import LoadError, Measured, Objectives
from serving.tune.tuned_server import StartError
from serving.tune.workload import Level
from tests.lmi_config.facts.test_model import safetensors
from tests.test_entrypoint import CONFIG

WORKLOAD = {"isl": 20, "osl": 5, "concurrency": [1, 8]}


class World:
    """speed: returns a configuration's tokens/s, or None if its server does not start."""

    def __init__(self):
        self.started = []
        self.loads = []
        self.speed = lambda _: 100.0
        self.ends = False

    def server(self, options, environ, log, scheme):
        self.started.append(Fake(self, yaml.safe_load(options.read_text()) or {}, environ))
        return self.started[-1]

    def run(self, words, level, *, result, log, key):
        asked = self.started[-1].options
        self.loads.append((words, key))
        speed = self.speed(asked)
        if isinstance(speed, BaseException):
            raise speed
        return Measured(str(level), 10, 5, 10.0 * level.users, 1, 2, speed * level.users)


class Fake:
    url = "http://127.0.0.1:1"

    def __init__(self, world, options, environ):
        self.world, self.options, self.environ = world, options, environ

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ready(self):
        if self.world.speed(self.options) is None:
            raise StartError("no room for the KV cache")

    def ended(self):
        return self.world.ends

    def reason(self):
        return "the engine died"


@pytest.fixture
def world(monkeypatch):
    found = World()
    monkeypatch.setattr(tune, "Server", found.server)
    monkeypatch.setattr(load, "run", found.run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return found


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [2, 3])}))
    return folder


@pytest.fixture
def called(tmp_path, model, world):
    """Call the verb. Returns its exit code, and the folder of its results."""

    def call(*words, asked=WORKLOAD, **environ):
        file = tmp_path / "workload.yaml"
        file.write_text(yaml.safe_dump(asked))
        results = tmp_path / "results"
        own = ["--workload", str(file), f"--results={results}"]
        return tune.tune([str(model), *own, *words], environ), results

    return call


def chosen(results):
    return yaml.safe_load((results / "slipway.yaml").read_text())


def test_the_best_configuration_is_written_as_serve_reads_it(called, world, model, capsys):
    world.speed = lambda it: 100 / it.get("max_num_seqs", 8)
    words = ["--max-model-len", "256", "--enable-lora", "--api-key", "key-of-no-one"]
    environ = {"OPTION_KV_CACHE_MEMORY_BYTES": "100000000"}
    code, results = called(*words, **environ)
    assert code == 0
    assert chosen(results) == {
        "model_id": str(model),
        "max_model_len": 256,
        "enable_lora": True,
        "max_num_seqs": 2,
    }
    assert [it.options.get("max_num_seqs") for it in world.started] == [None, 4, 2, None]
    assert all(it.environ["OPTION_API_KEY"] == "key-of-no-one" for it in world.started)
    assert {key for _, key in world.loads} == {"key-of-no-one"}
    told = capsys.readouterr().out
    assert "max_num_batched_tokens: not tried (2,048 as planned; all prompts at once have" in told
    assert "3, max_num_seqs: 2: 400.0 tokens/s at 8 users, 4.00 x as planned" in told
    assert "key-of-no-one" not in told + "".join(it.read_text() for it in results.iterdir())
    argued = arguments.read("serve", ["--config", str(results / "slipway.yaml")])
    same = arguments.read("serve", [str(model), *words[:3], "--max-num-seqs=2"])
    assert prepare(environ, argued).plan.options == prepare(environ, same).plan.options


def test_a_configuration_that_fails_is_a_row_and_not_the_end(called, world, capsys):
    world.speed = lambda it: None if "max_num_seqs" not in it else 50.0
    code, results = called()
    assert code == 0
    assert chosen(results)["max_num_seqs"] == 4
    assert "failed: no room for the KV cache" in capsys.readouterr().out


@pytest.mark.parametrize("ends", [False, True])
def test_a_load_that_fails(called, world, ends, capsys):
    world.speed = lambda _: LoadError("3 of 10 requests failed: HTTP 503")
    world.ends = ends
    code, results = called()
    assert code == 1
    assert not (results / "slipway.yaml").exists()
    told = capsys.readouterr().out
    assert "no configuration could be measured" in told
    assert ("failed: the engine died" if ends else "1 user: 3 of 10 requests failed") in told


def test_what_misses_its_objectives_gets_no_more_load_and_is_not_chosen(called, world, capsys):
    code, results = called("--slo-ttft-ms", "9", asked={**WORKLOAD, "concurrency": [1, 4, 8]})
    assert code == 1
    assert len(world.loads) == len(world.started)  # 10 ms with one user
    assert "--goodput" in world.loads[0][0]
    assert "no configuration meets the objectives" in capsys.readouterr().out
    assert not (results / "slipway.yaml").exists()
    picture = ET.fromstring((results / "tune.svg").read_text())
    assert "objective: 9 ms" in "".join(picture.itertext())


def test_an_interrupted_sweep_goes_on(called, world, capsys):
    world.speed = lambda it: KeyboardInterrupt() if it.get("max_num_seqs") == 2 else 100.0
    code, results = called()
    first = [it.options for it in world.started]
    assert code == tune.INTERRUPTED
    assert "goes on after 2 configurations" in capsys.readouterr().out
    with (results / "sweep.jsonl").open("a") as file:
        file.write('{"options": {"max_nu')  # a machine that loses its power leaves such a file
    world.started.clear()
    world.speed = lambda _: 100.0
    assert called()[0] == 0
    assert [it.options for it in world.started] == first[2:]
    assert len((results / "sweep.jsonl").read_text().splitlines()) == 4


def test_the_results_of_another_sweep_are_not_mixed_in(called, world, capsys):
    assert called()[0] == 0
    assert called("--max-model-len=256")[0] == 2
    assert "has a sweep with other options; name another folder" in capsys.readouterr().err
    assert called(asked={**WORKLOAD, "osl": 6})[0] == 2
    assert "has a sweep with other workload;" in capsys.readouterr().err


def test_requests_that_are_too_long_for_the_model_are_noticed_first(called, world, capsys):
    assert called("--max-model-len=64", asked={**WORKLOAD, "osl": 60})[0] == 2
    told = capsys.readouterr().err
    assert "have up to 80 tokens together, and the longest request is of 64;" in told
    assert not world.started


def test_what_does_not_fit_is_never_started(called, world, capsys):
    code, _ = called(
        "--kv-disk-size=9999g",
        asked={**WORKLOAD, "num_prefix_prompts": 10**9, "prefix_prompt_length": 200},
    )
    assert code == 0
    assert "left out: " in capsys.readouterr().out
    assert not any("lmcache_auto_config" in it.options for it in world.started)


def test_options_of_slipway_yaml_are_kept_and_the_command_line_comes_first(called, world, model):
    (model / "slipway.yaml").write_text("max_model_len: 128\nseed: 5\n")
    (model / "serving.properties").write_text("option.max_rolling_batch_size=3\n")
    _, results = called("--max-model-len=256")
    assert chosen(results) == {"seed": 5, "model_id": str(model), "max_model_len": 256}
    assert len(world.started) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--workload FILE: is missing"),
        (["--workload"], "--workload: needs a value"),
        (["--workload={workload}", "--max-modle-len", "4"], "did you mean --max-model-len?"),
        (["--workload={workload}", "--task=embed"], "is for models that generate text"),
    ],
)
def test_wrong_calls(tmp_path, model, words, told):
    file = tmp_path / "workload.yaml"
    file.write_text(yaml.safe_dump(WORKLOAD))
    words = [it.format(workload=file) for it in words]
    with pytest.raises(SettingsError) as refused:
        tune.tune([str(model), *words], {})
    assert told in str(refused.value)


def becomes(asked, level, objectives):
    """The command line of a load: its flags with their values, and its words."""
    words = load.command(
        *(asked, level),
        url="https://h",
        model="m",
        tokenizer="t",
        seed=7,
        objectives=objectives,
        result=Path("/r/r.json"),
    )
    return dict(itertools.pairwise(words)), words


def test_a_workload_becomes_vllms_own_benchmark():
    asked = workload.parsed({**WORKLOAD, "isl_stddev": 5, "warmup_request_count": 3})
    flags, words = becomes(asked, Level(8, 2.5), Objectives(500, None))
    assert flags["--random-range-ratio"] == '{"input": 0.433013, "output": 0.0}'
    assert (flags["--max-concurrency"], flags["--request-rate"]) == ("8", "2.5")
    assert (flags["--num-prompts"], flags["--num-warmups"]) == ("50", "3")
    assert flags["--goodput"] == "ttft:500"
    assert "--insecure" in words


def test_prompts_that_share_their_beginnings():
    shared = {"num_prefix_prompts": 4, "prefix_prompt_length": 90, "endpoint_type": "completions"}
    asked = workload.parsed({**WORKLOAD, **shared})
    flags, words = becomes(asked, Level(8, None), Objectives(None, None))
    assert flags["--prefix-repetition-prefix-len"] == "90"
    assert (flags["--dataset-name"], flags["--backend"]) == ("prefix_repetition", "openai")
    assert "--goodput" not in words
    assert "--request-rate" not in words


def test_requests_that_fail_are_told():
    raw = {"failed": 2, "completed": 8, "errors": ["", "Bearer abc\nrefused"]}
    with pytest.raises(LoadError, match=r"2 of 10 requests failed: Bearer \[secret\] refused"):
        load.measured(raw, Level(1, None))


def test_objectives_compare_the_worst():
    it = Measured("1 users", 10, 5, 10, 1, 2, 100)
    assert Objectives(20, 1).excess(it) == 2
    assert Objectives(20, None).excess(it) == 0.5
    assert Objectives(None, None).excess(dataclasses.replace(it, ttft_p99=9e9)) == 0
