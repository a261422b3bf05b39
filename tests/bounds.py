# SPDX-License-Identifier: Apache-2.0
"""The reading calls of the code, by the row of docs/explanation/security.md's table of bounds that
covers them.

A place is a function of a file and the call in it. tests/test_bounds.py finds all places.
"""

from collections.abc import Mapping, Sequence

ROWS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "Heads and bodies of HTTP": {
        "serving/http/bodies.py": ["Bodies.whole receive"],
        "serving/router/http/downstream.py": ["Downstream.on_body request.receive"],
    },
    "JSON and CSV of a request": {
        "handlers/embeddings.py": [
            "- msgspec.json.Decoder(_Request).decode",
            "- msgspec.json.Decoder(dict[str, msgspec.Raw]).decode",
        ],
        "handlers/lmi.py": [
            "- msgspec.json.Decoder(_Lists).decode",
            "- msgspec.json.Decoder(_Request).decode",
            "- msgspec.json.Decoder(dict[str, msgspec.Raw]).decode",
            "- msgspec.json.Decoder(list[msgspec.Raw]).decode",
        ],
        "handlers/payloads.py": [
            "- msgspec.json.Decoder(_Keys).decode",
            "_csv_lines text.readline",
        ],
        "handlers/records.py": ["read decode"],
        "serving/api/adapters.py": ["parameters msgspec.json.decode"],
        "serving/batch/answers.py": ["- msgspec.json.Decoder(NewBatch).decode"],
        "serving/engine/patches/frontend/messages.py": ["_as_object partial_json_parser.loads"],
        "serving/inference/content/fields.py": [
            "- msgspec.json.Decoder(RequestFields).decode",
            "- msgspec.json.Decoder(_Adapters).decode",
        ],
        "serving/inference/prepared.py": ["_values json.loads"],
        "serving/router/policy/routing_request.py": [
            "- msgspec.json.Decoder(list[_Message]).decode",
            "- msgspec.json.Decoder(str | list[str]).decode",
            "RequestReader.__init__ msgspec.json.Decoder(body).decode",
            "_in_order msgspec.json.decode",
        ],
    },
    "Hints about KV caches": {
        "serving/cache_hints/intent.py": [
            "_Reading._object msgspec.json.decode",
            "_Reading._value msgspec.json.decode",
            "own_key msgspec.json.Decoder(kind).decode",
            "own_key.read decode",
            "own msgspec.json.decode",
        ],
        "serving/cache_hints/marks.py": [
            "- msgspec.json.Decoder(_Part).decode",
            "- msgspec.json.Decoder(list[msgspec.Raw]).decode",
        ],
    },
    "Forms and uploads": {
        "serving/batch/upload.py": ["_received receive"],
    },
    "Sound": {
        "serving/engine/speech/sound.py": ["load file.getvalue", "load sound.read"],
    },
    "Lines of batches": {
        "serving/batch/lines.py": ["- msgspec.json.Decoder(_Input).decode", "_lines file.readline"],
    },
    "Answers of other copies to lines of batches": {
        "serving/batch/lanes.py": ["_OtherCopy._ask answer.content.iter_any"],
    },
    "Calls that load models": {
        "serving/router/models/doors.py": ["- msgspec.json.Decoder(_Load).decode"],
    },
    "Messages between the router and the supervisor of several models": {
        "serving/models/model_supervisor.py": ["Supervisor._on_router reader.readline"],
        "serving/router/models/model_messages.py": [
            "- msgspec.json.Decoder(Report).decode",
            "- msgspec.json.Decoder(Told).decode",
        ],
        "serving/router/models/view.py": ["OwnModels.follow reader.readline"],
    },
    "Orders to a model's server, and their answers": {
        "serving/server/orders.py": ["give loop.sock_recv", "obey loop.sock_recv"],
    },
    "The folder of files and batches": {
        "serving/batch/store.py": ["_read msgspec.json.decode", "_read path.read_bytes"],
    },
    "Tokens of clients": {
        "serving/access/tokens.py": ["Verifier._verify jwt.decode"],
    },
    "Identities that routers sign": {
        "serving/access/signed_identity.py": [
            "Signer._decode jwt.decode",
            "Signer.name_of jwt.decode",
        ],
    },
    "An issuer's keys": {
        "serving/access/issuer.py": ["Issuer._discovered json.loads", "_get answer.aiter_raw"],
        "serving/access/tokens.py": ["key_set json.loads"],
    },
    "Files that are followed": {
        "serving/follow.py": ["content file.read"],
    },
    "The shared list of adapters": {
        "serving/lora/shared_list.py": [
            "ListBucket._look answer['Body'].read",
            "ListFolder.put file.read",
            "ListFolder.read content.read",
            "SharedList.read msgspec.json.decode",
        ],
    },
    "Kubernetes' API": {
        "serving/router/fleet/kubernetes.py": ["_reason json.loads"],
    },
    "Answers of replicas to the router's own questions": {
        "serving/router/fleet/broadcast.py": ["_tokens msgspec.json.decode"],
        "serving/router/fleet/health.py": [
            "- msgspec.json.Decoder(_Models).decode",
            "_read_ping msgspec.json.decode",
            "read answer.content.iter_any",
        ],
    },
    "KV events": {
        "serving/router/kv/events.py": [
            "- msgspec.json.Decoder(dict[int, Source]).decode",
            "- msgspec.msgpack.Decoder(Event).decode",
            "- msgspec.msgpack.Decoder(_Batch).decode",
            "Follower._received socket.recv",
        ],
    },
    "Addresses of a prompt's KV": {
        "serving/kv_cache/transfer.py": [
            "- msgspec.json.Decoder(_KvAddress).decode",
            "split msgspec.json.decode",
        ],
        "serving/router/fleet/prefill.py": ["_Answer.read msgspec.json.decode"],
    },
    "Usage that answers tell": {
        "serving/router/epp/answer_usage.py": ["UsageReader.read json.JSONDecoder().raw_decode"],
    },
    "Messages to the endpoint picker": {
        "serving/router/epp/exchange.py": ["Exchange._on_body request.receive"],
    },
    "Processes of one router": {
        "serving/router/peers.py": [
            "Peers.__init__ msgspec.msgpack.Decoder(_Choices | _Session | _Loads | Seen).decode",
            "Peers._read self._inbox.recv",
        ],
    },
    "Processes that tokenise": {
        "serving/router/kv/agents.py": ["_add msgspec.json.decode"],
        "serving/router/kv/tokenizer.py": [
            "Tokenizer._request msgspec.json.decode",
            "_call msgspec.json.decode",
        ],
        "serving/router/kv/tokenizer_workers.py": [
            "_answer msgspec.msgpack.decode",
            "_frame reader.readexactly",
            "_work reader.read",
        ],
    },
    "Frames of `model.py`": {
        "serving/user_code.py": [
            "UserCode.format_events _FORMATTED.decode",
            "_Process._read_frame msgspec.msgpack.decode",
            "_Process._read_frame self._reader.readexactly",
            "_Process._read_large self._reader.read",
            "_decoded _DATA[kind].decode",
        ],
    },
    "Output of `model.py`": {
        "serving/user_code.py": ["_Process._pass_on_output self._output.read"],
    },
    "Output of the engine and the cache server": {
        "serving/observability/capture.py": ["_of_our_form json.loads", "_read lines.readline"],
    },
    "Answers of the cache server": {
        "serving/kv_cache/cache_server.py": ["CacheServer._read_series answer.aiter_bytes"],
        "serving/kv_cache/session_client.py": [
            "SessionClient._ask answer.aiter_bytes",
            "SessionClient._ask msgspec.json.decode",
        ],
    },
    "The compile cache": {
        "lmi_config/plan/compile_cache.py": ["manifest file.read", "manifest msgspec.json.decode"],
    },
    "An adapter's archive": {
        "serving/lora/archives.py": [
            "_Stream.content self._file.read",
            "_Stream.overhead self._file.read",
        ],
    },
    "A model's and an adapter's files": {
        "lmi_config/facts/handler.py": ["look file.read"],
        "lmi_config/facts/model.py": [
            "Folder.head file.read",
            "_entries json.loads",
            "_object json.loads",
        ],
        "lmi_config/options/secure.py": ["_content file.read", "_templated json.loads"],
        "serving/kv_cache/fingerprints.py": [
            "_length file.read",
            "_length json.loads",
            "steady_path file.read",
        ],
        "serving/sources/arriving.py": ["wait content.read"],
        "serving/sources/digests.py": ["_sampled_digest file.read"],
    },
    "Option files": {
        "lmi_config/facts/strict_yaml.py": ["read_file file.read"],
        "lmi_config/options/option_files.py": [
            "_properties file.read",
            "_properties javaproperties.loads",
        ],
    },
    "A file of a chat template": {
        "serving/server/prepare.py": ["_chat_template file.read"],
    },
    "Listings and heads of S3 and the hub": {
        "serving/sources/hub.py": ["Hub._name file.read", "Hub._read.ask answer.iter_bytes"],
        "serving/sources/hub_adapter.py": [
            "HubAdapter.list json.loads",
            "HubAdapter.list self.read",
            "HubAdapter.read answer.iter_bytes",
            "HubListing._head self.source.read",
        ],
        "serving/sources/s3.py": ["Listing._head.read answer['Body'].read"],
    },
    "The environment and the command line": {
        "lmi_config/options/arguments.py": ["_with_key json.loads"],
        "lmi_config/options/parsers.py": ["_json json.loads", "_objects decoder.raw_decode"],
        "lmi_config/plan/attention/verdict.py": ["_json json.loads"],
        "lmi_config/plan/vllm.py": ["_lora_module json.loads"],
        "serving/server/prepare.py": ["_overrides json.loads"],
    },
    "`/proc` and `/sys`": {
        "lmi_config/facts/machine.py": [
            "_cpu_quota (group / file).read_text",
            "_groups listed.read_text",
            "_mount mounts.read_text",
            "_nodes file.read_text",
            "_number path.read_text",
            "_table path.read_text",
        ],
        "serving/router/kv/tokenizer_workers.py": [
            "_limit_memory Path('/proc/self/statm').read_text"
        ],
        "serving/server/healthcheck.py": ["- Path('/proc/1/cmdline').read_text"],
    },
    "The health check": {
        "serving/server/healthcheck.py": ["fault error.read"],
    },
}
"""The table's first column → files → places."""

OTHERS: Mapping[str, Mapping[str, str]] = {
    "lmi_config/facts/gpus.py": {
        "_node file.read_text": "a number of the kernel's",
    },
    "serving/engine/requests/anthropic_usage.py": {
        "_retold msgspec.json.decode": "an event of our own engine's",
    },
    "serving/router/models/view.py": {
        "OwnModels.series self._door.series.read_text": "a file that the supervisor writes",
    },
    "serving/copies/part.py": {
        "take pickle.load": "what the supervisor has handed to this process in memory",
        "told json.loads": "no more than LONGEST bytes of our own child's",
        "told os.read": "no more than LONGEST bytes of our own child's",
    },
    "serving/router/fleet/own_copies.py": {
        "OwnCopies.left_out json.loads": "a file that the supervisor writes",
        "OwnCopies.left_out self._without.read_bytes": "a file that the supervisor writes",
        "described json.loads": "an answer of our own copies that read() has limited",
        "OwnCopies.supervisors_series self.series.read_text": "a file that the supervisor writes",
    },
    "handlers/custom.py": {
        "Code.answer json.loads": (
            "in the process of model.py: what the server sends it of its own answer"
        ),
        "_payload json.loads": "in the process of model.py: a body that the server has taken whole",
        "frame msgspec.msgpack.decode": "in the process of model.py: frames of the server",
        "frame reader.readexactly": "in the process of model.py: frames of the server",
    },
    "handlers/djl_python/encode_decode.py": {
        "encode_csv stream.getvalue": "what the user's code has made",
    },
    "handlers/djl_python/inputs.py": {
        "Input.get_as_json json.loads": (
            "in the process of model.py: a body that the server has taken whole"
        ),
        "Input.get_data read": "in the process of model.py: a body that the server has taken whole",
    },
    "handlers/djl_python/np_util.py": {
        "_array stream.read": "in the process of model.py: a body that the server has taken whole",
        "_number stream.read": "in the process of model.py: a body that the server has taken whole",
        "_text stream.read": "in the process of model.py: a body that the server has taken whole",
        "from_nd_list np.load": (
            "in the process of model.py: a body that the server has taken whole"
        ),
    },
    "handlers/djl_python/outputs.py": {
        "Output.add_as_npz file.getvalue": "what the user's code has made",
    },
    "handlers/djl_python/streaming_utils.py": {
        "HFStreamer.put self._tokenizer.decode": (
            "in the process of model.py: a body that the server has taken whole"
        ),
    },
    "handlers/embeddings.py": {
        "- msgspec.json.Decoder(_Answer).decode": "an answer of the engine, in this process",
    },
    "handlers/lmi.py": {
        "- msgspec.json.Decoder(_Completion).decode": ("an answer of the engine, in this process"),
        "_take_in msgspec.json.decode": "values of a body that was read",
        "split msgspec.json.decode": "values of a body that was read",
    },
    "handlers/multipart.py": {
        "parse reader.read": (
            "a body that was taken whole; serving/batch/upload.py has the limit of one that is not"
        ),
    },
    "lmi_config/facts/adapter.py": {
        "_vllms Path(__file__).with_name('vllm_adapters.json').read_text": "a file of this package",
        "_vllms json.loads": "a file of this package",
    },
    "lmi_config/facts/layers.py": {
        "vllm_models file.read_text": "a file of this package",
        "vllm_models json.loads": "a file of this package",
    },
    "lmi_config/options/declared.py": {
        "_listed Path(__file__).with_name('vllm_options.json').read_text": "a file of this package",
        "_listed json.loads": "a file of this package",
    },
    "lmi_config/options/redaction.py": {
        "no_text json.loads": "a value that an option's parser is about to take",
    },
    "lmi_config/options/secure.py": {
        "_templated read": "_content, or a checkpoint's head(): both are told how much",
    },
    "lmi_config/options/settings.py": {
        "vllm_environment Path(__file__).with_name('vllm_environment.json').read_text": (
            "a file of this package"
        ),
        "vllm_environment json.loads": "a file of this package",
    },
    "lmi_config/plan/refusals/given.py": {
        "Given.parsed json.loads": "an option's value, which was taken",
        "limits (Path(__file__).parent / 'vllm.json').read_text": "a file of this package",
        "limits json.loads": "a file of this package",
    },
    "lmi_config/plan/explain.py": {
        "_masked json.loads": "an option's value, which was taken",
        "_safe json.loads": "an option's value, which was taken",
    },
    "lmi_config/plan/lmcache.py": {
        "_sift read": "a parser of one value of a YAML file that was read",
    },
    "serving/api/app.py": {
        "_answering.answer pipeline.bodies.read": "Bodies.read, which has the limit",
    },
    "serving/batch/lines.py": {
        "- msgspec.json.Decoder(_Answered).decode": (
            "a line of an output file, which this server has written"
        ),
    },
    "serving/batch/upload.py": {
        "_received form.read": "a piece that was received",
    },
    "serving/cancellation.py": {
        "Cancellation.watching.watch receive": "the client's end, behind a body that was taken",
    },
    "serving/engine/calls.py": {
        "Route.__call__ self.read": "a body that was taken whole",
    },
    "serving/engine/patches/outputs/processor.py": {
        "Texts.__init__ tokenizer.decode": "one token, which the engine has given",
        "Texts.decode self._tokenizer.decode": "tokens that the engine has given",
    },
    "serving/engine/texts/generation.py": {
        "Generation.token self.tokenizer.decode": "one token, which the engine has given",
    },
    "serving/engine/versions/table.py": {
        "read file.read_text": "a file of this package",
        "read tomllib.loads": "a file of this package",
    },
    "serving/engine/kv_connector.py": {
        "FaultTolerantConnector.update_state_after_alloc self._transfers.load": (
            "counts a load that the engine begins; it reads nothing"
        ),
    },
    "serving/engine/vllm.py": {
        "_routes.add read": "a body that was taken whole",
        "_silence file.getvalue": "a sound of silence that is made here",
    },
    "serving/engine/vllm_errors.py": {
        "_words Path(__file__).with_name('vllm_words.txt').read_text": "a file of this package",
    },
    "serving/http/connections.py": {
        "Cycle.receive super().receive": (
            "uvicorn's own, which pauses reading beyond 64 KiB; Bodies.whole has the limit"
        ),
    },
    "serving/inference/coalescing.py": {
        "Coalescer.answer receive": "the client's end, behind a body that was taken",
    },
    "serving/inference/content/fields.py": {
        "RequestFields.salt msgspec.json.decode": "a value of a body that was taken whole",
        "RequestFields.session_command msgspec.json.decode": (
            "a value of a body that was taken whole"
        ),
        "RequestFields.streamed msgspec.json.decode": "a value of a body that was taken whole",
        "length msgspec.json.decode": "a value of a body that was taken whole",
    },
    "serving/inference/content/checks.py": {
        "- msgspec.json.Decoder(_Repetition).decode": "a value of a body that was taken whole",
        "- msgspec.json.Decoder(dict[str, float] | None, strict=False).decode": (
            "a value of a body that was taken whole"
        ),
        "_number read": "a value of a body that was taken whole",
        "_reader msgspec.json.Decoder(kind).decode": "a value of a body that was taken whole",
    },
    "serving/inference/request.py": {
        "inference_request form.json": "what a form has become, which was taken whole",
    },
    "serving/kv_cache/lmcache/__main__.py": {
        "_listen sys.stdin": "numbers of the server that has started this process",
    },
    "serving/lora/shared_list.py": {
        "SharedList.read self._place.read": "a place's read(), each of which has the limit",
    },
    "serving/router/epp/exchange.py": {
        "Exchange._end_answer self._usage.read": "what was received",
        "Exchange._replicas placement.read": "what was received",
    },
    "serving/router/fleet/kubernetes.py": {
        "_client token.with_name('namespace').read_text": (
            "a file of the pod's service account, which the kubelet writes"
        ),
    },
    "serving/router/fleet/prefill.py": {
        "prefill answer.read": "_Answer.read, which has the limit",
    },
    "serving/router/placement.py": {
        "Placement.read self._routing.read": "reads the request's body, which is kept",
    },
    "serving/router/proxy/proxied.py": {
        "ProxiedRequest._read placement.read": "reads the request's body, which is kept",
    },
    "serving/server/startup.py": {
        "_shared_list shared.read": "SharedList.read",
        "read_ahead weights.readinto": "into a buffer of 1 MiB, and away",
    },
    "serving/sources/hub_adapter.py": {
        "HubListing._download answer.iter_bytes": (
            "no more than the hub has listed, which OPTION_ADAPTER_DISK has room for"
        ),
    },
    "serving/sources/s3.py": {
        "Listing._missing json.loads": "a file that this server has written beside the model",
        "Listing._missing self._etags.read_bytes": (
            "a file that this server has written beside the model"
        ),
    },
    "serving/tune/load.py": {
        "run json.loads": "files and programs of `slipway tune`, which the operator runs",
        "run log.read_bytes": "files and programs of `slipway tune`, which the operator runs",
        "run result.read_bytes": "files and programs of `slipway tune`, which the operator runs",
    },
    "serving/tune/tuned_server.py": {
        "Server.reason json.loads": "files and programs of `slipway tune`, which the operator runs",
        "Server.reason self._log.read_text": (
            "files and programs of `slipway tune`, which the operator runs"
        ),
    },
    "serving/tune/sweep.py": {
        "Sweep.__init__ json.loads": (
            "files and programs of `slipway tune`, which the operator runs"
        ),
        "_lines json.loads": "files and programs of `slipway tune`, which the operator runs",
        "_lines path.read_text": "files and programs of `slipway tune`, which the operator runs",
    },
    "serving/tune/tune.py": {
        "_value json.loads": "files and programs of `slipway tune`, which the operator runs",
    },
    "serving/ui/page.py": {
        "_file path.read_bytes": "a file of this package",
    },
    "serving/user_code.py": {
        "_Process._read_large data.getvalue": "what _read_large has counted",
        "_start code.load": "asks for what the file has; frames have the limit",
    },
}
"""Files → places → why they need no bound: the input was bounded before, or nobody else
writes it.
"""
