# SPDX-License-Identifier: Apache-2.0
"""The command line, through settings.read() as the verbs do it."""

import pytest

from lmi_config.options import arguments
from lmi_config.options.declared import OPTIONS
from lmi_config.options.settings import SettingsError, read


def settings(*words, verb="serve", **environ):
    return read(environ, arguments.read(verb, words))


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("org/m",), "model_id", "org/m"),
        (("org/m", "--max-model-len", "8k"), "max_model_len", 8000),
        (("--max-model-len=8k", "org/m"), "model_id", "org/m"),
        (("--max_model_len", "8k"), "max_model_len", 8000),
        (("--max-model-len", "-1"), "max_model_len", -1),
        (("--model", "org/m"), "model_id", "org/m"),
        (("--model-id", "org/m"), "model_id", "org/m"),
        (("--port", "1", "--port", "2"), "port", 2),
        (("--tensor-parallel-size", "2"), "tensor_parallel_degree", 2),
        (("-tp", "2", "org/m"), "model_id", "org/m"),
        (("-tp", "2", "org/m"), "tensor_parallel_degree", 2),
        (("--enable-lora", "org/m"), "model_id", "org/m"),
        (("--enable-lora", "org/m"), "enable_lora", True),
        (("--enable-lora", "false"), "enable_lora", False),
        (("--no-enable-lora",), "enable_lora", False),
        (("--no-normalize",), "normalize", False),
        (("--no-enable-prefix-caching", "org/m"), "engine", {"enable_prefix_caching": False}),
        (("--seed", "7", "--load-format", "dummy"), "engine", {"seed": 7}),
        (("--served-model-name", "a", "b", "--port", "1"), "served_model_name", ("a", "b")),
        (("--served-model-name", "a,b", "--port", "1"), "served_model_name", ("a", "b")),
        (("--job-queue-size", "9"), "job_queue_size", 9),
        (("--rolling-batch", "auto", "org/m"), "model_id", "org/m"),
        (("--speculative-config", '{"method":"ngram"}'), "speculative_config", {"method": "ngram"}),
        (("--log-format", "text"), "log_format", "text"),
        (("--max-num-seq", "9", "org/m"), "max_rolling_batch_size", 9),  # as argparse has it
        (("--max_num_seq=9",), "max_rolling_batch_size", 9),
        (("--enforce", "org/m"), "enforce_eager", True),
        (("-O3",), "engine", {"optimization_level": "3"}),
        (("-O=2", "org/m"), "engine", {"optimization_level": "2"}),
        (("-O", "1", "org/m"), "model_id", "org/m"),
        (("-sc", '{"method":"ngram"}'), "speculative_config", {"method": "ngram"}),
        (
            ("--limit-mm-per-prompt.image", "2", "--limit_mm_per_prompt.video=0"),
            "engine",
            {"limit_mm_per_prompt": '{"image": 2, "video": 0}'},
        ),
        (
            ("-cc.mode", "3", "org/m", "-cc.pass.fuse=true", "-cc.sizes+", "a,b"),
            "engine",
            {"compilation_config": '{"mode": 3, "pass": {"fuse": true}, "sizes": ["a", "b"]}'},
        ),
    ],
)
def test_words_become_options(words, field, value):
    assert getattr(settings(*words), field) == value


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--max-model-len", "abc"), "--max-model-len='abc': should be a number of tokens"),
        (
            ("--max-modle-len", "5"),
            "--max-modle-len: no such option; did you mean --max-model-len?",
        ),
        (
            ("--job-qeue-size", "5"),
            "--job-qeue-size: no such option; did you mean --job-queue-size?",
        ),
        (("--api-key", "hush"), "--api-key=(hidden): should be at least 8 characters of ASCII"),
        (("--port",), "--port: needs a value"),
        (("-cc.mode",), "-cc.mode: needs a value"),
        (("-cc.a", "1", "-cc.a.b", "2"), "-cc.a.b: a has a value already; keep one"),
        (("--uds", "a"), "--uds: vLLM has this option, but its own HTTP server is not used"),
        (("--made-up.key", "1"), "--made-up.key: no such option"),
        (("--port.x", "1"), """--port.x='{"x": 1}': should be a whole number"""),
        (("--port", "--host", "::"), "--port: needs a value"),
        (("a", "b"), "a b: only one word is the model; options are flags, like --max-model-len"),
        (("a", "--model-id", "b"), "a b: only one word is the model"),
        (("a", "--model", "b"), "MODEL='a' and --model='b' set the same option to different"),
    ],
)
def test_faults_name_the_flag_as_it_was_typed(words, fault):
    with pytest.raises(SettingsError) as raised:
        settings(*words)
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        ("--shutdown-timeout", "60"),
        ("--api-server-count=2",),
        ("-asc", "2"),
        ("--enable-ssl-refresh",),
        ("--enable-request-id-headers",),
        ("--h11-max-header-count", "9"),
    ],
)
def test_flags_that_only_do_nothing_are_noted(words):
    flag = words[0].partition("=")[0]
    (note,) = settings("some/model", *words).notes
    assert note.startswith(f"{flag} has no effect here"), note


@pytest.mark.parametrize(
    ("words", "environ", "field", "value"),
    [
        (("a",), {"HF_MODEL_ID": "b", "OPTION_MODEL": "c"}, "model_id", "a"),
        (("--port", "1"), {"SAGEMAKER_BIND_TO_PORT": "2"}, "port", 1),
        (("-tp", "1"), {"TENSOR_PARALLEL_DEGREE": "2"}, "tensor_parallel_degree", 1),
        (("--seed", "1"), {"OPTION_SEED": "2", "SM_VLLM_SEED": "3"}, "engine", {"seed": 1}),
        (("--enforce-eager",), {"ENABLE_CUDA_GRAPHS": "1"}, "enforce_eager", True),
    ],
)
def test_what_is_typed_comes_before_the_environment(words, environ, field, value):
    read = settings(*words, **environ, OPTION_REVISION="kept", SEED="none of ours")
    assert getattr(read, field) == value
    assert read.revision == "kept"
    assert [note.partition(" ")[0] for note in read.notes] == sorted(environ)
    assert all(note.endswith("comes first") for note in read.notes)


def test_what_is_typed_comes_before_files(tmp_path):
    (tmp_path / "serving.properties").write_text("option.max_model_len=5\noption.seed=9\n")
    read = settings(str(tmp_path), "--max-model-len", "6")
    assert (read.max_model_len, read.engine) == (6, {"seed": 9})
    assert read.notes == (
        "serving.properties: option.max_model_len is set, but --max-model-len comes first",
    )
    assert read.origins["max_model_len"] == "--max-model-len"


def test_a_router_takes_its_replicas():
    read = settings("http://a:1", "b:2", "--port", "3", verb="route")
    assert (read.router_replicas, read.port) == ("http://a:1,b:2", 3)


def test_help_names_every_option_by_a_flag_that_is_taken():
    usage = arguments.usage("serve")
    flags = [line.strip() for line in usage.splitlines() if line.startswith("  --")]
    assert len(flags) == len(OPTIONS)
    names = {name for flag in flags for name in arguments.read("serve", [f"{flag}={{}}"])}
    assert len(names) == len(OPTIONS)
    declared = {name for option in OPTIONS.values() for name in (*option.names, option.vllm)}
    assert {name for name in names if name not in declared} == {
        f"OPTION_{name.upper()}" for name in ("download_dir", "otlp_traces_endpoint")
    }


def test_an_unknown_flag_that_is_ignored_says_that_it_took_the_word_after_it():
    notes = settings("--made-up", "org/m", "--new-switch", OPTION_STRICT="false").notes
    assert notes[-2].startswith("--made-up and the word after it are not known")
    assert notes[-1].startswith("--new-switch is not known")


@pytest.mark.parametrize(
    "given", ["test=file:{f}", "test=file://{f}/", "test={f}", "test::Python=file:{f}"]
)
@pytest.mark.parametrize("flag", ["-m", "--models"])
def test_lmis_flag_names_the_models_folder(tmp_path, flag, given):
    folder = tmp_path / "store" / "test"
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text("option.model_id=org/m\noption.max_model_len=5\n")
    (tmp_path / "store" / "another").mkdir()
    read = settings(
        flag, given.format(f=folder), SERVING_MODEL_STORE=str(tmp_path / "store"), HF_TOKEN="x"
    )
    assert (read.model_folder, read.model_id, read.max_model_len) == (folder, "org/m", 5)
    assert read.model_names == ("test", "lmi")


def test_lmis_flag_takes_weights_where_there_is_nothing_else(tmp_path):
    (tmp_path / "config.json").touch()
    read = settings("-m", f"file:{tmp_path}")
    assert (read.model_id, read.model_names[0]) == (str(tmp_path), tmp_path.name)
    assert settings("-m", "a:1=s3://b/c").model_id == "s3://b/c"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("-m",), "-m: needs a value"),
        (("-m", "a=file:/nowhere"), "-m 'a=file:/nowhere': there is no such folder"),
        (("-m", "a=djl://ai.djl/m"), "should be NAME=file:/FOLDER or NAME=s3://BUCKET/PREFIX"),
        (("-m", "a=https://h/m.tar.gz"), "should be NAME=file:/FOLDER or NAME=s3://BUCKET/PREFIX"),
        (("-m", "a=file:/,b=file:/"), "names several models; OPTION_MODELS does that"),
        (("-m", "a=file:/", "-m", "b=file:/"), "names several models"),
        (("-m", "a::PyTorch=file:/"), "chooses the engine PyTorch, but Slipway only runs vLLM"),
    ],
)
def test_what_lmis_flag_cannot_mean_here(words, fault):
    with pytest.raises(SettingsError) as raised:
        settings(*words)
    assert fault in str(raised.value)


def test_flags_of_vllms_http_server_that_do_no_harm_are_noted():
    read = settings(
        *("--disable-uvicorn-access-log", "org/m", "--uvicorn-log-level", "warning"),
        *("--port", "1"),
        SM_VLLM_DISABLE_FASTAPI_DOCS="true",
    )
    assert (read.model_id, read.port, read.engine) == ("org/m", 1, {})
    assert [note.partition(" has no effect here: ")[0] for note in read.notes] == [
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level",
        "SM_VLLM_DISABLE_FASTAPI_DOCS",
    ]
