# SPDX-License-Identifier: Apache-2.0
"""Requests → the tokens that the engine makes of them.

No tokens are returned if they are uncertain: the engine may read the request differently. A wrong
answer only leads to a worse choice of replica. Templates run here, so this module belongs into the
processes of tokenizer_workers.py.
"""

import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import msgspec

from handlers import lmi, payloads
from lmi_config.facts.model import Checkpoint
from serving.cache_hints import documents
from serving.protocol import (
    BILLING,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    INVOCATIONS_PATH,
    MESSAGES,
    RESPONSES,
)
from serving.router.kv import agents
from serving.sources.locate import locate

LARGEST_FILE = 64 * 1024**2  # bytes of a tokenizer's files

_INVOCATIONS = re.compile(INVOCATIONS_PATH)
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_CHAT_KEYS = ("documents", "reasoning_effort")
# The arguments of apply_chat_template() that templates also use; clients may set them.
_GIVEN_ARGUMENTS = {"documents", "add_generation_prompt", "continue_final_message"}
# Parameters that change the prompt in further ways.
_CHANGING = ("chat_template", "prompt_embeds", "suffix", "truncate_prompt_tokens")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_TOOL_KEYS = ("description", "parameters")
_FURTHER_TOOL_KEYS = ("strict", "defer_loading")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_LATE_PROMPT = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
_PARTS = re.compile(r"for\s+\w+\s+in\s+(\w+\.content\b|\w+\[['\"]content['\"]\]|content\b)")
_BY_PATH = {
    CHAT_COMPLETIONS: "messages",
    MESSAGES: "messages",
    COMPLETIONS: "prompt",
    RESPONSES: "input",
}
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: transformers' own."""
        self._tokenizer = tokenizer
        # Whether the template takes contents as lists of parts; vLLM looks at its syntax tree.
        self._parts = bool(_PARTS.search(str(tokenizer.chat_template)))

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool) -> "Tokenizer":
        """The tokenizer that fetch() has saved in the folder. Takes seconds. Raises the exceptions
        of transformers if the folder has none.
        """
        from transformers import AutoTokenizer

        return cls(
            AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        )

    def tokens(
        self, path: str, body: bytes, content_type: str = "application/json"
    ) -> list[int] | None:
        """The tokens of a request's prompt, or None if they are uncertain. Raises any exception for
        invalid requests and from templates.
        """
        request = self._request(path, body, content_type)
        if not request or any(request.get(key) is not None for key in _CHANGING):
            return None
        if "messages" in request:
            text, special = self._chat(request), request.get("add_special_tokens", False)
        else:
            text, special = request["prompt"], request.get("add_special_tokens", True)
        if isinstance(text, list):
            return msgspec.convert(text, list[_Token])  # tokens already
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _request(self, path: str, body: bytes, content_type: str) -> dict[str, Any] | None:
        """The body as the engine gets it, with one `prompt` or `messages`; None if it has several.

        Raises FormatError, or any exception for wrong types.
        """
        key = _BY_PATH.get(path)
        if key is None:
            if not _INVOCATIONS.fullmatch(path):
                return None
            (body,) = payloads.requests(body, content_type)
        request: dict[str, Any] = msgspec.json.decode(body)
        anthropic = path == MESSAGES
        if key is None:
            given = (key for key in payloads.KEYS if request.get(key) is not None)
            key = next(given, None)
            anthropic = key == "messages" and request.get("anthropic_version") is not None
        if request.get(documents.CONSENT) == documents.CANONICAL:
            documents.order(MESSAGES if anthropic else CHAT_COMPLETIONS, request, len(body))
        if anthropic:
            return agents.of_messages(request, self._merges, self._least_effort)
        if key == "input":
            return agents.of_responses(request)
        if key == "inputs":
            request = cast(dict[str, Any], lmi.parse(body).body)
            if isinstance(request["prompt"], list):
                request["prompt"] = request["prompt"][0]  # they go to one replica, whichever it is
        elif key == "messages":
            return {**request, "prompt": None}
        elif key != "prompt":
            return None
        request.pop("messages", None)
        prompt = request["prompt"]
        if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
            (request["prompt"],) = prompt
        return request

    @functools.cached_property
    def _merges(self) -> bool:
        """Whether vLLM puts all system prompts of Messages at the beginning. It tries the template
        without what transformers adds to one.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        variants: tuple[list[Any] | None, ...] = (None, [])
        for tools in variants:
            template = self._tokenizer.get_chat_template(tools=tools)
            try:
                environment.from_string(template).render(
                    messages=_LATE_PROMPT, add_generation_prompt=False
                )
            except jinja2.TemplateError:
                return True
        return False

    @functools.cached_property
    def _least_effort(self) -> str:
        """The effort for Messages without thinking: `none`, if the template knows that."""
        none, *others = (self._of_effort(effort) for effort in ("none", *_EFFORTS))
        return "low" if none is None or none in others else "none"

    def _of_effort(self, effort: str) -> str | None:
        try:
            return self._chat({"messages": _LATE_PROMPT[1:2], "reasoning_effort": effort})
        except Exception:  # of templates
            return None

    def _chat(self, request: Mapping[str, Any]) -> str:
        """The text of a chat, with vLLM's defaults."""
        options = {
            "add_generation_prompt": request.get("add_generation_prompt", True),
            "continue_final_message": request.get("continue_final_message", False),
            **{key: request[key] for key in _CHAT_KEYS if request.get(key) is not None},
        }
        given = request.get("chat_template_kwargs") or {}
        if "reasoning_effort" in options and "enable_thinking" not in given:
            options["enable_thinking"] = options["reasoning_effort"] != "none"
        conversation = [_message(message, self._parts) for message in request["messages"]]
        tools = request.get("tools")
        template = self._tokenizer.get_chat_template(tools=tools)
        if not _knows_developers(template):
            conversation = _without_developers(conversation)
        # As in vLLM (renderers/hf.py): a client names variables of the model's template, and brings
        # no template of its own.
        if given.keys() & _arguments() - _GIVEN_ARGUMENTS:
            raise ValueError
        taken = _variables(template) | _GIVEN_ARGUMENTS
        given = {name: value for name, value in given.items() if name in taken}
        text: str = self._tokenizer.apply_chat_template(
            conversation,
            tools=None if tools is None else [_tool(tool) for tool in tools],
            tokenize=False,
            **{**given, **options},
        )
        return text


@functools.cache
def _arguments() -> frozenset[str]:
    """The parameters of transformers' apply_chat_template()."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@functools.cache
def _variables(template: str) -> set[str]:
    """The variables of a template."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return jinja2.meta.find_undeclared_variables(environment.parse(template))


def fetch(
    model_id: str,
    environ: Mapping[str, str],
    folder: Path,
    *,
    revision: str | None = None,
    downloads: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Fetch a model's tokenizer into a folder, without weights. Blocks for seconds.

    model_id: a folder, an `s3://` prefix or a hub id. Raises SourceError or ModelError if the model
    cannot be fetched.
    """
    checkpoint = locate(model_id, environ, revision=revision, downloads=downloads).checkpoint()
    _copy(checkpoint, folder, (*_SUFFIXES, ".py") if trust_remote_code else _SUFFIXES)


def _copy(checkpoint: Checkpoint, folder: Path, suffixes: tuple[str, ...]) -> None:
    for name, size in checkpoint.sizes.items():
        if name.endswith(suffixes) and size <= LARGEST_FILE:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(checkpoint.head(name, size))


def _message(message: Mapping[str, Any], in_parts: bool) -> dict[str, Any]:
    """A message as vLLM gives it to the template. Raises ValueError for one with media."""
    rendered: dict[str, Any] = {"role": message["role"]}
    content = message.get("content") or []
    parts = [content] if isinstance(content, str) else content
    texts = [_text(part) for part in parts]
    if message["role"] == "system":
        texts = [text for text in map(_unbilled, texts) if text is not None]
    if in_parts and message["role"] != "tool":
        rendered["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        rendered["content"] = "\n".join(filter(None, texts))
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            rendered["tool_calls"] = [_call(call) for call in calls]
        if (reasoning := message.get("reasoning")) is not None:
            rendered |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif message["role"] == "developer":
        rendered["tools"] = message.get("tools")
    elif message["role"] == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    return rendered


def _unbilled(text: str) -> str | None:
    """A system prompt's text without Claude Code's billing line."""
    if not text.startswith(BILLING):
        return text
    return text.partition("\n")[2] or None


def _knows_developers(template: str) -> bool:
    return '"developer"' in template or "'developer'" in template


def _without_developers(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn developers' messages into system messages. Several system prompts are then merged into
    one.
    """
    prompts = [it["content"] for it in conversation if it["role"] in ("system", "developer")]
    others = [it for it in conversation if it["role"] not in ("system", "developer")]
    if all(it["role"] != "developer" for it in conversation):
        return conversation
    if len(prompts) == 1 and conversation[0] not in others:
        return [{"role": "system", "content": prompts[0]}, *others]
    texts = [
        prompt if isinstance(prompt, str) else "\n".join(part["text"] for part in prompt)
        for prompt in prompts
    ]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part["type"] not in _TEXTS:
        raise ValueError
    text: str = part["refusal" if part["type"] == "refusal" else "text"]
    return text


def _call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call with its arguments as an object, as templates expect them."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return call
    arguments = msgspec.json.decode(arguments)
    # In the order of keys that a chat's have when vLLM has read them.
    function = {"arguments": arguments, "name": function["name"]}
    return {"id": call.get("id"), "function": function, "type": "function"}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the keys of vLLM's class for it, in their order, because templates write it as
    JSON.
    """
    given = tool["function"]
    function = {"name": given["name"], **{key: given.get(key) for key in _TOOL_KEYS}}
    function |= {key: given[key] for key in _FURTHER_TOOL_KEYS if given.get(key) is not None}
    return {"type": "function", "function": function}
