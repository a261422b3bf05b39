# SPDX-License-Identifier: Apache-2.0
"""Options that vLLM refuses with this model, this draft or this machine: numbers, lengths,
packages, code (vllm/config/model.py, vllm/config/vllm.py, vllm/platforms).
"""

import re
from collections.abc import Iterator

from lmi_config.options.spelling import nearest
from lmi_config.plan.refusals.given import Given, limits


def faults(given: Given) -> Iterator[str]:
    """Yield a sentence for each refused option."""
    yield from _quantised(given)
    yield from _numbers(given)
    yield from _packages(given)
    yield from _code(given)
    yield from _length(given)
    yield from _shared(given)
    yield from _experts(given)
    yield from _senses(given)
    yield from _drafted(given)


_FAMILIES = (
    ("awq", "awq_marlin", "auto_awq", "marlin"),
    ("gptq", "gptq_marlin", "auto_gptq", "marlin"),
)
"""Names of one quantisation method. vLLM accepts files of the first one under all of them."""
_RENAMED = ("auto-round", "intel/auto-round", "")
"""Names in model files that have another name in vLLM."""
_INSTEAD = {
    "bitsandbytes": "fp8_per_tensor",
    "bnb": "fp8_per_tensor",
    "int8": "int8_per_channel_weight_only",
    "ptpc_fp8": "fp8_per_channel",
    "gguf": "",
}
_OVERRIDES = ("quantization_config_file", "quantization_config_dict_json")


def _method(given: Given) -> str | None:
    method = given.get("quantization")
    return method.lower() if isinstance(method, str) else None


def _own(given: Given) -> str | None:
    own = given.model.quantization
    return own and own.lower().replace("compressed_tensors", "compressed-tensors")


def _quantised(given: Given) -> Iterator[str]:
    """vLLM's _verify_quantization, and get_quant_config in weight_utils.py."""
    known, asked, own = limits()["quantization"], _method(given), _own(given)
    if given.machine.extended:  # the methods of extensions are unknown
        return
    renamed = any(own == family[0] and asked in family for family in _FAMILIES)
    if asked and asked not in known and not renamed:
        near = _INSTEAD.get(asked, nearest(asked, known, 0.5) or "fp8_per_tensor")
        offer = f"OPTION_QUANTIZE={near}, or leave it out" if near else "leave it out"
        yield (
            f"{given.shown('quantization')}: vLLM 0.32 has no such way to quantise; take {offer}, "
            "as files that are quantised say how"
        )
        return
    if own and not asked and own not in (*known, *_RENAMED):
        yield (
            f"the model's files are quantised with {own:.40}, which vLLM 0.32 does not have; "
            "use a version of the model in FP8, AWQ or GPTQ, or one that is not quantised"
        )
        return
    old = asked or own
    if old in limits()["deprecated_quantization"] and not given.on("allow_deprecated_quantization"):
        yield (
            f"{given.called('quantization')}: vLLM is giving {old} up; set "
            "OPTION_ALLOW_DEPRECATED_QUANTIZATION=true to have it still"
        )
    if asked and asked in known and not own:
        yield from _plain(given, asked)
    yield from _suited(given, asked or own)


def _plain(given: Given, asked: str) -> Iterator[str]:
    """Yield a fault if weights without quantisation in their files cannot run with this method."""
    row, there = limits()["quantization"][asked], given.model.checks.quantised
    told = given.parsed("hf_overrides").keys() & {*_OVERRIDES}
    if row["plain"] or there is None or not given.model.architectures or told:
        return
    if asked == "online":
        if not given.has("quantization_config"):
            yield (
                f"{given.shown('quantization')}: needs OPTION_QUANTIZATION_CONFIG, which says "
                'what, like {"linear": "fp8_per_tensor"}'
            )
        return
    if not any(it.endswith(tuple(row["files"])) for it in there):
        yield (
            f"{given.shown('quantization')}: the model's files are not quantised; leave it out, "
            f"use a version of the model in {asked}, or set OPTION_QUANTIZE=fp8_per_tensor to "
            "quantise at the start"
        )


def _suited(given: Given, method: str | None) -> Iterator[str]:
    """Yield a fault if a quantisation method does not support the GPUs or the model's numbers."""
    online = limits()["online_quantization"]
    own = _own(given)
    if not own and (method == "fp8" or method in online):
        method = "online"
    row = limits()["quantization"].get(method)
    if not row or str(method).startswith("modelopt"):  # vLLM may choose another by the files
        return
    least = divmod(row["capability"], 10)
    told = given.shown("quantization") if given.has("quantization") else f"quantisation by {own}"
    weak = [gpu for gpu in given.machine.gpus if gpu.capability and gpu.capability < least]
    if weak:
        yield (
            f"{told}: needs GPUs of compute capability {least[0]}.{least[1]}, and the "
            f"{weak[0].name} has {'.'.join(map(str, weak[0].capability or ()))}; use another GPU "
            "or another version of the model"
        )
    dtype = _dtype(given)
    if dtype and dtype not in row["dtypes"]:
        yield (
            f"{given.called('dtype')}={dtype}: with {told} vLLM takes "
            f"{' or '.join(row['dtypes'])}; leave it out"
        )


_DTYPES = {"half": "float16", "float": "float32"}


def _dtype(given: Given) -> str | None:
    """The requested method; None if vLLM chooses."""
    dtype = given.get("dtype")
    return None if dtype in (None, "auto") else _DTYPES.get(dtype, dtype)


_BFLOAT16 = (8, 0)  # the lowest compute capability with bfloat16


def _numbers(given: Given) -> Iterator[str]:
    """CudaPlatformBase.check_if_supports_dtype, _check_valid_dtype in vllm/config/model.py."""
    dtype, gpus = _dtype(given), given.machine.gpus
    old = [gpu for gpu in gpus if gpu.capability and gpu.capability < _BFLOAT16]
    if dtype == "bfloat16" and old:
        yield (
            f"{given.called('dtype')}=bfloat16: needs GPUs of compute capability 8.0, and the "
            f"{old[0].name} has {'.'.join(map(str, old[0].capability or ()))}; leave it out, or "
            "set it to fp16"
        )
    kind = given.model.model_type
    if dtype == "float16" and kind in limits()["no_float16"]:
        yield (
            f"{given.called('dtype')}=float16: {kind} is not stable with it, and vLLM refuses it; "
            "leave it out, or set it to bf16"
        )
    cache = given.get("kv_cache_dtype")
    four_bits = isinstance(cache, str) and re.match(r"nvfp4(?!.*_ds_mla$)", cache)
    if four_bits and given.model.latent:
        yield f"{given.shown('kv_cache_dtype')}: not with latent attention; set it to fp8"


_LOADERS = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "modelexpress": "modelexpress",
    "runai_streamer": "runai_model_streamer",
    "runai_streamer_sharded": "runai_model_streamer",
    "tensorizer": "tensorizer",
}
"""Load formats → the module that vLLM imports for them (vllm/model_executor/model_loader)."""


def _packages(given: Given) -> Iterator[str]:
    module = _LOADERS.get(str(given.get("load_format")))
    if module in given.machine.missing:
        name = module.replace("_", "-")
        yield (
            f"{given.shown('load_format')}: needs the package {name}, which is not installed; "
            "leave it out, or add the package to the image"
        )
    for path in ("distributed_executor_backend", "data_parallel_backend"):
        if given.get(path) == "ray" and "ray" in given.machine.missing:
            yield (
                f"{given.shown(path)}: needs the package ray, which is not installed; leave it "
                "out, or add the package to the image"
            )


def _code(given: Given) -> Iterator[str]:
    settings = given.settings
    read_elsewhere = given.has("hf_config_path") or given.has("config_format")
    if given.model.checks.coded and not settings.trust_remote_code and not read_elsewhere:
        yield (
            f"{given.called('model')}: neither vLLM nor transformers has a configuration for "
            f"{given.model.model_type}, and it is read by code that comes with the model; set "
            "OPTION_TRUST_REMOTE_CODE=true, if you trust that code"
        )
    names = given.model.architectures
    set_off = given.environ.get("INKLING_MULTIMEM_AR", "1") == "0"
    if given.on("enable_lora") and any("Inkling" in it for it in names) and not set_off:
        yield (
            f"{given.called('enable_lora')}: adapters of {names[0]} need the variable "
            "INKLING_MULTIMEM_AR=0; set it"
        )


_ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def _length(given: Given) -> Iterator[str]:
    """_get_and_verify_max_len, and verify_max_model_len in vllm/config/scheduler.py."""
    longest, asked = given.model.checks.longest, given.get("max_model_len")
    allowed = given.environ.get(_ALLOWED, "").strip().lower() in ("1", "true")
    if isinstance(asked, int) and longest and asked > longest and not allowed:
        factor = -(-asked // longest)
        yield (
            f"{given.shown('max_model_len')}: is more than the model's {longest}, and vLLM refuses "
            f"it; set it to {longest} or less. If the model is made to be stretched, say both how "
            'and how far: OPTION_HF_OVERRIDES={"max_position_embeddings": '
            f'{longest * factor}, "rope_parameters": {{"rope_type": "yarn", "factor": {factor}.0, '
            f'"original_max_position_embeddings": {longest}, "rope_theta": …}}}}, with the '
            "rope_theta of its config.json"
        )
    length = asked if isinstance(asked, int) and asked > 0 else given.model.max_length
    if not length:
        return
    if given.get("enable_chunked_prefill") is False and given.below(
        "max_num_batched_tokens", length
    ):
        yield (
            f"{given.shown('max_num_batched_tokens')}: a prompt of {length} tokens must fit into "
            "a step where OPTION_ENABLE_CHUNKED_PREFILL=false; raise it, or lower "
            "OPTION_MAX_MODEL_LEN"
        )
    if given.number("long_prefill_token_threshold") > length:
        yield (
            f"{given.shown('long_prefill_token_threshold')}: is more than the longest request of "
            f"{length} tokens; lower it"
        )


def _shared(given: Given) -> Iterator[str]:
    """verify_with_parallel_config, of decode context parallelism."""
    degree = given.number("decode_context_parallel_size", 1)
    heads, kv = given.model.attention_heads, given.model.kv
    if degree <= 1 or not heads or not kv or given.model.latent:
        return
    tensor = given.number("tensor_parallel_size", 1)
    told = given.shown("decode_context_parallel_size")
    if tensor <= kv.heads:
        yield (
            f"{told}: needs more ranks than the model has KV heads ({kv.heads}); raise "
            "OPTION_TENSOR_PARALLEL_DEGREE, or leave it out"
        )
    elif degree > tensor // kv.heads:
        yield f"{told}: can be at most {int(tensor // kv.heads)} here; lower it"
    elif heads // kv.heads % degree:
        yield f"{told}: the model's {heads // kv.heads} heads per KV head are not divisible by it"


def _experts(given: Given) -> Iterator[str]:
    experts = given.model.checks.experts
    names = given.model.architectures
    if experts == 0 and given.model.layers:
        for name in ("enable_expert_parallel", "enable_return_routed_experts"):
            if given.on(name):
                yield (
                    f"{given.shown(name)}: is for mixtures of experts, and this model is none; "
                    "leave it out"
                )
        alone = given.on("data_parallel_external_lb") or given.has("data_parallel_rank")
        if alone and given.number("data_parallel_size", 1) > 1:
            yield (
                f"{given.called('data_parallel_size')}: copies with a rank of their own are for "
                "mixtures of experts, and this model is none; start a server for each copy "
                "without OPTION_DATA_PARALLEL_*, and a router"
            )
    backend = "flashinfer_moe_ep_mega_deep_gemm"
    if given.get("moe_backend") == backend and names and not any("V4" in it for it in names):
        yield f"{given.shown('moe_backend')}: is for DeepSeek-V4 only; leave it out"
    if given.has("engram_config") and names and not {*names} & {*limits()["engram"]}:
        yield (
            f"{given.called('engram_config')}: is for {', '.join(limits()['engram'])}, and this "
            "model is none; leave it out"
        )
    sparse = given.connectors("HiSparseConnector") or given.has("attention_config.hisparse_config")
    if sparse and given.model.kv and not given.model.latent:
        yield (f"{given.called('kv_transfer_config')}: HiSparse is for DeepSeek's sparse attention")


_SHARES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _senses(given: Given) -> Iterator[str]:
    """MultiModalConfig, which vLLM makes for vision and audio models, and the options that need
    it.
    """
    names = given.model.architectures
    if given.model.heard and given.on("enable_prompt_embeds"):
        yield (
            f"{given.shown('enable_prompt_embeds')}: is for models without an encoder; leave it out"
        )
    if not names:
        return
    sees = any(it in limits()["multimodal"] for it in names)
    if not sees:
        if not given.model.kept.foreign:
            if given.on("default_mm_loras"):
                yield (
                    f"{given.called('default_mm_loras')}: is for models that see or hear, and this "
                    "one does not; leave it out"
                )
            if given.get("ec_transfer_config.ec_role") == "ec_producer":
                yield (
                    f"{given.called('ec_transfer_config')}: an encoder alone is for models that "
                    "see or hear, and this one does not; leave it out"
                )
        return
    if given.get("mm_tensor_ipc") == "torch_shm":
        if any(given.number(it, 1) > 1 for it in _SHARES):
            yield (
                f"{given.shown('mm_tensor_ipc')}: is for one rank; set it to direct_rpc or leave "
                "it out"
            )
        if given.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn":
            yield (
                f"{given.shown('mm_tensor_ipc')}: needs VLLM_WORKER_MULTIPROC_METHOD=spawn; leave "
                "that variable out"
            )
    if given.on("language_model_only") and given.on("compilation_config.cudagraph_mm_encoder"):
        yield (
            f"{given.shown('language_model_only')}: and cudagraph_mm_encoder exclude each other; "
            "leave one out"
        )
    workers = given.number("renderer_num_workers")
    cached = given.number("mm_processor_cache_gb", 4) > 0
    if given.get("runner") == "pooling" and workers > 1 and cached and not given.model.heard:
        yield (
            f"{given.shown('renderer_num_workers')}: needs OPTION_MM_PROCESSOR_CACHE_GB=0 for a "
            "model that pools"
        )
    yield from _encoder(given)


_DEVICE = re.compile(
    r"(cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu"
    r"|mtia|privateuseone|[a-z]*npu)(:\d+)?"
)


def _encoder(given: Given) -> Iterator[str]:
    if str(given.get("mm_encoder_attn_backend")).upper() == "XFORMERS":
        yield f"{given.shown('mm_encoder_attn_backend')}: vLLM 0.32 no longer has it; leave it out"
    size = "mm_shm_cache_max_object_size_mb"
    if given.get(size) not in (None, 128) and given.get("mm_processor_cache_type") != "shm":
        yield f"{given.shown(size)}: needs OPTION_MM_PROCESSOR_CACHE_TYPE=shm"
    load, save = "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"
    for path in (load, save):
        if given.has(path) and given.get("mm_encoder_attn_dtype") != "fp8":
            yield f"{given.shown(path)}: needs OPTION_MM_ENCODER_ATTN_DTYPE=fp8"
    if given.has(load) and given.has(save):
        yield f"{given.shown(save)}: and {given.called(load)} exclude each other; keep one"
    device = given.get("mm_processor_kwargs.device")
    if isinstance(device, str) and not _DEVICE.fullmatch(device):
        yield (
            f"{given.shown('mm_processor_kwargs.device')}: must be a device as torch names them, "
            "like cpu or cuda:0"
        )
    shared = given.get("ec_transfer_config.ec_role") != "ec_producer"
    if isinstance(device, str) and re.match(r"cuda(:\d+)?$", device) and given.gpus and shared:
        yield (
            f"{given.shown('mm_processor_kwargs.device')}: the GPUs run the model; leave it out, "
            "so that pictures are prepared on CPUs"
        )


_TOP_K = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")


def _drafted(given: Given) -> Iterator[str]:
    """Rules about the draft, except its shapes, which lmi_config/facts/draft.py checks."""
    draft, path = given.draft, "speculative_config.max_model_len"
    length = given.get(path)
    if isinstance(length, int) and draft:
        asked = given.get("max_model_len")
        target = asked if isinstance(asked, int) and asked > 0 else given.model.max_length
        for whose, most in (("draft", draft.facts.checks.longest), ("model", target)):
            if most and length > most:
                yield f"{given.shown(path)}: is more than the {whose}'s {most}; lower it"
    method = given.get("speculative_config.method")
    if method in limits()["mtp"] and given.model.model_type == "deepseek_v41":
        yield f"{given.shown('speculative_config.method')}: this model takes dspark; name that"
    omni = given.model.model_type == "qwen3_omni_moe"
    if omni and draft and method == "dspark" and _TOP_K[1] not in draft.facts.architectures:
        yield (
            f"{given.called('speculative_config')}: with Qwen3-Omni vLLM takes a draft of the "
            f"architecture {_TOP_K[1]} only"
        )
    top = given.get("speculative_config.dspark_draft_topk")
    if isinstance(top, int) and draft and given.get("speculative_config.method") == "dspark":
        told = given.shown("speculative_config.dspark_draft_topk")
        known = draft.config.whole("draft_vocab_size") or draft.facts.vocabulary
        if known and top > known:
            yield f"{told}: is more than the draft's vocabulary of {known}; lower it"
        names = draft.facts.architectures
        if names and not {*names} & {*_TOP_K, "DSparkDraftModel"}:
            yield f"{told}: is for {' and '.join(_TOP_K)} only; leave it out"
