"""Requests → the tokens that the engine makes of them, beside the event loop.

What cannot be told here, or not soon, has no tokens: the engine reads requests its own way, and a
wrong answer costs no more than a worse choice of replica.
"""

import asyncio
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec

from handlers import lmi, payloads
from lmi_config.model import Checkpoint
from serving.sources import locate

LARGEST = 1024**2  # bytes of a body; tokenising takes about a second for every 5 MB
LONGEST = 32  # requests that wait for a thread
THREADS = 2  # the tokenizers library lets go of the interpreter's lock
LARGEST_FILE = 64 * 1024**2  # bytes of what can belong to a tokenizer

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_CHAT_KEYS = ("documents", "reasoning_effort")
# Parameters that change the prompt in further ways.
_CHANGING = ("chat_template", "prompt_embeds", "suffix", "truncate_prompt_tokens")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_TOOL_KEYS = ("description", "parameters")
_PARTS = re.compile(r"for\s+\w+\s+in\s+(\w+\.content\b|\w+\[['\"]content['\"]\]|content\b)")
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Tokenizer:
    """A model's tokenizer and chat template. load() makes it."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: transformers' own."""
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, "tokens")
        self._waiting = 0
        # Whether the template takes contents as lists of parts; vLLM looks at its syntax tree.
        self._parts = bool(_PARTS.search(str(tokenizer.chat_template)))

    async def tokens(
        self, path: str, body: bytes, content_type: str = "application/json"
    ) -> list[int] | None:
        """The tokens of a request's prompt, or None where they cannot be told."""
        if len(body) > LARGEST or self._waiting >= LONGEST:
            return None
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._tokens, path, body, content_type
            )
        except Exception:
            # Templates and tokenizers are code that came with the model. Its messages can repeat
            # the prompt, so they are not told.
            return None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tokens(self, path: str, body: bytes, content_type: str) -> list[int] | None:
        request = _request(path, body, content_type)
        if not request or any(request.get(key) is not None for key in _CHANGING):
            return None
        if "messages" in request:
            text, special = self._chat(request), request.get("add_special_tokens", False)
        else:
            text, special = request["prompt"], request.get("add_special_tokens", True)
        if isinstance(text, list):
            return msgspec.convert(text, list[_Token])  # tokens already
        return list(self._tokenizer.encode(text, add_special_tokens=special))

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
        text: str = self._tokenizer.apply_chat_template(
            conversation,
            tools=None if tools is None else [_tool(tool) for tool in tools],
            tokenize=False,
            **{**given, **options},
        )
        return text


def load(
    model_id: str,
    environ: Mapping[str, str],
    *,
    revision: str | None = None,
    downloads: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """The tokenizer of a model: a folder, an `s3://` prefix or a hub id. Blocks for seconds.

    Fetches no weights. Raises SourceError or ModelError where the model cannot be had, and what
    transformers raises where it has no tokenizer.
    """
    checkpoint = locate(model_id, environ, revision=revision, downloads=downloads).checkpoint()
    from transformers import AutoTokenizer  # takes seconds

    with tempfile.TemporaryDirectory() as folder:
        _copy(checkpoint, Path(folder), (*_SUFFIXES, ".py") if trust_remote_code else _SUFFIXES)
        found = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    return Tokenizer(found)


def _copy(checkpoint: Checkpoint, folder: Path, suffixes: tuple[str, ...]) -> None:
    for name, size in checkpoint.sizes.items():
        if name.endswith(suffixes) and size <= LARGEST_FILE:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(checkpoint.head(name, size))


def _request(path: str, body: bytes, content_type: str) -> dict[str, Any] | None:
    """The body as the engine gets it, with one `prompt` or `messages`; None where there are more.

    Raises FormatError, or whatever comes of wrong types.
    """
    if not path.startswith("/v1/"):
        (body,) = payloads.requests(body, content_type)
    request: dict[str, Any] = msgspec.json.decode(body)
    if path == "/v1/chat/completions":
        keys = ["messages"]
    elif path == "/v1/completions":
        keys = ["prompt"]
    else:
        keys = [key for key in payloads.KEYS if request.get(key) is not None]
    if keys[:1] == ["inputs"]:
        request = msgspec.json.decode(lmi.parse(body).body)
        if isinstance(request["prompt"], list):
            request["prompt"] = request["prompt"][0]  # they go to one replica, whichever that is
    elif keys[:1] == ["messages"]:
        return {**request, "prompt": None}
    elif keys[:1] != ["prompt"]:
        return None
    request.pop("messages", None)
    prompt = request["prompt"]
    if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
        (request["prompt"],) = prompt
    return request


def _message(message: Mapping[str, Any], in_parts: bool) -> dict[str, Any]:
    """A message as vLLM gives it to the template. Raises ValueError for one with media."""
    found: dict[str, Any] = {"role": message["role"]}
    content = message.get("content") or []
    parts = [content] if isinstance(content, str) else content
    texts = [_text(part) for part in parts]
    if in_parts and message["role"] != "tool":
        found["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        found["content"] = "\n".join(texts)
    if message["role"] == "assistant":
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_call(call) for call in calls]
        if (reasoning := message.get("reasoning")) is not None:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif message["role"] == "developer":
        raise ValueError  # vLLM makes it the system's where the template does not know it
    elif message["role"] == "tool" and "tool_call_id" in message:
        found["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return found


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part["type"] not in _TEXTS:
        raise ValueError
    text: str = part["refusal" if part["type"] == "refusal" else "text"]
    return text


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect them."""
    function = dict(call["function"])
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the keys of vLLM's class for it, in their order: templates make JSON of it."""
    given = tool["function"]
    function = {"name": given["name"], **{key: given.get(key) for key in _TOOL_KEYS}}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}
