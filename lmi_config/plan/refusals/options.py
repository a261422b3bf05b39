# SPDX-License-Identifier: Apache-2.0
"""Options that vLLM refuses for any model: values, and options that exclude or need each other
(vllm/config/*.py, vllm/engine/arg_utils.py). Each has one rule. No rule refuses a configuration
that vLLM would accept: unknown values count as valid.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from lmi_config.options.spelling import nearest
from lmi_config.plan.refusals.given import Given, limits


class Rule(NamedTuple):
    """at: the path of the value at fault. wrong: whether vLLM refuses it. fix: vLLM's condition,
    and the fix.
    """

    at: str
    wrong: Callable[[Given], bool]
    fix: str


def faults(given: Given) -> Iterator[str]:
    """Yield a sentence for each refused option."""
    for rule in (*_CONFIGURATIONS, *_PARALLEL, *_CACHE, *_SPECULATION, *_OTHERS, *_GPUS):
        if rule.wrong(given):
            yield f"{given.shown(rule.at)}: {rule.fix}"
    yield from _keys(given)


def _keys(given: Given) -> Iterator[str]:
    """Yield keys that vLLM's configurations lack (extra="forbid" in vllm/config/utils.py)."""
    for name, known in limits()["keys"].items():
        for key, value in given.parsed(name).items():
            inner = known.get(key)
            more = value if inner and isinstance(value, dict) else {}
            wrong = [(key, known)] if key not in known else []
            wrong += [(it, inner) for it in more if it not in inner]
            for word, words in wrong:
                if (name, word) == ("pooler_config", "normalize"):
                    instead = "say use_activation"
                else:
                    near = nearest(word, words)
                    instead = f"did you mean {near}?" if near else "leave it out"
                yield f'{given.called(name)}: vLLM has no key "{word:.60}" in it; {instead}'


def _kinds(given: Given) -> bool:
    return bool(given.get("attention_config.backend_per_kind")) and any(
        it not in limits()["attention"]
        for it in given.parsed("attention_config")["backend_per_kind"] or ()
    )


_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


def _mode(given: Given) -> object:
    """Return the requested compilation mode, by its name."""
    mode = given.get("compilation_config.mode")
    if isinstance(mode, int) and 0 <= mode < len(_MODES):
        return _MODES[mode]
    return mode.upper() if isinstance(mode, str) else mode


def _opposed(given: Given) -> bool:
    ops = given.texts("compilation_config.custom_ops")
    return any(f"-{it[1:]}" in ops for it in ops if it.startswith("+"))


def _above(given: Given, path: str, least: float) -> bool:
    value = given.get(path)
    return isinstance(value, int | float) and value > least


def _graphs(given: Given) -> object:
    """Return the requested mode of CUDA graphs."""
    mode = given.get("compilation_config.cudagraph_mode")
    return mode.upper() if isinstance(mode, str) else mode


def _encoder(given: Given, key: str) -> bool:
    return given.on("compilation_config.cudagraph_mm_encoder") and given.below(
        f"compilation_config.{key}", 0
    )


def _largest_graph(given: Given) -> bool:
    sizes = given.numbers("cudagraph_capture_sizes")
    sizes = sizes or given.numbers("compilation_config.cudagraph_capture_sizes")
    most = given.number("max_cudagraph_capture_size") or given.number(
        "compilation_config.max_cudagraph_capture_size"
    )
    return given.gpus and bool(sizes and most) and most > max(sizes)


def _ordered_twice(given: Given) -> bool:
    first, second = given.parsed("ir_op_priority"), given.get("kernel_config.ir_op_priority")
    inner = second if isinstance(second, dict) else {}
    return any(first.get(it) and inner.get(it) for it in first)


_PROTON: dict[str, object] = {
    "data": "tree",
    "context": "shadow",
    "backend": None,
    "mode": None,
    "hook": None,
}
_PROTON |= {"output_format": None, "graph_attribution": False}


def _profiler(given: Given) -> object:
    return given.get("profiler_config.profiler")


def _proton(given: Given, key: str) -> object:
    """Return the value of an option of Proton's, or its default."""
    value = given.get(f"profiler_config.proton_{key}")
    return _PROTON[key] if value is None else value


def _proton_mode(given: Given) -> str:
    return str(_proton(given, "mode") or "").partition(":")[0].lower()


def _profiles_graphs(given: Given) -> bool:
    return (
        _profiler(given) == "proton"
        and given.gpus
        and given.get("enforce_eager") is not True
        and _graphs(given) not in ("NONE", 0)
        and _mode(given) != "NONE"
        and not given.has("optimization_level")
    )


def _histograms(given: Given, wrong: Callable[[list[object]], bool]) -> bool:
    each = given.parsed("custom_histogram_buckets").values()
    return any(wrong(it) for it in each if isinstance(it, list))


def _numbers(bounds: list[object]) -> list[float]:
    return [it for it in bounds if isinstance(it, int | float)]


def _spec(given: Given, key: str) -> object:
    return given.get(f"quantization_config.{key}")


def _quantization_names(given: Given) -> Iterator[object]:
    for kind in ("linear", "moe"):
        match _spec(given, kind):
            case str(name) if name not in limits()["online_quantization"]:
                yield name
            case dict(inner):
                yield from (inner[it] for it in ("weight", "activation") if inner.get(it))


def _no_such_spec(given: Given) -> bool:
    known = limits()["online_quantization"]
    names = {kind: _spec(given, kind) for kind in ("linear", "moe")}
    return any(
        isinstance(name, str) and name in known and kind not in known[name]
        for kind, name in names.items()
    )


def _targets(given: Given) -> dict[str, object]:
    found = _spec(given, "targets")
    return found if isinstance(found, dict) else {}


def _irregular(pattern: str) -> bool:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error:
        return pattern.startswith("re:")
    return False


_QUANTIZATION = "quantization_config"
_CONFIGURATIONS = (
    Rule(
        "attention_config.backend_per_kind",
        _kinds,
        f"its keys must be of {', '.join(limits()['attention'])}",
    ),
    Rule(
        "compilation_config.mode",
        lambda it: isinstance(it.get("compilation_config.mode"), str) and _mode(it) not in _MODES,
        f"must be one of {', '.join(_MODES)}",
    ),
    Rule(
        "compilation_config.compile_cache_save_format",
        lambda it: (
            it.get("compilation_config.compile_cache_save_format")
            not in (None, "binary", "unpacked")
        ),
        "must be binary or unpacked",
    ),
    Rule(
        "compilation_config.custom_ops",
        lambda it: any(
            op not in ("all", "none") and (len(op) < 2 or op[0] not in "+-")
            for op in it.texts("compilation_config.custom_ops")
        ),
        "its words must be all, none, +OP or -OP",
    ),
    Rule(
        "compilation_config.custom_ops",
        lambda it: (
            sum(op in ("all", "none") for op in it.texts("compilation_config.custom_ops")) > 1
        ),
        "has all or none in it more than once; keep one of them",
    ),
    Rule(
        "compilation_config.custom_ops",
        _opposed,
        "has + and - of the same operation; keep one of them",
    ),
    Rule(
        "compilation_config.backend",
        lambda it: (
            _mode(it) == "VLLM_COMPILE"
            and it.get("compilation_config.backend") not in (None, "", "eager", "inductor")
        ),
        'with the mode VLLM_COMPILE it must be "", eager or inductor',
    ),
    Rule(
        "compilation_config.decoder_replay_cudagraph_capture_sizes",
        lambda it: any(
            size <= 0
            for size in it.numbers("compilation_config.decoder_replay_cudagraph_capture_sizes")
        ),
        "its sizes must be above 0",
    ),
    Rule(
        "compilation_config.encoder_cudagraph_token_budgets",
        lambda it: any(
            size <= 0 for size in it.numbers("compilation_config.encoder_cudagraph_token_budgets")
        ),
        "its budgets must be above 0",
    ),
    Rule(
        "compilation_config.encoder_cudagraph_max_vision_items_per_batch",
        lambda it: _encoder(it, "encoder_cudagraph_max_vision_items_per_batch"),
        "must be at least 0",
    ),
    Rule(
        "compilation_config.encoder_cudagraph_max_frames_per_batch",
        lambda it: _encoder(it, "encoder_cudagraph_max_frames_per_batch"),
        "must be at least 0; leave it out to let vLLM choose",
    ),
    Rule(
        "max_cudagraph_capture_size",
        _largest_graph,
        "is more than the largest of cudagraph_capture_sizes; give one of them",
    ),
    *(
        Rule(
            flat,
            lambda it, flat=flat, path=path: it.has(flat) and it.has(path),  # type: ignore[misc]
            f"{path} says it, too, and vLLM accepts only one of them; keep one",
        )
        for flat, path in (
            ("attention_backend", "attention_config.backend"),
            ("cudagraph_capture_sizes", "compilation_config.cudagraph_capture_sizes"),
            ("enable_flashinfer_autotune", "kernel_config.enable_flashinfer_autotune"),
            ("max_cudagraph_capture_size", "compilation_config.max_cudagraph_capture_size"),
        )
    ),
    Rule(
        "ir_op_priority",
        _ordered_twice,
        "kernel_config orders the same operation; keep one of them",
    ),
    Rule(
        "ec_manager_config.manager_config",
        lambda it: (
            it.on("ec_manager_config.manager_config")
            and not it.has("ec_manager_config.encoder_cache_manager_cls")
        ),
        "needs encoder_cache_manager_cls beside it",
    ),
    *(
        rule
        for kind in ("ec", "kv")
        for rule in (
            Rule(
                f"{kind}_transfer_config.{kind}_role",
                lambda it, kind=kind: (  # type: ignore[misc]
                    it.get(f"{kind}_transfer_config.{kind}_role")
                    not in (None, *(f"{kind}_{role}" for role in ("producer", "consumer", "both")))
                ),
                f"must be {kind}_producer, {kind}_consumer or {kind}_both",
            ),
            Rule(
                f"{kind}_transfer_config.{kind}_connector",
                lambda it, kind=kind: (  # type: ignore[misc]
                    it.has(f"{kind}_transfer_config.{kind}_connector")
                    and not it.has(f"{kind}_transfer_config.{kind}_role")
                ),
                f"needs {kind}_role beside it: {kind}_producer, {kind}_consumer or {kind}_both",
            ),
        )
    ),
    Rule(
        "pooler_config.logit_sigma",
        lambda it: it.get("pooler_config.logit_sigma") == 0,
        "divides the logits, and cannot be 0",
    ),
    *(
        Rule(
            "pooler_config.pooling_type",
            lambda it, other=other: (  # type: ignore[misc]
                it.on("pooler_config.pooling_type") and it.has(f"pooler_config.{other}")
            ),
            f"{other} also sets it; keep one of them",
        )
        for other in ("seq_pooling_type", "tok_pooling_type")
    ),
    Rule(
        "pooler_config.pooling_type",
        lambda it: it.get("pooler_config.pooling_type") not in (None, "", *limits()["pooling"]),
        f"must be one of {', '.join(limits()['pooling'])}",
    ),
    Rule(
        "profiler_config.torch_profiler_activities",
        lambda it: it.has("profiler_config.torch_profiler_activities") and _profiler(it) != "torch",
        'is for "profiler": "torch"',
    ),
    Rule(
        "profiler_config.torch_profiler_activities",
        lambda it: (
            len(found := it.texts("profiler_config.torch_profiler_activities")) > len({*found})
        ),
        "names one twice",
    ),
    Rule(
        "profiler_config.torch_profiler_dir",
        lambda it: it.on("profiler_config.torch_profiler_dir") and _profiler(it) != "torch",
        'is for "profiler": "torch"',
    ),
    Rule(
        "profiler_config.profiler",
        lambda it: _profiler(it) == "torch" and not it.on("profiler_config.torch_profiler_dir"),
        "needs torch_profiler_dir beside it, a folder",
    ),
    Rule(
        "profiler_config.capture_torch_profiler",
        lambda it: it.on("profiler_config.capture_torch_profiler") and _profiler(it) != "torch",
        'is for "profiler": "torch"',
    ),
    Rule(
        "profiler_config",
        lambda it: (
            _profiler(it) != "proton"
            and (
                it.on("profiler_config.proton_profiler_dir")
                or any(_proton(it, key) != default for key, default in _PROTON.items())
            )
        ),
        'proton_… are for "profiler": "proton"',
    ),
    Rule(
        "profiler_config.profiler",
        lambda it: _profiler(it) == "proton" and not it.on("profiler_config.proton_profiler_dir"),
        "needs proton_profiler_dir beside it, a folder",
    ),
    Rule(
        "profiler_config.proton_profiler_dir",
        lambda it: "://" in str(it.get("profiler_config.proton_profiler_dir") or ""),
        "must be a folder of this machine",
    ),
    Rule(
        "profiler_config.profiler",
        lambda it: _profiler(it) == "proton" and not it.gpus,
        "vLLM has it for NVIDIA's GPUs only, and there is none here; take torch",
    ),
    Rule(
        "profiler_config.proton_graph_attribution",
        lambda it: (
            _profiler(it) == "proton"
            and bool(_proton(it, "graph_attribution"))
            and _proton(it, "data") != "tree"
        ),
        'needs "proton_data": "tree"',
    ),
    Rule(
        "profiler_config.proton_graph_attribution",
        lambda it: (
            _profiler(it) == "proton"
            and bool(_proton(it, "graph_attribution"))
            and _proton_mode(it) == "periodic_flushing"
        ),
        "and periodic_flushing exclude each other; leave one out",
    ),
    Rule(
        "profiler_config.proton_output_format",
        lambda it: (
            _profiler(it) == "proton"
            and _proton(it, "output_format") == "chrome_trace"
            and _proton(it, "data") != "trace"
        ),
        'needs "proton_data": "trace"',
    ),
    Rule(
        "profiler_config.proton_output_format",
        lambda it: (
            _profiler(it) == "proton"
            and _proton(it, "output_format") in ("hatchet", "hatchet_msgpack")
            and _proton(it, "data") != "tree"
        ),
        'needs "proton_data": "tree"',
    ),
    Rule(
        "profiler_config.proton_mode",
        lambda it: _profiles_graphs(it) and _proton_mode(it) == "pcsampling",
        "vLLM does it without CUDA graphs only; set OPTION_ENFORCE_EAGER=true",
    ),
    Rule(
        "profiler_config.profiler",
        lambda it: (
            _profiles_graphs(it)
            and _proton_mode(it) != "pcsampling"
            and not _proton(it, "graph_attribution")
        ),
        "needs proton_graph_attribution with CUDA graphs; set it or OPTION_ENFORCE_EAGER=true",
    ),
    Rule(
        _QUANTIZATION,
        lambda it: any(
            name not in limits()["quantization_keys"] for name in _quantization_names(it)
        ),
        f"its names must be of {', '.join(limits()['quantization_keys'])}",
    ),
    Rule(
        _QUANTIZATION,
        _no_such_spec,
        "vLLM has this way to quantise for moe only; name it there",
    ),
    Rule(
        f"{_QUANTIZATION}.targets",
        lambda it: _spec(it, "targets") is not None and not isinstance(_spec(it, "targets"), dict),
        'must be an object, like {"re:.*mlp.*": "fp8_per_tensor"}',
    ),
    Rule(
        f"{_QUANTIZATION}.targets",
        lambda it: any(
            not isinstance(name, str) or name not in limits()["online_quantization"]
            for name in _targets(it).values()
        ),
        f"its values must be of {', '.join(limits()['online_quantization'])}",
    ),
    Rule(
        f"{_QUANTIZATION}.targets",
        lambda it: any(map(_irregular, _targets(it))),
        "a key that begins with re: must be a regular expression",
    ),
    Rule(
        f"{_QUANTIZATION}.targets",
        lambda it: (
            _spec(it, "targets") is not None and bool(_spec(it, "linear") or _spec(it, "moe"))
        ),
        "and linear or moe exclude each other; keep one",
    ),
    Rule(
        "structured_outputs_config.disable_any_whitespace",
        lambda it: (
            it.on("structured_outputs_config.disable_any_whitespace")
            and it.get("structured_outputs_config.backend") not in ("xgrammar", "guidance")
        ),
        'needs "backend": "xgrammar" or "guidance"',
    ),
    Rule(
        "structured_outputs_config.disable_additional_properties",
        lambda it: (
            it.on("structured_outputs_config.disable_additional_properties")
            and it.get("structured_outputs_config.backend") != "guidance"
        ),
        'needs "backend": "guidance"',
    ),
    Rule(
        "custom_histogram_buckets",
        lambda it: any(
            name not in limits()["histograms"] for name in it.parsed("custom_histogram_buckets")
        ),
        f"its keys must be of {', '.join(limits()['histograms'])}",
    ),
    Rule(
        "custom_histogram_buckets",
        lambda it: _histograms(it, lambda bounds: not bounds),
        "a list of bounds cannot be empty",
    ),
    Rule(
        "custom_histogram_buckets",
        lambda it: _histograms(it, lambda bounds: any(isinstance(it, bool) for it in bounds)),
        "bounds must be numbers",
    ),
    Rule(
        "custom_histogram_buckets",
        lambda it: _histograms(it, lambda bounds: any(not it > 0 for it in _numbers(bounds))),
        "bounds must be above 0",
    ),
    Rule(
        "custom_histogram_buckets",
        lambda it: _histograms(
            it, lambda bounds: any(one >= other for one, other in pairwise(_numbers(bounds)))
        ),
        "bounds must rise from one to the next",
    ),
    Rule(
        "collect_detailed_traces",
        lambda it: it.on("collect_detailed_traces") and not it.on("otlp_traces_endpoint"),
        "needs OPTION_OTLP_TRACES_ENDPOINT, to where traces go",
    ),
    Rule(
        "watermark_config",
        lambda it: it.number("watermark_config.key") > 2**64 - 1,
        "its key must fit into 64 bits",
    ),
)


def _copies(given: Given) -> float:
    return given.number("data_parallel_size", 1)


def _ranks(given: Given) -> float:
    """The ranks of one copy of the model."""
    return (
        given.number("tensor_parallel_size", 1)
        * given.number("pipeline_parallel_size", 1)
        * given.number("prefill_context_parallel_size", 1)
    )


def _nodes(given: Given) -> float:
    return given.number("nnodes", 1)


def _external(given: Given) -> bool:
    return given.on("data_parallel_external_lb") or given.has("data_parallel_rank")


def _ranked(given: Given) -> bool:
    """Whether vLLM knows which of the copies this is, or can tell it by the machine's number."""
    inferred = _nodes(given) > 1 and _copies(given) > 1 and given.on("data_parallel_external_lb")
    return given.has("data_parallel_rank") or inferred


def _uneven_nodes(given: Given) -> bool:
    local, copies = given.number("data_parallel_size_local"), _copies(given)
    if _nodes(given) <= 1 or not local or local > copies or _external(given):
        return False
    return bool(_nodes(given) % (copies // local))


def _uneven_context(given: Given) -> bool:
    tensor = given.number("tensor_parallel_size", 1)
    prefill = given.number("prefill_context_parallel_size", 1)
    decode = given.number("decode_context_parallel_size", 1)
    return prefill == 1 and decode > 0 and bool(tensor % decode)


def _odd_context(given: Given) -> bool:
    tensor = given.number("tensor_parallel_size", 1)
    prefill = given.number("prefill_context_parallel_size", 1)
    decode = given.number("decode_context_parallel_size", 1)
    return prefill > 1 and decode not in (1, prefill, tensor * prefill)


def _microbatches(given: Given) -> float:
    return 2 if given.on("enable_dbo") else given.number("ubatch_size")


def _cpu_lists(given: Given) -> tuple[str, ...]:
    return given.texts("numa_bind_cpus")


_CPU_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


def _falling(cpus: str) -> bool:
    ranges = [part.split("-") for part in cpus.split(",") if _CPU_LIST.fullmatch(cpus)]
    return any(len(it) == 2 and int(it[0]) > int(it[1]) for it in ranges)


def _devices(given: Given) -> list[str]:
    text = given.get("device_ids")
    return [it.strip() for it in text.split(",")] if isinstance(text, str) and text else []


def _shown_gpus(given: Given) -> int | None:
    """Return the number of devices in CUDA_VISIBLE_DEVICES, or None."""
    shown = given.environ.get("CUDA_VISIBLE_DEVICES")
    return len(shown.split(",")) if shown and given.gpus else None


def _mixed(given: Given) -> bool:
    return len({it.isdigit() for it in _devices(given)}) > 1


def _beyond(given: Given) -> bool:
    count = _shown_gpus(given)
    ids = _devices(given)
    return bool(count and ids and all(it.isdigit() for it in ids)) and any(
        int(it) >= (count or 0) for it in ids
    )


def _eplb_async(given: Given) -> bool:
    return given.get("eplb_config.use_async") is not False


def _async_default() -> bool:
    return True


_FLASHINFER_MOE = ("flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm")
_PARALLEL = (
    Rule(
        "engram_config.dp_shared_memory",
        lambda it: (
            it.on("engram_config.dp_shared_memory") and it.get("engram_config.cpu_offload") is False
        ),
        'needs "cpu_offload": true',
    ),
    Rule(
        "engram_config.use_thp",
        lambda it: (
            it.on("engram_config.use_thp")
            and (
                it.get("engram_config.cpu_offload") is False
                or it.on("engram_config.dp_shared_memory")
            )
        ),
        'needs "cpu_offload": true, and no dp_shared_memory',
    ),
    Rule(
        "engram_config.dp_shared_memory",
        lambda it: it.on("engram_config.dp_shared_memory") and _copies(it) <= 1,
        "is for several copies; set OPTION_DATA_PARALLEL_SIZE or leave it out",
    ),
    Rule(
        "engram_config.dp_shared_memory",
        lambda it: it.on("engram_config.dp_shared_memory") and it.on("enable_elastic_ep"),
        "excludes elastic expert parallelism; leave one out",
    ),
    Rule(
        "engram_config.embedding_across_dp",
        lambda it: (
            it.on("engram_config.embedding_across_dp")
            and _copies(it) > 1
            and it.on("enable_elastic_ep")
        ),
        "excludes elastic expert parallelism; leave one out",
    ),
    Rule(
        "all2all_backend",
        lambda it: (
            it.get("moe_backend") in _FLASHINFER_MOE
            and it.get("all2all_backend") not in (None, "allgather_reducescatter", "naive", "pplx")
        ),
        "this moe_backend sends between ranks itself; leave it out",
    ),
    Rule(
        "eplb_config.policy",
        lambda it: (
            it.get("eplb_config.policy") not in (None, "default")
            and it.get("eplb_config.use_async") is not False
        ),
        'needs "use_async": false',
    ),
    Rule(
        "eplb_config.communicator",
        lambda it: (
            it.get("eplb_config.communicator") in ("torch_nccl", "pynccl") and _eplb_async(it)
        ),
        'needs "use_async": false; or choose torch_gloo or nixl',
    ),
    Rule(
        "eplb_config.log_balancedness_interval",
        lambda it: (
            it.on("eplb_config.log_balancedness")
            and it.has("eplb_config.log_balancedness_interval")
            and it.number("eplb_config.log_balancedness_interval", 1) <= 0
        ),
        "must be above 0",
    ),
    Rule(
        "enable_eplb",
        lambda it: it.on("enable_eplb") and not it.gpus,
        "vLLM balances experts on GPUs only, and there is none here; leave it out",
    ),
    Rule(
        "enable_eplb",
        lambda it: it.on("enable_eplb") and not it.on("enable_expert_parallel"),
        "needs OPTION_ENABLE_EXPERT_PARALLEL=true",
    ),
    Rule(
        "enable_eplb",
        lambda it: (
            it.on("enable_eplb")
            and it.number("tensor_parallel_size", 1)
            * it.number("prefill_context_parallel_size", 1)
            * _copies(it)
            <= 1
        ),
        "needs several ranks; raise OPTION_TENSOR_PARALLEL_DEGREE or leave it out",
    ),
    Rule(
        "eplb_config.num_redundant_experts",
        lambda it: it.on("eplb_config.num_redundant_experts") and not it.on("enable_eplb"),
        "needs OPTION_ENABLE_EPLB=true",
    ),
    Rule(
        "enable_elastic_ep",
        lambda it: it.on("enable_elastic_ep") and not it.on("enable_eplb"),
        "needs OPTION_ENABLE_EPLB=true",
    ),
    Rule(
        "enable_elastic_ep",
        lambda it: it.on("enable_elastic_ep") and it.number("pipeline_parallel_size", 1) > 1,
        "excludes pipeline parallelism; leave one out",
    ),
    Rule(
        "enable_elastic_ep",
        lambda it: (
            it.on("enable_elastic_ep") and (_external(it) or it.on("data_parallel_hybrid_lb"))
        ),
        "needs vLLM's own balancing over copies; leave data_parallel_external_lb, "
        "data_parallel_hybrid_lb and data_parallel_rank out",
    ),
    Rule(
        "enable_elastic_ep",
        lambda it: it.on("enable_elastic_ep") and _eplb_async(it) and "nixl" in it.machine.missing,
        "needs the package nixl, which is not installed; set OPTION_EPLB_CONFIG="
        '{"use_async": false}',
    ),
    Rule(
        "elastic_ep_max_dp_size",
        lambda it: (
            it.on("enable_elastic_ep")
            and it.has("elastic_ep_max_dp_size")
            and it.number("elastic_ep_max_dp_size") < _copies(it)
        ),
        "is below OPTION_DATA_PARALLEL_SIZE; raise it",
    ),
    Rule(
        "numa_bind_nodes",
        lambda it: any(node < 0 for node in it.numbers("numa_bind_nodes")),
        "nodes are numbered from 0",
    ),
    Rule(
        "numa_bind_cpus",
        lambda it: any(not _CPU_LIST.fullmatch(cpus) for cpus in _cpu_lists(it)),
        "must be lists of CPUs in numactl's form, like 0-3",
    ),
    Rule(
        "numa_bind_cpus",
        lambda it: any(map(_falling, _cpu_lists(it))),
        "a range of CPUs must rise",
    ),
    *(
        Rule(
            name,
            lambda it, name=name: it.on(name) and not it.on("numa_bind"),  # type: ignore[misc]
            "needs OPTION_NUMA_BIND=true",
        )
        for name in ("numa_bind_nodes", "numa_bind_cpus")
    ),
    Rule(
        "data_parallel_size_local",
        lambda it: it.number("data_parallel_size_local") > _copies(it),
        "is more than OPTION_DATA_PARALLEL_SIZE; lower it",
    ),
    Rule(
        "data_parallel_external_lb",
        lambda it: it.on("data_parallel_external_lb") and _copies(it) <= 1,
        "is for several copies; set OPTION_DATA_PARALLEL_SIZE or leave it out",
    ),
    Rule(
        "data_parallel_rank",
        lambda it: (
            it.has("data_parallel_rank")
            and not 0 <= it.number("data_parallel_rank") < max(_copies(it), 1)
        ),
        "must be from 0 to one less than OPTION_DATA_PARALLEL_SIZE",
    ),
    Rule(
        "data_parallel_rank",
        lambda it: it.has("data_parallel_rank") and _copies(it) <= 1,
        "is for several copies; set OPTION_DATA_PARALLEL_SIZE or leave it out",
    ),
    Rule(
        "data_parallel_external_lb",
        lambda it: it.on("data_parallel_external_lb") and not _ranked(it),
        "needs OPTION_DATA_PARALLEL_RANK, or OPTION_NNODES and OPTION_NODE_RANK",
    ),
    Rule(
        "data_parallel_size_local",
        lambda it: (
            _external(it)
            and it.has("data_parallel_size_local")
            and it.number("data_parallel_size_local") != 1
        ),
        "a copy with a separate rank is the only one in its process; set 1 or leave it out",
    ),
    Rule(
        "data_parallel_hybrid_lb",
        lambda it: it.on("data_parallel_hybrid_lb") and it.on("data_parallel_external_lb"),
        "and OPTION_DATA_PARALLEL_EXTERNAL_LB exclude each other; keep one",
    ),
    Rule(
        "data_parallel_hybrid_lb",
        lambda it: (
            it.on("data_parallel_hybrid_lb")
            and not _external(it)
            and _nodes(it) <= 1
            and not it.on("data_parallel_size_local")
        ),
        "needs OPTION_DATA_PARALLEL_SIZE_LOCAL, the copies on this machine",
    ),
    Rule(
        "enable_fault_tolerance",
        lambda it: it.on("enable_fault_tolerance") and not _external(it),
        "needs OPTION_DATA_PARALLEL_EXTERNAL_LB=true or OPTION_DATA_PARALLEL_RANK",
    ),
    Rule(
        "nnodes",
        lambda it: _nodes(it) > 1 and it.get("data_parallel_backend") not in (None, "mp"),
        "needs OPTION_DATA_PARALLEL_BACKEND=mp",
    ),
    Rule(
        "nnodes",
        lambda it: _nodes(it) > 1 and bool(_copies(it) * _ranks(it) % _nodes(it)),
        "all ranks together must be divisible by it",
    ),
    Rule(
        "node_rank",
        lambda it: _nodes(it) > 1 and not 0 <= it.number("node_rank") < _nodes(it),
        "must be from 0 to one less than OPTION_NNODES",
    ),
    Rule(
        "nnodes",
        lambda it: (
            _nodes(it) > 1
            and _copies(it) > 1
            and it.on("data_parallel_external_lb")
            and not it.has("data_parallel_rank")
            and bool(_nodes(it) % _copies(it))
        ),
        "does not tell which copy is where; set OPTION_DATA_PARALLEL_RANK on each machine",
    ),
    Rule("nnodes", _uneven_nodes, "must be divisible by the groups of machines with copies"),
    Rule(
        "nnodes",
        lambda it: (
            _nodes(it) > 1
            and it.get("distributed_executor_backend")
            not in (None, "mp", "uni", "external_launcher")
        ),
        "needs OPTION_DISTRIBUTED_EXECUTOR_BACKEND=mp, or none",
    ),
    Rule(
        "distributed_executor_backend",
        lambda it: (
            it.number("pipeline_parallel_size", 1) > 1
            and it.get("distributed_executor_backend") == "uni"
        ),
        "excludes pipeline parallelism; leave one out",
    ),
    Rule(
        "ray_workers_use_nsight",
        lambda it: (
            it.on("ray_workers_use_nsight")
            and it.get("distributed_executor_backend") in ("mp", "uni", "external_launcher")
        ),
        "needs OPTION_DISTRIBUTED_EXECUTOR_BACKEND=ray",
    ),
    Rule(
        "decode_context_parallel_size",
        _uneven_context,
        "OPTION_TENSOR_PARALLEL_DEGREE must be divisible by it",
    ),
    Rule(
        "decode_context_parallel_size",
        _odd_context,
        "beside prefill context parallelism it must be 1, as large as that, or as large as both "
        "that and tensor parallelism multiplied",
    ),
    *(
        Rule(
            name,
            lambda it, name=name: (  # type: ignore[misc]
                _microbatches(it) > 1 and it.below(name, _microbatches(it))
            ),
            "must be at least the number of micro-batches",
        )
        for name in ("dbo_decode_token_threshold", "dbo_prefill_token_threshold")
    ),
    Rule(
        "device_ids",
        lambda it: len(found := _devices(it)) > len({*found}),
        "names a device twice",
    ),
    Rule("device_ids", _mixed, "has numbers and identifiers; give one kind"),
    Rule("device_ids", _beyond, "must count within CUDA_VISIBLE_DEVICES, from 0 on"),
    Rule(
        "enable_hc_sp",
        lambda it: (
            it.on("enable_hc_sp") and it.number("tensor_parallel_size", 1) > 1 and not it.gpus
        ),
        "vLLM has it for GPUs only, and there is none here; leave it out",
    ),
    Rule(
        "enable_hc_sp",
        lambda it: (
            it.on("enable_hc_sp")
            and it.number("tensor_parallel_size", 1) > 1
            and it.number("pipeline_parallel_size", 1) != 1
        ),
        "excludes pipeline parallelism; leave one out",
    ),
    *(
        Rule(
            "expert_placement_strategy"
            if path == "expert_placement_strategy"
            else "all2all_backend",
            lambda it, path=path, right=right: (  # type: ignore[misc]
                it.get("all2all_backend") == "moonep" and it.get(path) not in right
            ),
            fix,
        )
        for path, right, fix in (
            ("enable_eplb", (None, False), "excludes OPTION_ENABLE_EPLB; leave one out"),
            (
                "expert_placement_strategy",
                (None, "linear"),
                "all2all_backend=moonep needs linear",
            ),
        )
    ),
    Rule(
        "all2all_backend",
        lambda it: (
            it.get("all2all_backend") == "moonep"
            and bool(it.get("quantization") or it.model.quantization)
        ),
        "is for models that are not quantised; choose another",
    ),
    Rule(
        "all2all_backend",
        lambda it: (
            it.get("all2all_backend") == "moonep"
            and it.get("dtype") not in (None, "auto", "bfloat16")
        ),
        "is for bfloat16 only; choose another, or OPTION_DTYPE=bf16",
    ),
    Rule(
        "enable_batch_sharded_sampling",
        lambda it: (
            it.on("enable_batch_sharded_sampling")
            and (
                it.number("tensor_parallel_size", 1) <= 1
                or it.below("max_num_seqs", it.number("tensor_parallel_size", 1))
                or it.below("max_logprobs", 0)
                or it.on("return_sampling_mask")
                or it.on("speculative_config.enable_adaptive_verification")
            )
        ),
        "needs several ranks, as many sequences (max_num_seqs), max_logprobs of at least 0, and "
        "neither return_sampling_mask nor enable_adaptive_verification",
    ),
)


def _hisparse(given: Given) -> bool:
    return (
        given.connectors("HiSparseConnector") > 0
        or given.get("attention_config.hisparse_config") is not None
    )


def _host_pool(given: Given) -> object:
    found = given.parsed("kv_transfer_config")
    extra = found.get("kv_connector_extra_config")
    inner = extra if isinstance(extra, dict) else {}
    each = [found, *(inner.get("connectors") or ())]
    for it in each:
        if isinstance(it, dict) and it.get("kv_connector") == "HiSparseConnector":
            return (it.get("kv_connector_extra_config") or {}).get("host_pool_gib")
    return None


def _variable(given: Given, name: str) -> bool | None:
    """A flag among vLLM's variables; None if it is not set."""
    value = given.environ.get(name)
    return value.strip() in ("1", "true", "True") if value else None


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def _second(given: Given) -> bool | None:
    """Whether vLLM uses its second model runner; None if that depends on more facts. It needs
    Triton, which needs a GPU.
    """
    if _hisparse(given) or given.has("watermark_config"):
        return True
    return _variable(given, _RUNNER) if _variable(given, _RUNNER) is not None else None


def _nixl(given: Given) -> bool:
    names = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
    return any(given.connectors(it) for it in (*names, "MoRIIOConnector", "MooncakeConnector"))


def _routed(given: Given) -> bool:
    return given.on("enable_return_routed_experts") or given.on(
        "aux_output_config.enable_return_routed_experts"
    )


def _adaptive(given: Given) -> bool:
    return given.on("speculative_config.enable_adaptive_verification")


def _generates(given: Given) -> bool:
    return bool(given.get("runner") != "pooling")


_CACHE = (
    Rule(
        "kv_transfer_config",
        lambda it: it.connectors("HiSparseConnector") > 1,
        "names HiSparseConnector twice; keep one",
    ),
    Rule(
        "kv_transfer_config",
        lambda it: it.connectors("HiSparseConnector") == 1 and _host_pool(it) is None,
        'HiSparseConnector needs "host_pool_gib" in its kv_connector_extra_config',
    ),
    Rule(
        "kv_transfer_config",
        lambda it: isinstance(pool := _host_pool(it), int | float) and pool <= 0,
        "HiSparseConnector's host_pool_gib must be above 0",
    ),
    *(
        Rule(
            "kv_transfer_config",
            lambda it, wrong=wrong: _hisparse(it) and wrong(it),  # type: ignore[misc]
            f"HiSparse {fix}",
        )
        for wrong, fix in (
            (lambda it: not it.gpus, "needs an NVIDIA GPU, and there is none here"),
            (
                lambda it: it.number("pipeline_parallel_size", 1) > 1,
                "excludes pipeline parallelism",
            ),
            (
                lambda it: it.number("decode_context_parallel_size", 1) > 1,
                "excludes decode context parallelism",
            ),
            (
                lambda it: _graphs(it) in ("FULL", 2),
                "needs another cudagraph_mode than FULL; leave it out",
            ),
            (
                lambda it: it.get("scheduler_reserve_full_isl") is False,
                "needs OPTION_SCHEDULER_RESERVE_FULL_ISL; leave it out",
            ),
            (
                lambda it: it.get("disable_hybrid_kv_cache_manager") is True,
                "needs vLLM's hybrid KV cache manager; leave "
                "OPTION_DISABLE_HYBRID_KV_CACHE_MANAGER out",
            ),
            (
                lambda it: _variable(it, _RUNNER) is False,
                f"needs vLLM's second model runner; leave {_RUNNER} out",
            ),
        )
    ),
    Rule(
        "kv_transfer_config",
        lambda it: (
            it.has("kv_transfer_config.kv_connector")
            and "expandable_segments:True" in it.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            and not it.on("enable_cumem_allocator")
            and not it.on("enable_sleep_mode")
        ),
        "KV in other places needs memory at a fixed address; leave expandable_segments out of "
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
    Rule(
        "offload_num_in_group",
        lambda it: (
            (it.get("offload_backend") == "prefetch" or it.number("offload_group_size") > 0)
            and it.number("offload_num_in_group", 1) > it.number("offload_group_size")
        ),
        "is more than OPTION_OFFLOAD_GROUP_SIZE; raise that",
    ),
    Rule(
        "offload_prefetch_step",
        lambda it: (
            (it.get("offload_backend") == "prefetch" or it.number("offload_group_size") > 0)
            and it.below("offload_prefetch_step", 1)
        ),
        "must be at least 1",
    ),
    Rule(
        "mamba_backend",
        lambda it: (
            str(it.get("mamba_backend") or "triton").lower() not in ("triton", "flashinfer", "cpu")
        ),
        "must be triton, flashinfer or cpu",
    ),
    Rule(
        "mamba_ssu_algorithm",
        lambda it: it.has("mamba_ssu_algorithm") and _mamba(it) != "flashinfer",
        "needs OPTION_MAMBA_BACKEND=flashinfer",
    ),
    Rule(
        "enable_mamba_cache_stochastic_rounding",
        lambda it: (
            it.on("enable_mamba_cache_stochastic_rounding")
            and it.get("mamba_ssm_cache_dtype") != "float16"
        ),
        "needs OPTION_MAMBA_SSM_CACHE_DTYPE=float16",
    ),
    Rule(
        "mamba_block_size",
        lambda it: (
            it.has("mamba_block_size")
            and it.get("mamba_block_size") != it.get("max_model_len")
            and it.get("enable_prefix_caching") is False
        ),
        "needs OPTION_ENABLE_PREFIX_CACHING=true",
    ),
    Rule(
        "replayssm_buffer_len",
        lambda it: (
            it.on("use_replayssm")
            and _mamba(it) == "flashinfer"
            and it.number("replayssm_buffer_len") > 16
        ),
        "must be at most 16 with OPTION_MAMBA_BACKEND=flashinfer",
    ),
    Rule(
        "use_replayssm",
        lambda it: (
            it.on("use_replayssm")
            and _mamba(it) == "flashinfer"
            and it.get("mamba_cache_mode") == "align"
        ),
        "needs OPTION_MAMBA_CACHE_MODE=none with OPTION_MAMBA_BACKEND=flashinfer",
    ),
    Rule(
        "use_replayssm",
        lambda it: it.on("use_replayssm") and _mamba(it) == "cpu",
        "needs OPTION_MAMBA_BACKEND=triton or flashinfer",
    ),
    Rule(
        "use_replayssm",
        lambda it: it.on("use_replayssm") and _second(it) is True and _mamba(it) == "triton",
        f"needs vLLM's first model runner; leave {_RUNNER} out",
    ),
    Rule(
        "use_replayssm",
        lambda it: it.on("use_replayssm") and it.has("kv_transfer_config.kv_connector"),
        "excludes KV connectors and KV cache tiers; leave one out",
    ),
    *(
        Rule(
            "use_replayssm",
            lambda it, wrong=wrong: _recovers(it) and wrong(it),  # type: ignore[misc]
            f"with a draft for this model, vLLM {fix}",
        )
        for wrong, fix in (
            (
                lambda it: it.on("enable_mamba_cache_stochastic_rounding"),
                "does not round its states at random; leave "
                "OPTION_ENABLE_MAMBA_CACHE_STOCHASTIC_ROUNDING out",
            ),
            (
                lambda it: it.number("pipeline_parallel_size", 1) > 1,
                "has it without pipeline parallelism only",
            ),
            (lambda it: _mamba(it) != "triton", "needs OPTION_MAMBA_BACKEND=triton"),
            (
                lambda it: it.get("mamba_cache_mode") == "align" and _second(it) is False,
                f"needs its second model runner; leave {_RUNNER} out",
            ),
        )
    ),
    *(
        Rule(
            "use_replayssm",
            lambda it, wrong=wrong: _replays(it) and wrong(it),  # type: ignore[misc]
            f"with a draft it needs {fix}",
        )
        for wrong, fix in (
            (
                lambda it: it.get("mamba_cache_mode") not in (None, "none"),
                "OPTION_MAMBA_CACHE_MODE=none",
            ),
            (
                lambda it: (
                    it.number("replayssm_buffer_len", 16)
                    < 1 + it.number("speculative_config.num_speculative_tokens")
                ),
                "an OPTION_REPLAYSSM_BUFFER_LEN above num_speculative_tokens",
            ),
            (lambda it: _mamba(it) != "flashinfer", "OPTION_MAMBA_BACKEND=flashinfer"),
        )
    ),
    Rule(
        "max_num_batched_tokens",
        lambda it: it.below("max_num_batched_tokens", it.number("max_num_seqs")),
        "is below OPTION_MAX_ROLLING_BATCH_SIZE; a step has at least a token of each sequence",
    ),
    Rule(
        "max_num_active_seqs",
        lambda it: (
            it.has("max_num_seqs") and it.number("max_num_active_seqs") > it.number("max_num_seqs")
        ),
        "is more than OPTION_MAX_ROLLING_BATCH_SIZE; lower it",
    ),
)


def _mamba(given: Given) -> str:
    return str(given.get("mamba_backend") or "triton").lower()


_KDA = {"KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"}


def _recovers(given: Given) -> bool:
    drafted = given.has("speculative_config")
    return given.on("use_replayssm") and drafted and bool({*given.model.architectures} & _KDA)


def _replays(given: Given) -> bool:
    """Whether there is speculation, and the model is known not to be one of the others."""
    names = given.model.architectures
    drafted = given.has("speculative_config")
    return given.on("use_replayssm") and drafted and bool(names) and not {*names} & _KDA


def _method(given: Given) -> object:
    """Return vLLM's current name of the method of speculation."""
    method = given.get("speculative_config.method")
    if method is None and given.get("speculative_config.model") in ("ngram", "[ngram]"):
        return "ngram"
    return "mtp" if method in limits()["mtp"] else method


def _speculates(given: Given) -> bool:
    return bool(given.parsed("speculative_config"))


_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states")
_ASYNCHRONOUS = ("eagle", "eagle3", "mtp", "ngram_gpu", "draft_model", "dspark", "dflash")
_SYNTHETIC = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def _tokens(given: Given) -> float:
    return given.number("speculative_config.num_speculative_tokens")


def _synthetic(given: Given) -> bool:
    return bool(given.get("speculative_config.rejection_sample_method") == "synthetic")


def _rates(given: Given) -> tuple[float, ...]:
    return given.numbers("speculative_config.synthetic_acceptance_rates")


def _lookup(given: Given) -> bool:
    least = given.get("speculative_config.prompt_lookup_min")
    most = given.get("speculative_config.prompt_lookup_max")
    both = isinstance(least, int) and isinstance(most, int)
    return both and _method(given) in ("ngram", "ngram_gpu") and least > most


def _suffix(given: Given) -> bool:
    return _method(given) == "suffix"


_OF = "speculative_config"
_SPECULATION = (
    Rule(
        f"{_OF}.tensor_parallel_size",
        lambda it: it.has(f"{_OF}.tensor_parallel_size"),
        "vLLM calls it draft_tensor_parallel_size; say that",
    ),
    Rule(
        f"{_OF}.draft_tensor_parallel_size",
        lambda it: (
            it.has(f"{_OF}.draft_tensor_parallel_size")
            and _method(it) not in (*_WITHOUT_DRAFT, "custom_class")
            and it.get(f"{_OF}.draft_tensor_parallel_size")
            not in (1, it.get("tensor_parallel_size"))
        ),
        "must be 1, or the model's OPTION_TENSOR_PARALLEL_DEGREE",
    ),
    Rule(
        f"{_OF}.method",
        lambda it: (
            _speculates(it)
            and not it.has(f"{_OF}.model")
            and it.has(f"{_OF}.num_speculative_tokens")
            and _method(it) not in (*_WITHOUT_DRAFT, "mtp", "dspark", "custom_class")
        ),
        'needs a draft; name it as "model", or take {"method": "ngram", …}',
    ),
    Rule(
        f"{_OF}.method",
        lambda it: _method(it) == "custom_class" and not it.has(f"{_OF}.model"),
        'needs the path of the class as "model", like my_module.MyProposer',
    ),
    Rule(
        f"{_OF}.method",
        lambda it: _method(it) == "mlp_speculator",
        "vLLM 0.32 has no MLP speculators any more; use an EAGLE-3 draft",
    ),
    Rule(
        f"{_OF}.method",
        lambda it: (
            _method(it) in ("ngram", "ngram_gpu", "extract_hidden_states", "custom_class")
            and not it.has(f"{_OF}.num_speculative_tokens")
        ),
        "needs num_speculative_tokens beside it, like 3",
    ),
    Rule(
        f"{_OF}.num_speculative_tokens",
        lambda it: (
            it.has(f"{_OF}.num_speculative_tokens") and it.below(f"{_OF}.num_speculative_tokens", 1)
        ),
        "must be above 0, like 3",
    ),
    Rule(f"{_OF}.prompt_lookup_min", _lookup, "is more than prompt_lookup_max; lower it"),
    Rule(
        f"{_OF}.method",
        lambda it: _suffix(it) and "arctic_inference" in it.machine.missing,
        "needs the package arctic-inference, which is not installed; take ngram",
    ),
    *(
        Rule(
            f"{_OF}.{key}",
            lambda it, key=key, least=least: (  # type: ignore[misc]
                _suffix(it) and it.below(f"{_OF}.{key}", least)
            ),
            f"must be at least {least}",
        )
        for key, least in (
            ("suffix_decoding_max_tree_depth", 1),
            ("suffix_decoding_max_cached_requests", 0),
            ("suffix_decoding_max_spec_factor", 0),
            ("suffix_decoding_min_token_prob", 0),
        )
    ),
    Rule(
        f"{_OF}.suffix_decoding_min_token_prob",
        lambda it: _suffix(it) and _above(it, f"{_OF}.suffix_decoding_min_token_prob", 1),
        "must be at most 1",
    ),
    Rule(
        f"{_OF}.rejection_sample_method",
        lambda it: _synthetic(it) and sum(it.has(f"{_OF}.{key}") for key in _SYNTHETIC) != 1,
        f"needs one of {' and '.join(_SYNTHETIC)} beside it",
    ),
    Rule(
        f"{_OF}.synthetic_acceptance_rates",
        lambda it: _synthetic(it) and bool(_rates(it)) and len(_rates(it)) != _tokens(it),
        "needs as many rates as num_speculative_tokens",
    ),
    Rule(
        f"{_OF}.synthetic_acceptance_rates",
        lambda it: _synthetic(it) and any(not 0 <= rate <= 1 for rate in _rates(it)),
        "rates must be from 0 to 1",
    ),
    Rule(
        f"{_OF}.synthetic_acceptance_rates",
        lambda it: _synthetic(it) and any(one < other for one, other in pairwise(_rates(it))),
        "rates cannot rise from one to the next",
    ),
    Rule(
        f"{_OF}.synthetic_acceptance_length",
        lambda it: (
            _synthetic(it)
            and it.has(f"{_OF}.synthetic_acceptance_length")
            and not 1 <= it.number(f"{_OF}.synthetic_acceptance_length", 1) <= _tokens(it) + 1
        ),
        "must be from 1 to one more than num_speculative_tokens",
    ),
    *(
        Rule(
            f"{_OF}.{key}",
            lambda it, key=key: it.has(f"{_OF}.{key}") and not _synthetic(it),  # type: ignore[misc]
            'is for "rejection_sample_method": "synthetic"',
        )
        for key in _SYNTHETIC
    ),
    Rule(
        f"{_OF}.dspark_draft_topk",
        lambda it: (
            it.has(f"{_OF}.dspark_draft_topk")
            and it.has(f"{_OF}.model")
            and _method(it) not in (None, "dspark", *_WITHOUT_DRAFT, "custom_class")
        ),
        'is for "method": "dspark"',
    ),
    Rule(
        f"{_OF}.dspark_draft_topk",
        lambda it: _method(it) == "dspark" and it.below(f"{_OF}.dspark_draft_topk", 1),
        "must be at least 1",
    ),
    Rule(
        f"{_OF}.index_share_for_mtp_iteration",
        lambda it: (
            it.has(f"{_OF}.index_share_for_mtp_iteration") and _method(it) not in (None, "mtp")
        ),
        'is for "method": "mtp"',
    ),
    Rule(
        f"{_OF}.enable_adaptive_verification",
        lambda it: (
            _adaptive(it)
            and it.on(f"{_OF}.use_local_argmax_reduction")
            and _method(it) not in (None, "dspark")
        ),
        "and use_local_argmax_reduction exclude each other; keep one",
    ),
    Rule(
        f"{_OF}.use_heterogeneous_vocab",
        lambda it: (
            it.on(f"{_OF}.use_heterogeneous_vocab") and _method(it) not in (None, "draft_model")
        ),
        'is for "method": "draft_model"',
    ),
    Rule(
        f"{_OF}.use_heterogeneous_vocab",
        lambda it: (
            it.on(f"{_OF}.use_heterogeneous_vocab")
            and it.get(f"{_OF}.draft_sample_method") not in (None, "greedy")
        ),
        'needs "draft_sample_method": "greedy"',
    ),
    *(
        Rule(
            f"{_OF}.enable_adaptive_verification",
            lambda it, wrong=wrong: _adaptive(it) and wrong(it),  # type: ignore[misc]
            fix,
        )
        for wrong, fix in (
            (lambda it: it.on("enable_lora"), "excludes adapters; leave one out"),
            (
                lambda it: it.number("pipeline_parallel_size", 1) > 1,
                "excludes pipeline parallelism; leave one out",
            ),
            (
                lambda it: (
                    not it.gpus
                    or it.get("enforce_eager") is True
                    or _graphs(it) in ("NONE", "PIECEWISE", 0, 1)
                ),
                "needs full CUDA graphs; leave it, or OPTION_ENFORCE_EAGER and cudagraph_mode, out",
            ),
        )
    ),
    Rule(
        "max_num_scheduled_tokens",
        lambda it: it.below("max_num_scheduled_tokens", 1),
        "must be at least 1",
    ),
    Rule(
        "max_num_batched_tokens",
        lambda it: (
            _method(it) in ("draft_model", "dflash") and it.below("max_num_batched_tokens", 2)
        ),
        "leaves no room for the drafted tokens; raise it",
    ),
    Rule(
        "async_scheduling",
        lambda it: (
            it.get("async_scheduling") is True
            and _speculates(it)
            and _method(it) not in (None, *_ASYNCHRONOUS)
        ),
        "vLLM has no asynchronous scheduling with this method of speculation; leave it out",
    ),
    Rule(
        "async_scheduling",
        lambda it: (
            it.get("async_scheduling") is True and it.on(f"{_OF}.disable_padded_drafter_batch")
        ),
        "and disable_padded_drafter_batch exclude each other; leave one out",
    ),
    Rule(
        "per_request_spec_decode_metrics",
        lambda it: (
            it.get("per_request_spec_decode_metrics") not in (None, "none") and not _speculates(it)
        ),
        "needs speculative decoding; leave it out",
    ),
    Rule(
        "kv_sharing_fast_prefill",
        lambda it: (
            it.on("kv_sharing_fast_prefill")
            and _method(it) in ("eagle", "eagle3", "mtp", "dflash", "dspark")
        ),
        "excludes drafts that read the model's own states; leave one out",
    ),
    *(
        Rule(
            "watermark_config",
            lambda it, wrong=wrong: (  # type: ignore[misc]
                it.has("watermark_config") and _speculates(it) and wrong(it)
            ),
            f"with a draft, watermarks need {fix}",
        )
        for wrong, fix in (
            (
                lambda it: it.get(f"{_OF}.draft_sample_method") != "probabilistic",
                '"draft_sample_method": "probabilistic" in the speculative configuration',
            ),
            (
                lambda it: it.get(f"{_OF}.rejection_sample_method") not in (None, "standard"),
                '"rejection_sample_method": "standard" in the speculative configuration',
            ),
            (
                lambda it: it.on(f"{_OF}.parallel_drafting") and _method(it) != "dspark",
                "no parallel_drafting",
            ),
            (
                lambda it: _method(it) not in (None, "dspark", "eagle", "eagle3", "mtp"),
                "the method dspark, eagle, eagle3 or mtp",
            ),
            (
                lambda it: (
                    not it.on("watermark_config.allow_target_only_watermarking")
                    and it.get("watermark_config.algorithm") in (None, "gumbel")
                ),
                '"algorithm": "dual_key_gumbel", or "allow_target_only_watermarking": true',
            ),
        )
    ),
    Rule(
        "max_num_batched_tokens",
        lambda it: (
            it.on("enable_lora")
            and _speculates(it)
            and it.below("max_num_batched_tokens", it.number("max_num_seqs") * (_tokens(it) + 1))
        ),
        "with adapters and a draft, a step needs room for the drafted tokens of all sequences; "
        "raise it or lower num_speculative_tokens",
    ),
)

_OTHERS = (
    Rule(
        "max_cpu_loras",
        lambda it: it.on("enable_lora") and it.below("max_cpu_loras", it.number("max_loras")),
        "is below OPTION_MAX_LORAS, and includes them; raise it or lower that",
    ),
    Rule(
        "return_sampling_mask",
        lambda it: it.on("return_sampling_mask") and _adaptive(it),
        "and enable_adaptive_verification exclude each other; leave one out",
    ),
    Rule(
        "return_sampling_mask",
        lambda it: it.on("return_sampling_mask") and it.on("logits_processors"),
        "and OPTION_LOGITS_PROCESSORS exclude each other; leave one out",
    ),
    Rule(
        "return_sampling_mask",
        lambda it: (
            it.on("return_sampling_mask") and it.get("logprobs_mode") != "processed_logprobs"
        ),
        "needs OPTION_LOGPROBS_MODE=processed_logprobs",
    ),
    *(
        Rule(
            name,
            lambda it, name=name: it.on(name) and _second(it) is False,  # type: ignore[misc]
            f"needs vLLM's second model runner; leave {_RUNNER} out",
        )
        for name in ("return_sampling_mask", "enable_trace_replay")
    ),
    *(
        Rule(
            "enable_return_routed_experts",
            lambda it, wrong=wrong: _routed(it) and wrong(it),  # type: ignore[misc]
            fix,
        )
        for wrong, fix in (
            (
                lambda it: _second(it) is False,
                f"needs vLLM's second model runner; leave {_RUNNER} out",
            ),
            (lambda it: not _generates(it), "is for models that generate; leave it out"),
            (
                lambda it: it.get("enable_prefix_caching") is False,
                "needs OPTION_ENABLE_PREFIX_CACHING=true",
            ),
            (_adaptive, "and enable_adaptive_verification exclude each other; leave one out"),
            (
                lambda it: it.number("pipeline_parallel_size", 1) > 1,
                "excludes pipeline parallelism; leave one out",
            ),
            (
                lambda it: (
                    it.number("decode_context_parallel_size", 1) > 1
                    or it.number("prefill_context_parallel_size", 1) > 1
                ),
                "excludes context parallelism; leave one out",
            ),
            (_nixl, "excludes connectors that hand KV from one server to another; leave one out"),
        )
    ),
    Rule(
        "speculative_config.method",
        lambda it: (
            _second(it) is True
            and not _hisparse(it)
            and _method(it) in ("suffix", "medusa", "mlp_speculator", "custom_class")
        ),
        f"vLLM's second model runner does not have it; leave {_RUNNER} out",
    ),
    *(
        Rule(
            name,
            lambda it, wrong=wrong: _second(it) is False and wrong(it),  # type: ignore[misc]
            f"vLLM's first model runner does not have it; leave {_RUNNER} out",
        )
        for name, wrong in (
            (
                "prefill_context_parallel_size",
                lambda it: it.number("prefill_context_parallel_size", 1) > 1,
            ),
            ("speculative_config.method", lambda it: _method(it) == "dspark"),
            ("speculative_config.enable_adaptive_verification", _adaptive),
            ("enable_batch_sharded_sampling", lambda it: it.on("enable_batch_sharded_sampling")),
            (
                "profiler_config.proton_graph_attribution",
                lambda it: _profiler(it) == "proton" and bool(_proton(it, "graph_attribution")),
            ),
            (
                "async_scheduling",
                lambda it: (
                    it.get("async_scheduling") is True
                    and it.number("pipeline_parallel_size", 1) > 1
                ),
            ),
        )
    ),
)

_NONE_HERE = "vLLM has it for GPUs only, and there is none here; leave it out"
_GPUS = (
    *(
        Rule(
            name,
            lambda it, name=name: it.on(name) and not it.gpus,  # type: ignore[misc]
            _NONE_HERE,
        )
        for name in ("enable_cumem_allocator", "enable_sleep_mode")
    ),
    Rule(
        "kda_prefill_backend",
        lambda it: it.get("kda_prefill_backend") == "flashkda" and not it.gpus,
        _NONE_HERE,
    ),
    Rule(
        "kda_prefill_backend",
        lambda it: it.get("kda_prefill_backend") == "fused",
        "vLLM has it for AMD's GPUs only; leave it out",
    ),
    Rule(
        "enable_lora",
        lambda it: (
            it.on("enable_lora")
            and not it.gpus
            and _variable(it, "VLLM_LORA_ENABLE_DUAL_STREAM") is True
        ),
        "VLLM_LORA_ENABLE_DUAL_STREAM is for GPUs only, and there is none here; leave it out",
    ),
)
