# SPDX-License-Identifier: Apache-2.0
"""Pictures of Responses and Messages have names that no other tenant's have."""

import json
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from serving.aio import in_thread
from serving.engine.patches.frontend.context import Context
from serving.engine.versions import moved
from serving.patching.patch import SERVER, Name, Patch, replace


def _put(_: Context) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    parts = moved.chat_utils()
    texts = getattr(parts, "TEXT_PART_TYPES", moved.TEXT_PART_TYPES)
    kinds = parts.MM_PARSER_MAP.keys() - texts

    def make(preprocess_chat: Any) -> Any:
        @wraps(preprocess_chat)
        async def named(self: Any, request: Any, messages: Any, *rest: Any, **more: Any) -> Any:
            # `self` is the copy for one call (calls.RequestStandIn.own).
            name = getattr(self, "name_medium", None)
            if name and (media := _media(messages, kinds)):
                await in_thread(_name, media, kinds, name)
            return await preprocess_chat(self, request, messages, *rest, **more)

        return named

    replace(OnlineRenderer, "preprocess_chat", make)


def _media(messages: Iterable[Any], kinds: set[str]) -> list[dict[str, Any]]:
    """The parts of messages that have media, which are of these kinds."""
    found = []
    for message in messages:
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        message["content"] = parts = [*content]  # pydantic lets some be read only once
        found += [part for part in parts if isinstance(part, dict) and kinds & part.keys()]
    return found


def _name(media: Iterable[dict[str, Any]], kinds: set[str], name: Callable[[str], str]) -> None:
    for part in media:
        given = {key: part[key] for key in kinds & part.keys()}
        part["uuid"] = name(json.dumps(given, sort_keys=True))


def _sees(context: Context) -> bool:
    return bool(context.state.engine_client.model_config.is_multimodal_model)


PATCH = Patch(
    name="media_names",
    process=SERVER,
    names=(
        Name(
            "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat",
            "self, request, messages, ...",
        ),
    ),
    does="Gives each picture of a message a name (`uuid`) from its content and the tenant's salt.",
    why="vLLM's media caches name a picture without a name by its content, and requests of "
    "Responses and Messages have no field for names.",
    without="tenants would share cached pictures",
    closed=True,
    needed=_sees,
    put=_put,
)
