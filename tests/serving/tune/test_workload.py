# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from serving.tune import workload
from serving.tune.workload import Level, WorkloadError

LEAST = {"isl": 100, "osl": 20, "concurrency": 4}


def test_sagemakers_specification_and_plain_parameters_say_the_same(tmp_path):
    parameters = {
        "prompt_input_tokens_mean": 550,
        "prompt_input_tokens_stddev": 150,
        "output_tokens_mean": 150,
        "concurrency": [100, 1],
        "streaming": True,
        "tokenizer": "org/model",
    }
    file = tmp_path / "workload.json"
    file.write_text(json.dumps({"benchmark": {"type": "aiperf"}, "parameters": parameters}))
    found = workload.read(file)
    assert found == workload.parsed({f"--{k.replace('_', '-')}": v for k, v in parameters.items()})
    assert (found.input, found.input_stddev, found.output) == (550, 150, 150)
    assert found.levels == (Level(1, None), Level(100, None))
    assert [found.requests(it) for it in found.levels] == [10, 1000]
    assert [found.warm_ups(it) for it in found.levels] == [1, 100]


def test_a_rate_may_be_bounded():
    found = workload.parsed({**LEAST, "request_rate": [2.5, 1]})
    assert found.levels == (Level(4, 1.0), Level(4, 2.5))
    assert [str(it) for it in found.levels] == ["1/s, 4 users", "2.5/s, 4 users"]
    assert [found.requests(it) for it in found.levels] == [20, 50]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a: [", "not YAML"),
        ("a: !!timestamp b", "not YAML: a value is not of its type"),
        ("- a", "should have lines like `concurrency: 16`"),
        ("concurency: 4", "concurency: no such key; did you mean concurrency?"),
        ("isl: 4\nconcurrency: 1", "output_tokens_mean: is missing"),
        ("isl: 4\nosl: 4", "concurrency: is missing, and so is request_rate"),
        ("isl: x", "isl: 'x': should be a whole number from 1 on"),
        ("isl: true", "isl: True: should be a whole number"),
        ("concurrency: []", "concurrency: []: should be a number or a list of them"),
        ("request_rate: 0", "request_rate: 0: should be requests/s, more than 0"),
        ("isl: 4\nprompt_input_tokens_mean: 4", "is given twice, by two of its names"),
        ("streaming: false", "only a stream tells"),
        ("endpoint_type: embeddings", "should be chat or completions"),
        ("benchmark_duration: 60", "a load here ends after request_count requests"),
        ("goodput: 'x:1'", "objectives are options here: --slo-ttft-ms"),
        ("schemaVersion: '2.0'\nbenchmark: {}", "which `aiperf` runs itself"),
        ("benchmark: {type: other}\nparameters: {}", 'should be {"type": "aiperf"}'),
        ("parameters: {}\nother: 1", "other: not known beside `parameters`"),
        ("{isl: 4, osl: 4, concurrency: 1, prefix_prompt_length: 9}", "give both, or neither"),
        (
            "{isl: 4, osl: 4, concurrency: [1, 2], request_rate: 1}",
            "give a list for one of them",
        ),
        ("{isl: 4, osl: 4, concurrency: 1, isl_stddev: 4}", "input: a stddev of 4 is too large"),
        (
            "{isl: 4, osl: 4, concurrency: 1, osl_stddev: 1, num_prefix_prompts: 1, "
            "prefix_prompt_length: 9}",
            "leave the stddev out",
        ),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path, content, told):
    file = tmp_path / "workload.yaml"
    file.write_text(content)
    with pytest.raises(WorkloadError) as found:
        workload.read(file)
    assert str(found.value).startswith(str(file))
    assert told in str(found.value)


def test_all_faults_come_at_once(tmp_path):
    with pytest.raises(
        WorkloadError, match=r"a: no such key; .*isl: 0: should be.* concurrency: is"
    ):
        workload.parsed({"a": 1, "isl": 0, "osl": 1})
    with pytest.raises(WorkloadError, match="No such file"):
        workload.read(tmp_path / "none")
