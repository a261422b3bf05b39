# SPDX-License-Identifier: Apache-2.0
"""The properties of vLLM's outputs that processor.py and arrays.py need."""

from serving.patching.patch import SERVER, Name, Patch

_OUTPUTS = "vllm.v1.engine.output_processor"
_PROCESSOR = f"{_OUTPUTS}:OutputProcessor"
TOKENS = Patch(
    name="token_accounting",
    process=SERVER,
    names=(
        Name(
            f"{_PROCESSOR}.__init__",
            "self, tokenizer, log_stats, stream_interval, tracing_enabled, admission_stats, ...",
        ),
        Name(
            f"{_PROCESSOR}.add_request", "self, request, prompt, parent_req, request_index, queue"
        ),
        Name(f"{_PROCESSOR}.process_outputs", "self, engine_core_outputs, ..."),
        Name(_PROCESSOR, has=("request_states", "lora_states", "log_stats")),
        Name(
            f"{_OUTPUTS}:RequestState",
            has=(
                *("request_index", "external_req_id", "prompt_len", "num_cached_tokens"),
                *("is_prefilling", "detokenizer", "stats"),
            ),
        ),
        Name("vllm.v1.engine:EngineCoreRequest", has=("external_req_id", "cache_salt")),
    ),
    does="Reports the engine's requests to the call that made them, and checks their salts.",
    why="No public interface reports the computed tokens of an aborted request, or checks a "
    "prompt's salt on its way to the engine.",
    without="no call would count its tokens, and nobody would check salts",
    closed=True,
)
ADAPTER_NAMES = Patch(
    name="adapter_names",
    process=SERVER,
    names=(
        Name("vllm.v1.metrics.stats:LoRARequestStates.__init__", "self, log_stats"),
        Name(
            "vllm.v1.metrics.stats:LoRARequestStates.update_scheduler_stats",
            "self, scheduler_stats",
        ),
    ),
    does="Makes vllm:lora_requests_info name adapters as requests do.",
    why="Gateways route by these names, and the engine uses different ones.",
    without="gateways would not find adapters by their names in requests",
    closed=True,
)
QUICK = Patch(
    name="quick_tokens",
    process=SERVER,
    names=(
        Name(
            f"{_OUTPUTS}:RequestState.make_request_output",
            "self, new_token_ids, pooling_output, finish_reason, ...",
        ),
        Name(
            f"{_OUTPUTS}:RequestState",
            has=("stream_interval", "logprobs_processor", "prompt_token_ids", "queue"),
        ),
        Name(
            "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs",
            "self, logprobs_lists",
        ),
        Name("vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request", "tokenizer, request"),
        Name("vllm.v1.engine.logprobs:LogprobsProcessor", has=("tokenizer",)),
    ),
    does="Passes a token to its stream without an output object, and remembers tokens' texts.",
    why="This halves vLLM's time to read a token, with log probabilities and without.",
    without="each streamed token takes more of the CPU",
    closed=False,
)
ARRAYS = Patch(
    name="quick_arrays",
    process=SERVER,
    names=(
        Name("vllm.v1.serial_utils:MsgpackDecoder.dec_hook", "self, t, obj"),
        Name("vllm.v1.serial_utils:MsgpackDecoder", has=("aux_buffers",)),
        Name(
            "vllm.v1.engine.core_client:MPClient.__init__",
            says=("self.decoder = MsgpackDecoder(EngineCoreOutputs)",),
        ),
    ),
    does="Decodes each array in the engine's outputs in one step.",
    why="A token's log probabilities are three arrays of one number, and vLLM takes several steps "
    "for each.",
    without="a token with log probabilities takes more of the CPU",
    closed=False,
)
