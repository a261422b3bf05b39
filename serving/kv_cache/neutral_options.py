# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's that affect neither the KV of given tokens nor its key.

Every other option is part of a model's fingerprint. An option is harmless if it concerns:

- names, places, logs or clients' limits,
- sampling from the logits,
- tokenization, because the tokens are part of each key,
- the number of requests and tokens in a step, or the use of memory,
- the number of ranks (`tensor_parallel_size`) and a rank's place, which LMCache's keys contain.
"""

_NAMES = """
    model served_model_name revision download_dir hf_token host port uds root_path headless
    grpc grpc_port api_key api_server_count middleware
    ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile enable_ssl_refresh
    allow_credentials allowed_headers allowed_methods allowed_origins
    h11_max_header_count h11_max_incomplete_event_size sse_keep_alive_interval
    enable_request_id_headers disable_fastapi_docs enable_offline_docs
    enable_tokenizer_info_endpoint enable_scale_out tool_server
"""
_LOGS = """
    aggregate_engine_logging collect_detailed_traces otlp_traces_endpoint
    disable_access_log_for_endpoints disable_log_stats disable_uvicorn_access_log
    enable_layerwise_nvtx_tracing enable_log_deltas enable_log_outputs enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_per_request_metrics
    enable_server_load_tracking cudagraph_metrics custom_histogram_buckets
    kv_cache_metrics kv_cache_metrics_sample log_config_file log_error_stack log_level
    logging_config max_log_len per_request_spec_decode_metrics profiler_config
    ray_workers_use_nsight show_hidden_metrics_for_version uvicorn_log_level use_tqdm_on_load
    jit_monitor_mode jit_monitor_verbose enable_prompt_tokens_details enable_force_include_usage
"""
_TEXT = """
    chat_template chat_template_content_format default_chat_template_kwargs
    trust_request_chat_template tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
    tool_call_parser tool_parser_plugin tool_strict_level enable_auto_tool_choice
    exclude_tools_when_tool_choice_none response_role return_tokens_as_token_ids
    reasoning_config reasoning_parser reasoning_parser_plugin
    anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model
"""
_SAMPLING = """
    seed generation_config override_generation_config logits_processors logprobs_mode max_logprobs
    structured_outputs_config stream_interval
"""
_SIZES = """
    async_scheduling enable_chunked_prefill long_prefill_token_threshold
    long_prefill_token_threshold_adaptive max_num_active_seqs max_num_batched_tokens
    max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
    prefill_schedule_interval scheduler_reserve_full_isl scheduling_policy
    gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override
    cudagraph_capture_sizes max_cudagraph_capture_size enforce_eager
    cpu_offload_gb cpu_offload_params max_parallel_loading_workers
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    enable_sleep_mode shutdown_timeout limit_mm_per_prompt skip_mm_profiling renderer_num_workers
    mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
    mm_ipc_gpu_memory_gb enable_lora max_loras max_lora_rank max_cpu_loras
"""
_ENGINES_CACHE = """
    enable_prefix_caching prefix_caching_hash_algo kv_events_config enable_prompt_embeds
    allowed_local_media_path allowed_media_domains trust_request_mm_kwargs
"""
_PROCESSES = """
    tensor_parallel_size distributed_executor_backend distributed_timeout_seconds
    cpu_distributed_timeout_seconds nnodes node_rank master_addr master_port device_ids
    numa_bind numa_bind_cpus numa_bind_nodes disable_custom_all_reduce
    data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size data_parallel_size_local data_parallel_start_rank
    data_parallel_supervisor_port dp_supervisor_probe_failure_threshold
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
"""

HARMLESS = frozenset(
    f"{_NAMES} {_LOGS} {_TEXT} {_SAMPLING} {_SIZES} {_ENGINES_CACHE} {_PROCESSES}".split()
)
ELSEWHERE = frozenset({"kv_transfer_config", "max_model_len"})
"""Options whose relevant part is in the fingerprint."""
