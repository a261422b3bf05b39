# SPDX-License-Identifier: Apache-2.0
"""For each defence of docs/explanation/security.md: how to remove it, to see that its test
fails.
"""

import asyncio
import base64
import json
import math
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import msgspec
from starlette.routing import Router
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.access.caller import Caller
from serving.batch.store import Store
from serving.cache_hints import intent
from serving.engine.base import Call
from serving.http.bodies import Bodies
from serving.kv_cache.salt import Tenants
from serving.lora.adapter_registry import AdapterRegistry
from serving.protocol import UI
from serving.ui.page import FILES
from tests.serving.kv_cache.test_disk import SERVER as DISK_SERVER

ACCESS = "tests/serving/access/"
BATCHES = "tests/serving/batch/test_batches.py::"
EVERYTHING = re.compile(".*", re.DOTALL)
NOTHING = re.compile("(?!)")
_QUADRATIC = re.compile(r"eyJ[\w-]{10,}\.(?P<rest>x)")


class Removed(NamedTuple):
    """test: a test that the threat's row names, or one case of it. patches: place → its
    replacement.
    """

    test: str
    patches: Mapping[str, Any]


def one_second(*_: object) -> float:
    return 1.0


def nothing(*_: Any, **__: Any) -> None: ...


async def nothing_async(*_: Any, **__: Any) -> None: ...


def any_folder(url: str, roots: object) -> Path:
    return Path(url)


def no_text(*_: Any) -> str:
    return ""


def none_found(*_: Any, **__: Any) -> list[Any]:
    return []


def yes(*_: Any, **__: Any) -> bool:
    return True


def all_entries(_: str, content: bytes) -> Any:
    return json.loads(content).items()


def no(*_: Any, **__: Any) -> bool:
    return False


def added_alone(self: Any, place: Any, **_: Any) -> None:
    """As Connections.add, but it never closes a connection."""
    self.open.add(place)
    self.idle[place] = None


def unchanged(first: Any, *_: Any, **__: Any) -> Any:
    return first


def a_name(*_: Any, **__: Any) -> str:
    return "name"


def for_anybody(self: Any, token: bytes) -> tuple[Caller, float]:
    """The signed claims, whoever the token is for."""
    claims = jwt.decode(token, self._secret, ["HS256"], options={"verify_aud": False})
    return msgspec.convert(claims["caller"], Caller), math.inf


async def unchanged_async(first: Any, *_: Any, **__: Any) -> Any:
    return first


class OpenRouter(Router):
    """Routes every path that is not listed to the engine's app."""

    def __init__(self, routes: Any, **more: Any) -> None:
        engine = next(it.app for it in routes if it.path.startswith("/v1/"))
        super().__init__(routes, **more | {"default": engine})


def in_child(module: str, statements: str) -> Callable[..., Awaitable[Any]]:
    """Replaces asyncio.create_subprocess_exec: a process that runs this module runs these
    statements first. In them, `it` is the module.
    """
    start = asyncio.create_subprocess_exec

    async def patched(*command: str, **more: Any) -> Any:
        if module in command:
            at = command.index(module)
            code = f"import sys, {module} as it; {statements}; it.main(*sys.argv[1:])"
            command = (*command[: at - 1], "-c", code, *command[at + 1 :])
        return await start(*command, **more)

    return patched


class Everything(frozenset[Any]):
    def __contains__(self, _: object) -> bool:
        return True

    def __sub__(self, _: object) -> "Everything":
        return self


def body_last(self: Call) -> dict[str, object]:
    return {"model": self.adapter, "cache_salt": self.salt, **self.body}


def bodies_of_any_size(self: Bodies, _: int) -> None:
    bodies_of_some_size(self, 10**12)


bodies_of_some_size = Bodies.__init__


def first_tenant(tenants: Tenants, caller: Any, headers: Any) -> str:
    name = tenants._name
    return next((it.decode() for key, it in headers if key == name), "")


def of_tenant_a(tenant: str | None, name: str) -> str:
    return intent.digest("a", name)


def unsigned(signer: Any, token: bytes) -> tuple[Caller, float]:
    return Caller(), math.inf


def believed(token: Any, *_: Any, **__: Any) -> Any:
    """The claims of a token, unverified."""
    return json.loads(base64.urlsafe_b64decode(token.split(b".")[1] + b"=="))


def trusting(*_: Any) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def repeated(content: bytes) -> None:
    raise ValueError(content.decode("latin-1"))


def without_model_names(self: AdapterRegistry, *given: Any, **named: Any) -> None:
    adapters(self, *given, **named)
    self._model_names = ()


adapters = AdapterRegistry.__init__


def forgets_at_once(store: Store, owner: str | None) -> str | None:
    if name := gives_way(store, owner):
        store._forget(name)
    return name


gives_way = Store._gives_way


async def once(_: str, work: Callable[[], Awaitable[object]]) -> None:
    await work()


def labels_as_json() -> tuple[bytes, bytes]:
    kind, script = FILES[f"{UI}/page.js"]
    unescaped = b"value.replace(/\\\\([^])/g,"
    parsed = script.replace(unescaped, b'((it, _) => it)(JSON.parse(`"${value}"`),')
    assert parsed != script
    return kind, parsed


ADAPTERS = "tests/serving/lora/test_registry.py::"
CREATE_PROCESS = "asyncio:create_subprocess_exec"
MODEL_PY = "handlers.custom"
WORKERS = "serving.router.kv.tokenizer_workers"
SECURE = "tests/serving/server/test_secure_mode.py::"
MEDIA = "tests/serving/inference/test_media.py::"
HTTP = "tests/serving/http/test_connections.py::"

DEFENCES: Mapping[str, Removed] = {
    "A header redirects to another path (`CustomAttributes: route=…`)": Removed(
        "tests/serving/inference/test_limits.py::test_custom_attributes_lead_nowhere_else",
        {"serving.api.invocations:Invocations._route": lambda *_: "/v1/models"},
    ),
    "Names that clients make up fill the router's memory": Removed(
        "tests/serving/router/policy/test_policies.py::"
        "test_names_of_adapters_that_clients_make_up_are_not_kept_for_ever",
        {"serving.router.policy.policies:MOST_ADAPTERS": 10**6},
    ),
    "The id of a file or a batch leads elsewhere on disk": Removed(
        f"{BATCHES}test_ids_are_no_paths", {"serving.batch.store:_is": yes}
    ),
    "Another tenant's files and batches": Removed(
        f"{BATCHES}test_files_and_batches_are_their_tenants",
        {"serving.batch.answers:owner": nothing},
    ),
    "A tenant takes all the room for files and batches, or all that run": Removed(
        f"{BATCHES}test_a_tenant_has_half_of_the_room", {"serving.batch.store:SHARE": 2.0}
    ),
    "A tenant deletes files that it still downloads, again and again": Removed(
        f"{BATCHES}test_deleted_files_that_are_still_read_count",
        {"serving.batch.store:Store._deleted": none_found},
    ),
    "A request for a batch that is refused removes or changes another": Removed(
        f"{BATCHES}test_a_refused_batch_changes_nothing",
        {"serving.batch.store:Store._gives_way": forgets_at_once},
    ),
    "A followed source (keys, certificates, lists, issuers, replicas) becomes invalid, and is "
    "never read again": Removed(
        "tests/serving/test_follow.py::test_an_unforeseen_end_is_told_counted_and_begun_anew",
        {"serving.follow:kept": once},
    ),
    "Every server downloads an unusable listed adapter again and again": Removed(
        "tests/serving/lora/test_shared_list.py::test_what_is_listed_and_of_no_use_is_fetched_once",
        {"serving.lora.adapter_registry:REFUSED": 0},
    ),
    "A listing of S3 that does not end": Removed(
        "tests/serving/sources/test_s3.py::test_a_listing_without_end_is_given_up_and_stops",
        {"serving.sources.s3:OBJECTS": 10**9, "serving.sources.s3:LIST_S": 10**9},
    ),
    "Servers that share a download folder remove each other's adapters": Removed(
        f"{ADAPTERS}test_servers_that_share_a_folder_keep_each_others_adapters",
        {"serving.lora.adapter_files:fcntl.flock": nothing},
    ),
    "A push to the hub between the plan and the download": Removed(
        "tests/serving/sources/test_hub.py::test_what_is_fetched_is_what_was_looked_at",
        {"serving.sources.hub:Hub.listed": unchanged},
    ),
    "A model's option files take memory, time or the terminal": Removed(
        "tests/lmi_config/options/test_hostile_files.py::"
        "test_yaml_is_refused[an alias within itself]",
        {"lmi_config.facts.strict_yaml:_require_small": nothing},
    ),
    "A tenant's name that `/ui` cannot read stops the page": Removed(
        "tests/serving/ui/test_page.py::test_the_page_shows_every_tenants_name_and_goes_on",
        {"serving.ui.page:FILES[/ui/page.js]": labels_as_json()},
    ),
    "Forms of ten thousand parts, with heads of a megabyte, or cut": Removed(
        "tests/serving/api/test_forms.py::test_what_is_no_form_or_too_much"
        "[body16-multipart/form-data; boundary=a-at most 64 fields-/v1/files]",
        {"handlers.multipart:FIELDS": 10**9, "handlers.multipart:FIELDS_SIZE": 10**9},
    ),
    "vLLM's administration and development paths": Removed(
        "tests/serving/api/test_app.py::test_nothing_else_is_there",
        {"serving.api.app:Router": OpenRouter},
    ),
    "An adapter's name or `src` escapes its folder or bucket": Removed(
        f"{ADAPTERS}test_bad_input[parameters2-400-should be letters]",
        {
            "serving.lora.adapter_registry:NAME": EVERYTHING,
            "serving.lora.adapter_files:AdapterFiles._allowed": yes,
        },
    ),
    "Adapters that break the engine": Removed(
        f"{ADAPTERS}test_bad_input[parameters12-424-its rank is 32]",
        {"lmi_config.facts.adapter:faults": none_found},
    ),
    "Pickles run code": Removed(
        f"{SECURE}test_each_control_forbids_its_files_and_nothing_else",
        {"lmi_config.options.secure:_PICKLES": ("*",)},
    ),
    "Code that comes with a model": Removed(
        f"{SECURE}test_an_untrusted_file_widens_nothing",
        {"lmi_config.options.secure:_option_faults": none_found},
    ),
    "A value in an option file becomes a vLLM option": Removed(
        "tests/lmi_config/plan/test_vllm.py::test_no_value_becomes_an_option",
        {"lmi_config.plan.vllm:_flags": none_found},
    ),
    "Chat templates from clients": Removed(
        "tests/serving/router/kv/test_awareness.py::test_a_template_of_a_clients_is_not_rendered",
        {
            CREATE_PROCESS: in_child(
                WORKERS,
                "from serving.router.kv import tokenizer; tokenizer._arguments = frozenset; "
                "tokenizer._GIVEN_ARGUMENTS = {'chat_template'}",
            )
        },
    ),
    "Chats that make the model's own template hang or grow": Removed(
        "tests/serving/router/kv/test_tokenizer.py::"
        "test_a_worker_that_hangs_holds_nobody_up_and_is_replaced",
        {CREATE_PROCESS: in_child(WORKERS, "it.RUNAWAY_S = it.RUNAWAY_WALL_S = 10**6")},
    ),
    "`requirements.txt` installs packages": Removed(
        f"{SECURE}test_each_control_forbids_its_files_and_nothing_else",
        {"lmi_config.options.secure:_FORBIDDEN": ()},
    ),
    "Secure mode is switched off or weakened by a file": Removed(
        f"{SECURE}test_no_file_touches_secure_mode_itself",
        {"lmi_config.options.settings:_PLATFORM": set()},
    ),
    "Adapters bypass secure mode": Removed(
        f"{SECURE}test_adapters_are_looked_at_for_all_of_it",
        {"serving.lora.adapter_files:AdapterFiles._require_secure": nothing},
    ),
    "Links hide files from secure mode": Removed(
        f"{SECURE}test_links_may_lead_elsewhere_within_a_channel_only",
        {"lmi_config.options.secure:_FORBIDDEN": ()},
    ),
    "Media URLs reach internal hosts (SSRF)": Removed(
        f"{MEDIA}test_names_that_lead_inside_are_refused",
        {"serving.inference.content.media:is_public": yes},
    ),
    "URLs and paths in arguments for a model's processor": Removed(
        f"{MEDIA}test_places_in_the_processors_arguments_are_refused",
        {"serving.inference.content.media:_has_place": nothing},
    ),
    "Session ids that are guessed, or reach other files or headers": Removed(
        "tests/serving/api/test_sessions.py::test_what_is_no_id_reaches_no_file_and_no_header",
        {"serving.api.session_store:SessionStore.use": nothing_async},
    ),
    "A client reaches the KV connector, other tenants' caches or extensions": Removed(
        "tests/serving/inference/test_limits.py::test_internals_of_the_engine_are_not_for_clients",
        {"serving.inference.content.checks:_INTERNAL": ()},
    ),
    "Clients without a key, or with one that is wrong, expired or not for this": Removed(
        f"{ACCESS}test_access.py::test_administration_is_for_admin_keys",
        {"serving.access.caller:Caller.require_path": nothing},
    ),
    "Tokens that are forged, expired, for others, or choose their own verification": Removed(
        f"{ACCESS}test_tokens.py::test_what_is_no_token_of_the_issuers[another audience]",
        {"serving.access.tokens:jwt.decode": believed},
    ),
    "A request names an adapter that the engine has, and no registry": Removed(
        "tests/serving/lora/test_registry.py"
        "::test_a_model_that_is_not_registered_does_not_reach_the_engine[/v1/completions]",
        {"serving.inference.isolated:_require_known": nothing},
    ),
    "A key learns which adapters others have": Removed(
        f"{ACCESS}test_access.py::test_an_adapter_of_others_is_as_one_that_is_not_here",
        {"serving.access.caller:Caller.may_use": yes},
    ),
    "A tenant reaches another's caches, retries or sessions with a header": Removed(
        f"{ACCESS}test_access.py::test_a_key_overrules_the_header_that_names_tenants",
        {"serving.kv_cache.salt:Tenants.tenant": first_tenant},
    ),
    "Model output, or names of adapters and tenants, become HTML or script in `/ui`": Removed(
        "tests/serving/ui/test_page.py::test_the_browser_itself_refuses_html_and_other_hosts",
        {"serving.ui.page:HEADERS": {}},
    ),
    "A client says of itself what a router says of callers": Removed(
        f"{ACCESS}test_identity.py::test_what_is_made_up_is_refused[nonsense]",
        {"serving.access.signed_identity:Signer._decode": unsigned},
    ),
    "An address that is not a server's, or is another's by now, gets identities or keys": Removed(
        "tests/serving/router/test_keys.py"
        "::test_an_address_that_does_not_prove_the_secret_gets_nothing_that_is_signed",
        {"serving.access.access:Access.name_of": a_name},
    ),
    "Somebody in the middle uses at one server what a router has signed for another, or for its "
    "own questions": Removed(
        "tests/serving/router/test_keys.py"
        "::test_what_is_signed_for_one_server_is_worth_nothing_at_another",
        {"serving.access.signed_identity:Signer._decode": for_anybody},
    ),
    "A tenant takes the operator's name": Removed(
        f"{ACCESS}test_tokens.py::test_a_tenant_called_admin_is_a_tenant",
        {"serving.access.access:OPERATOR": "admin"},
    ),
    "A replica answers the router's own questions without end, or small and compressed": Removed(
        "tests/serving/router/fleet/test_facts.py"
        "::test_answers_to_the_routers_own_questions_have_a_limit[/ping-without end]",
        {"serving.router.fleet.health:LARGEST": math.inf},
    ),
    "A replica's KV events hold or fill the router, or lead it elsewhere": Removed(
        "tests/serving/router/kv/test_events.py"
        "::test_events_come_from_the_replicas_own_host[tcp://10.0.0.1:5557]",
        {"serving.router.kv.events:_place": unchanged},
    ),
    "A replica sends an endless event in a continued stream": Removed(
        "tests/serving/router/proxy/test_continuation.py"
        "::test_an_event_without_an_end_reaches_the_client_as_it_is",
        {"serving.router.proxy.continuation:LARGEST_EVENT": math.inf},
    ),
    "A prefill server says nonsense of where it keeps KV": Removed(
        "tests/serving/router/test_prefill.py"
        "::test_a_hostile_prefill_server_costs_nobody_an_answer[blocks of text]",
        {"serving.router.fleet.prefill:where": unchanged},
    ),
    "Prompts are computed for nothing: the client leaves before the second server answers": Removed(
        "tests/serving/router/test_prefill.py::test_a_client_that_leaves_between_the_two_is_charged",
        {"serving.access.limits:Limiter.charge": nothing},
    ),
    "A client's requests, which fail on every replica, take a fleet down": Removed(
        "tests/serving/router/test_routing.py"
        "::test_requests_that_fail_on_every_replica_eject_none[500-prefixaware]",
        {
            "serving.router.placement:Placement.doubts": no,
            "serving.router.fleet.circuit_breaker:CircuitBreaker._stands_out": yes,
        },
    ),
    "A web page, or another user of the machine, runs programs with the stand-in for "
    "SageMaker": Removed(
        "tests/tools/test_sagemaker_local.py::test_another_body_or_key_or_time_is_refused",
        {"tools.sagemaker_local.server:check_signature": nothing},
    ),
    "Keys in logs, errors or files": Removed(
        f"{ACCESS}test_keys.py::test_faults_in_a_file_of_keys_are_refused",
        {"serving.access.keys:parsed": repeated},
    ),
    "One key's requests keep all others out, or cost without limit": Removed(
        f"{ACCESS}test_limits.py::test_a_server_counts_what_keys_use",
        {"serving.access.caller:Caller.limited": False},
    ),
    "Made-up tenants fill the metrics": Removed(
        f"{ACCESS}test_limits.py::test_made_up_tenants_have_few_series",
        {"serving.observability.access_log:TENANTS": math.inf},
    ),
    "Somebody between client, router and server reads or changes requests": Removed(
        "tests/serving/http/test_tls.py::test_a_replica_of_an_unknown_authority_is_not_asked",
        {"serving.router.router:_authorities": trusting},
    ),
    "Tenants infer other tenants' prompts from timing": Removed(
        "tests/serving/kv_cache/test_salt.py::test_all_who_differ_have_another_salt",
        {"serving.kv_cache.salt:digest": nothing},
    ),
    "A tenant's KV is stored under another's key, by a block that has left an attention window": (
        Removed(
            "tests/serving/engine/test_real_blocks.py::"
            "test_what_is_left_of_a_store[blocks1-held1-left1]",
            {"serving.engine.patches.engine_core.real_blocks:trim": yes},
        )
    ),
    "A prompt of embeddings, or of an adapter, is answered from another's KV": Removed(
        "tests/serving/engine/test_cache_keys.py::"
        "test_what_vllms_hashes_tell_apart_the_tiers_keys_do[embeddings]",
        {"serving.engine.patches.engine_core.cache_keys:has_key": yes},
    ),
    "A server reads KV that the same model made under other options, or an earlier build stored "
    "wrongly": Removed(
        "tests/serving/kv_cache/test_identity.py::"
        "test_the_length_counts_where_positions_depend_on_it[config4-lengths4-2]",
        {"serving.kv_cache.fingerprints:_length": nothing},
    ),
    "Another user writes compiled code into `OPTION_CACHE_FOLDER`": Removed(
        "tests/serving/server/test_compile_cache.py::"
        "test_code_that_others_could_have_written_is_not_used",
        {"serving.server.compile_cache:_require_private": nothing},
    ),
    "The disk tier removes other files, or follows links to them": Removed(
        "tests/serving/kv_cache/test_disk.py::test_a_strangers_file_in_a_cache_of_ours_stays",
        {
            "tests.serving.kv_cache.test_disk:SERVER": "import re\n"
            "from lmi_config.facts import machine\n"
            "machine._KV_FILE = re.compile('.*')\n" + DISK_SERVER
        },
    ),
    "Other users of the machine create folders or links under `/tmp` first": Removed(
        "tests/serving/test_folders.py::"
        "test_a_model_is_not_served_by_a_name_that_another_user_may_change",
        {"serving.folders:_ours": yes},
    ),
    "Request smuggling at the server": Removed(
        f"{HTTP}test_a_trailer_is_no_header",
        {"serving.http.connections:Connection.on_header": HttpToolsProtocol.on_header},
    ),
    "KV events reveal prompts": Removed(
        "tests/lmi_config/plan/test_plan.py::test_without_being_asked_for_there_are_no_kv_events",
        {"lmi_config.options.declared:Settings.__init__.__kwdefaults__[kv_events]": True},
    ),
    "Secrets in logs and plans": Removed(
        "tests/lmi_config/options/test_redaction.py::test_what_looks_like_a_secret_is_masked",
        {"lmi_config.options.redaction:_SHAPES": NOTHING},
    ),
    "Prompts in logs and errors": Removed(
        "tests/serving/api/test_fuzz.py::test_a_refusal_does_not_repeat_the_prompt",
        {"serving.engine.vllm_errors:_repeats_prompt": nothing},
    ),
    "Another version of vLLM, LMCache or uvicorn lacks a name that separates tenants or limits "
    "clients": Removed(
        "tests/serving/test_patches.py::test_nothing_is_replaced_where_the_start_is_refused",
        {"serving.patching.patch:Patch.applies": nothing},
    ),
    "Prompts and answers in what libraries log": Removed(
        "tests/serving/engine/test_answers_in_log.py::test_no_line_has_an_answer_in_it",
        {"serving.observability.redaction:_READERS": ()},
    ),
    "Bodies of many values, or of values of many forms, which are slow to read": Removed(
        "tests/serving/inference/test_limits.py::test_the_keys_and_values_of_a_body_have_limits",
        {"serving.inference.content.fields:has_more": lambda *_: False},
    ),
    "Endless heads, silent connections, slow bodies, too many connections": Removed(
        f"{HTTP}test_a_head_without_end_is_431",
        {
            "serving.http.connections:MAX_HEAD": 10**9,
            "serving.http.connections:MAX_HEADERS": 10**9,
        },
    ),
    "Clients that do not read their answers": Removed(
        f"{HTTP}test_a_client_that_reads_nothing_is_let_go",
        {"serving.http.connections:Connection.overdue": nothing},
    ),
    "The hub's files of an adapter are others than it listed, or do not end": Removed(
        "tests/serving/lora/test_hub_adapters.py::test_what_comes_is_what_was_listed",
        {"serving.sources.hub_adapter:_as_listed": yes},
    ),
    "A client has an adapter fetched from anybody's repository": Removed(
        "tests/serving/lora/test_hub_adapters.py::"
        "test_what_is_allowed[org/french-allowed2-409-OPTION_ADAPTER_REPOS]",
        {"lmi_config.options.parsers:names_repo": yes},
    ),
    "An adapter takes the model's name": Removed(
        f"{ADAPTERS}test_bad_input[parameters17-409-lmi is a name of the model itself]",
        {"serving.lora.adapter_registry:AdapterRegistry.__init__": without_model_names},
    ),
    "Links, bombs and paths in archives": Removed(
        f"{ADAPTERS}test_the_headers_of_an_archive_are_not_held_in_memory",
        {f"serving.lora.archives:{limit}": 10**12 for limit in ("HEADER", "HEADERS", "OVERHEAD")},
    ),
    "A client names an adapter's internal version directly": Removed(
        "tests/serving/inference/test_limits.py::test_parameters_name_no_model",
        {"handlers.lmi:_NOT_PASSED": frozenset()},
    ),
    "`model.py` harms the server": Removed(
        f"{SECURE}test_code_that_would_run_is_refused_outside_of_channels_too",
        {"lmi_config.options.secure:file_faults": none_found},
    ),
    "One client fills the session store": Removed(
        "tests/serving/api/test_sessions.py::"
        "test_the_one_not_used_for_longest_gives_way_and_an_expired_one_before",
        {"serving.api.session_store:SessionStore._make_room": none_found},
    ),
    "An adapter's `model.py` reads secrets, or harms the server or another adapter": Removed(
        "tests/serving/lora/test_adapter_code.py::test_it_has_none_of_the_servers_secrets_and_rights",
        {"handlers.isolation:environment": dict},
    ),
    "Code that prints without end holds the server or fills the log": Removed(
        "tests/serving/lora/test_adapter_code.py::test_a_bounded_part_of_its_output_is_logged",
        {"serving.user_code:BURST": 10**9},
    ),
    "A line that takes long to log, or ends the log": Removed(
        "tests/lmi_config/options/test_redaction.py::test_no_line_takes_long[eyJ-]",
        {"lmi_config.options.redaction:_WEB_TOKEN": _QUADRATIC},
    ),
    "An adapter's header or configuration of millions of lists": Removed(
        'tests/lmi_config/facts/test_model.py::test_no_header_takes_much[[],-{"a":[-]}]',
        {"lmi_config.facts.model:_entries": all_entries},
    ),
    "Client headers override the operator's options in `handle`": Removed(
        "tests/serving/inference/test_custom_handler.py::test_an_option_that_is_not_set_is_no_clients_to_set",
        {"serving.user_code:names_option": nothing},
    ),
    "One request hangs `handle` for all later ones": Removed(
        "tests/serving/inference/test_custom_handler.py::test_a_hung_handle_wedges_nothing",
        {"serving.user_code:_Process._watch": nothing},
    ),
    "A client that reads a handler's stream slowly fills memory": Removed(
        "tests/serving/inference/test_custom_handler.py::test_a_stream_is_held_back_where_its_client_is_slow",
        {CREATE_PROCESS: in_child(MODEL_PY, "it.WINDOW = 10**12")},
    ),
    "Malformed headers from a handler": Removed(
        "tests/serving/test_user_code.py::test_headers_that_cannot_be_sent",
        {CREATE_PROCESS: in_child(MODEL_PY, "import re; it._HEADER = re.compile('.*', re.DOTALL)")},
    ),
    "A client steers the engine's queue or ranks, or learns its load": Removed(
        "tests/serving/inference/test_limits.py::test_no_header_steers_the_engine",
        {"serving.protocol:TRACE_CONTEXT": Everything()},
    ),
    "A tenant reads or replaces another's image by its `uuid` in the engine's caches": Removed(
        f"{MEDIA}test_a_uuid_is_its_senders_own",
        {"serving.inference.content.media:_name": nothing},
    ),
    "A tenant looks at, ends or prefetches another's conversation of the same name": Removed(
        "tests/serving/kv_cache/test_session_paths.py::"
        "test_a_conversation_is_its_tenants_alone[GET ]",
        {"serving.inference.kv_sessions:digest": of_tenant_a},
    ),
    "A client adds a tenant header to its gateway's": Removed(
        "tests/serving/kv_cache/test_salt.py::test_a_tenant_that_is_named_twice_is_refused",
        {"serving.kv_cache.salt:Tenants.tenant": first_tenant},
    ),
    "Images that are small in a body and large when decoded": Removed(
        f"{MEDIA}test_the_pixels_of_all_pictures_together_have_a_limit",
        {"serving.inference.content.media:_require_pixels": nothing},
    ),
    "A program on the same machine asks a copy past the router's keys and limits": Removed(
        "tests/serving/copies/test_divided.py::test_a_copy_lets_nobody_in_but_its_router",
        {"serving.copies.divided:secret": no_text},
    ),
    "A call of SageMaker's loads a model from anywhere on the machine": Removed(
        "tests/serving/models/test_offered.py::test_a_models_folder_is_below_the_roots",
        {"serving.models.offered:folder": any_folder},
    ),
    "A key without rights to a model has it started in another's place": Removed(
        "tests/serving/router/models/test_models.py::test_a_key_starts_only_its_models",
        {"serving.access.caller:Caller.require_model": nothing},
    ),
    "A web page calls a server on its reader's machine or network (CSRF, DNS rebinding)": Removed(
        "tests/serving/http/test_origins.py::test_a_foreign_page_changes_nothing",
        {"serving.http.origins:Origins.require": nothing},
    ),
    "A body that Slipway and the engine parse differently": Removed(
        "tests/serving/api/test_fuzz.py::test_the_engine_reads_what_was_checked",
        {"serving.engine.base:Call.request": property(body_last)},
    ),
    "Connections that never shake hands; no file descriptor is left": Removed(
        "tests/serving/http/test_tls.py::test_connections_count_before_they_shake_hands",
        {"serving.http.sockets:Connections.add": added_alone},
    ),
    "A client whose authority was taken out of `OPTION_TLS_CLIENT_CA_FILE`": Removed(
        "tests/serving/http/test_tls.py::test_connections_that_a_lost_authority_let_in_end",
        {"serving.http.listener:Listener._distrust": nothing_async},
    ),
    "An issuer answers without end, packed, or with thousands of keys": Removed(
        f"{ACCESS}test_tokens.py::test_while_the_issuer_is_broken_the_last_good_keys_stay",
        {"serving.access.tokens:MOST_KEYS": math.inf},
    ),
    "A store for limits hangs, or answers nonsense": Removed(
        f"{ACCESS}test_limits.py::test_a_store_that_hangs_holds_up_nobody",
        {"serving.access.limits:Limiter._require_answering": no},
    ),
    "A peer of the endpoint picker that is no gateway: messages out of order, streams and heads "
    "without end": Removed(
        "tests/serving/router/epp/test_hostile.py::test_streams_that_say_nothing_keep_nobody_out",
        {"serving.router.epp.grpc_streams:Streams.evict": nothing},
    ),
    "An answer says that it used a negative, endless or fractional number of tokens": Removed(
        "tests/serving/router/epp/test_epp.py::test_usage",
        {"serving.router.epp.answer_usage:counted": int},
    ),
    "Heads and bodies that never end, many connections, many headers, at the router": Removed(
        "tests/serving/router/test_routing.py::test_a_head_has_to_be_whole_in_time",
        {"serving.router.http.downstream:Downstream.check_timeouts": nothing},
    ),
    "A client removes or replaces the tenant header at the router": Removed(
        "tests/serving/router/test_routing.py::test_a_tenant_is_named_once",
        {"serving.router.http.forwarded_request:Request.check": nothing},
    ),
    "A client reaches what administers a server behind the router": Removed(
        "tests/serving/router/test_paths.py::test_paths_that_the_operator_names_are_passed_on",
        {"serving.router.routes:BELOW": EVERYTHING},
    ),
    "Request smuggling through the router": Removed(
        "tests/serving/router/http/test_fuzz.py::"
        "test_requests_that_proxies_and_servers_may_read_otherwise",
        {"serving.router.http.forwarded_request:_DROPPED": frozenset()},
    ),
    "Sound that becomes far larger when it is decoded, or lasts for hours": Removed(
        "tests/serving/api/test_audio.py::test_what_is_refused",
        {"serving.engine.speech.sound:seconds": one_second},
    ),
    "Bodies too large or too deep": Removed(
        "tests/serving/api/test_app.py::test_a_body_over_the_limit_is_413",
        {"serving.http.bodies:Bodies.__init__": bodies_of_any_size},
    ),
    "`n`, `logprobs`, `stop`, `bad_words` and other expensive parameters": Removed(
        "tests/serving/inference/test_limits.py::test_the_number_of_a_requests_answers_has_a_limit",
        {"serving.inference.content.checks:check": nothing},
    ),
    "A long query compared with many documents": Removed(
        "tests/serving/api/test_pooling.py::test_limits_of_comparisons",
        {"serving.inference.content.checks:check_pairs": nothing},
    ),
    "Long texts made into tokens": Removed(
        "tests/serving/api/test_pooling.py::test_tokens_have_a_limit",
        {"serving.inference.content.checks:check_tokenized": nothing},
    ),
    "Grammars that take long to compile": Removed(
        "tests/serving/inference/test_limits.py::test_what_costs_the_engine_more_than_the_client_has_a_limit",
        {"serving.inference.content.checks:_LONGEST": {}},
    ),
    "Too many requests, or too long ones": Removed(
        "tests/serving/inference/test_queue.py::"
        "test_what_the_engine_does_not_work_on_waits_and_the_rest_is_refused",
        {"serving.inference.admission:Admission.require_room": nothing},
    ),
}
