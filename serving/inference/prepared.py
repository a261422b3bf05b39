# SPDX-License-Identifier: Apache-2.0
"""The second step of a request: its input formatter, its format, its limits and its media."""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from handlers import lmi
from handlers.multipart import Form
from handlers.openai import PROMPT_ALONE
from handlers.records import EngineCall, FormatError, Reply, StepReply
from lmi_config.options.declared import Settings
from lmi_config.plan import kv_tiers
from serving import protocol
from serving.access.caller import Phase
from serving.aio import in_thread
from serving.engine.base import HANDED_OVER, Engine
from serving.engine.speech import sound
from serving.errors import BadRequest
from serving.inference.content import checks, media
from serving.inference.content.fields import (
    RequestFields,
    as_structured_outputs,
    bad_request,
    fields,
    fields_of,
    formats,
    guided,
    with_structured_outputs,
)
from serving.inference.request import NAMED_EVENTS, Framing, InferenceRequest
from serving.kv_cache import transfer as kv_transfer
from serving.user_code import UserCode


class Formatters(NamedTuple):
    """The model.py that formats a request, and the one that formats its answer."""

    input: UserCode | None
    output: UserCode | None

    def require_none(self) -> None:
        """Raise BadRequest if there is one. Formatters only know the formats of completions and
        chats.
        """
        if any(self):
            raise BadRequest(
                "this model's model.py formats requests and answers, which it can do for "
                "completions, chats and /invocations with inputs only"
            )


class Rendering(NamedTuple):
    """How the engine's answer becomes the client's.

    reply, steps: the format's (EngineCall); None without one. formatter: renders the answer
    instead. formatted: whether a model.py formats the request or its answer; if so, the head of a
    stream has the header FORMATTED.
    """

    framing: Framing
    reply: Reply | None
    steps: StepReply | None
    formatter: UserCode | None
    formatted: bool


class Prepared(NamedTuple):
    """A request as the engine's, before it is anybody's.

    path: the engine's. body: its values, which are this request's alone. size: bytes of the body
    as it came. given: the fields of that body. fields: of the values. media: the parts of the body
    that have media. sequences: the number that the engine runs. transfer: the parameters that say
    where the prompt's KV is.
    """

    path: str
    body: dict[str, Any]
    size: int
    given: RequestFields
    fields: RequestFields
    media: list[dict[str, Any]]
    sequences: int
    transfer: Mapping[str, object] | None
    rendering: Rendering


async def prepare(
    request: InferenceRequest, formatters: Formatters, engine: Engine, settings: Settings
) -> Prepared:
    """Format a request, read it as its format has it, check it, and fetch its media. Limits and
    checks apply to the formatted request, not to the client's. Raises BadRequest and
    UserCodeFailed.
    """
    sent, given = await _formatted(request, formatters)
    if given is not request.fields:
        request.cancellation.end_after(request.timeout(given, settings))
    form = _parsed(request, sent, given, engine, settings)
    path = form.path
    if path in protocol.AGENTS_PATHS:
        formatters.require_none()
    found = given if isinstance(form.body, bytes) else fields_of(form.body)
    constraint = guided(found) if path in _GUIDED_PATHS else None
    if constraint:
        found = as_structured_outputs(found, constraint)
    _check(request, path, sent, found, settings)
    sequences = found.sequences(path)
    parts: list[dict[str, Any]] = []
    if request.form:
        sequences *= await _windows(request.form, settings)
        body = request.form.values()
    else:
        body, parts = await _with_media(form, settings)
    if constraint:
        body = with_structured_outputs(body, constraint)
    phase = request.client.record.caller.phase
    alone = _prompt_alone(path) if phase == "prefill" else {}
    transfer = _transfer(request.transfer, phase, path, sequences, settings)
    rendering = _rendering(request.framing, phase, form, formatters)
    return Prepared(
        *(path, body | alone, len(sent), given, found, parts, sequences),
        *(transfer, rendering),
    )


_GUIDED_PATHS = (protocol.COMPLETIONS, protocol.CHAT_COMPLETIONS)


async def _formatted(
    request: InferenceRequest, formatters: Formatters
) -> tuple[bytes, RequestFields]:
    """Return a request's body after the input formatter, if there is one, and its fields."""
    if request.form or request.client.scope["path"] in protocol.UNFORMATTED_PATHS:
        formatters.require_none()
    if formatters.input:
        body = await formatters.input.format_request(request.body, request.content_type)
        return body, fields(body)
    if request.raw:
        raise BadRequest(
            f"the body is {request.content_type:.100}, which only an @input_formatter in "
            "a model.py reads; send JSON, text/plain, text/csv or application/jsonlines"
        )
    return request.body, request.fields


def _parsed(
    request: InferenceRequest,
    body: bytes,
    given: RequestFields,
    engine: Engine,
    settings: Settings,
) -> EngineCall:
    """Return what the body's format makes of it. Raises BadRequest."""
    given.require_few_prompts()
    parse = request.parse or given.parser(
        formats(engine.embeds, settings.normalize, engine.classifies),
        anthropic=bool(request.client.headers.get(protocol.ANTHROPIC_VERSION)),
    )
    try:
        form = parse(body)
    except FormatError as error:
        raise bad_request(error) from None
    if form.ignored:
        request.client.record.ignored(form.ignored, lmi.KNOWN)
    return form


def _check(
    request: InferenceRequest, path: str, body: bytes, found: RequestFields, settings: Settings
) -> None:
    """Raise BadRequest for a call that the engine must not get."""
    checks.check(found, settings.trust_request_internals)
    if path == protocol.RESPONSES:
        checks.check_items(found)
        checks.check_kept(found)
    elif path in protocol.PAIRS_PATHS:
        checks.check_pairs(found)
    elif path in protocol.TOKENIZER_PATHS:
        checks.check_tokenized(body)


async def _windows(form: Form, settings: Settings) -> int:
    """Return the number of sequences of a form's audio: one for each window of the model.

    Raises BadRequest if the file is not audio, or too long.
    """
    try:
        lasts = await in_thread(sound.seconds, form.file, settings.max_audio_seconds)
    except sound.SoundError as error:
        raise BadRequest(str(error), "file") from None
    return max(math.ceil(lasts / sound.WINDOW_S), 1)


async def _with_media(
    form: EngineCall, settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the engine's request as values with fetched media, and its parts that have media.

    Raises BadRequest.
    """
    sent = form.body
    body = _values(sent) if isinstance(sent, bytes) else sent
    if isinstance(sent, bytes) and not media.may_have_media(sent):
        return body, []
    pairs = form.path in protocol.PAIRS_PATHS
    allowed, limit = settings.allowed_media_domains, settings.max_request_size
    return body, await media.fetch(body, allowed, limit, pairs)


def _values(body: bytes) -> dict[str, Any]:
    """Read a request that was checked (RequestFields) as vLLM would: the last of two equal keys
    counts. Raises BadRequest if an unchecked part of it is not JSON.
    """
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    return found


def _prompt_alone(path: str) -> dict[str, Any]:
    """Return the keys that make the engine compute only a call's prompt. Raises BadRequest for
    paths that allow no such call.
    """
    if path not in PROMPT_ALONE:
        raise BadRequest(f"prompts on {path} are not computed for other servers")
    return {**PROMPT_ALONE[path]}


def _transfer(
    source: Mapping[str, object] | None,
    phase: Phase,
    path: str,
    sequences: int,
    settings: Settings,
) -> Mapping[str, object] | None:
    """Return the engine's parameters for the prompt's KV, if two servers share the request. source:
    of the KV, as the request names it. Raises BadRequest.
    """
    if phase == "prefill" and kv_tiers.transfers(settings):
        return kv_transfer.offered(sequences)
    if phase == "decode" and path in PROMPT_ALONE:
        return (source if sequences == 1 else None) or {HANDED_OVER: True}
    return None


def _rendering(
    framing: Framing, phase: Phase, form: EngineCall, formatters: Formatters
) -> Rendering:
    if form.path in protocol.AGENTS_PATHS:
        framing = NAMED_EVENTS
    if phase == "prefill":
        return Rendering(framing, None, None, None, formatters.input is not None)
    if formatters.output:
        return Rendering(framing, None, None, formatters.output, formatted=True)
    return Rendering(framing, form.reply, form.steps, None, formatters.input is not None)
