# SPDX-License-Identifier: Apache-2.0
"""Bodies of agents' APIs (OpenAI's Responses, Anthropic's Messages) → the chats that vLLM (0.32)
builds from them, as far as a chat template sees them.

A body that is invalid, or has more than texts and function calls, raises some exception.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from serving.protocol import BILLING

Chat = dict[str, Any]
"""Keys of a chat, as OpenAI has them."""


def of_responses(asked: Mapping[str, Any]) -> Chat:
    """The chat that a body of Responses is."""
    messages: list[Chat] = []
    if instructions := asked.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items = asked["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        _add(messages, item)
    if items[-1].get("status") in ("in_progress", "incomplete"):
        raise ValueError  # the answer may go on with it
    tools = asked.get("tools") or ()
    return {
        "messages": messages,
        "tools": [*_functions(tools)] if tools else None,
        "reasoning_effort": (asked.get("reasoning") or {}).get("effort"),
        "chat_template_kwargs": asked.get("chat_template_kwargs"),
    }


def _add(messages: list[Chat], item: Mapping[str, Any]) -> None:
    """Add an item to the messages before it. A model's reasoning, text and calls become one
    message.
    """
    kind, role = item.get("type", "message"), item.get("role")
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = item["output"]
        messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
        return
    if kind == "message" and role != "assistant":
        messages.append({"role": role, "content": item["content"]})
        return
    said: Chat
    if kind == "message":
        content = item["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
        said = {"content": content}
    elif kind == "reasoning" and not item.get("encrypted_content"):
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        said = {"reasoning": parts[0]["text"] if parts else ""}
    elif kind == "function_call":
        name = "__".join(filter(None, (item.get("namespace"), item["name"])))
        arguments = msgspec.json.decode(item["arguments"] or "{}")
        said = {"tool_calls": [_call(item["call_id"], name=name, arguments=arguments)]}
    elif kind == "custom_tool_call":
        given = {"input": item.get("input") or ""}
        said = {"tool_calls": [_call(item["call_id"], name=item["name"], arguments=given)]}
    else:
        raise ValueError
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", **said})
    elif "tool_calls" in said:
        last["tool_calls"] = [*last.get("tool_calls", ()), *said["tool_calls"]]
    elif last.keys() & said.keys():
        messages.append({"role": "assistant", **said})
    else:
        last.update(said)


def _functions(tools: Iterable[Mapping[str, Any]]) -> Iterator[Chat]:
    """The functions among the tools of Responses. Roles that only OpenAI has are left out."""
    for tool in tools:
        if tool["type"] == "function":
            yield {"function": tool}
        elif tool["type"] == "namespace":
            for inner in _functions(tool["tools"]):
                function = inner["function"]
                yield {"function": {**function, "name": f"{tool['name']}__{function['name']}"}}
        elif tool["type"] == "custom":
            raise ValueError  # it is shown as a function of vLLM's own


def of_messages(asked: Mapping[str, Any], merges: bool, least_effort: str) -> Chat:
    """The chat for a body of Messages.

    merges: whether the template takes a system prompt only at the beginning; the system prompts of
    later messages are then merged into it. least_effort: the effort that means no thinking.
    """
    system = asked.get("system") or []
    prompts = [system] if isinstance(system, str) else [*_prompts(system)]
    messages: list[Chat] = []
    for message in asked["messages"]:
        content = message["content"]
        if message["role"] != "system":
            messages += _turn(message["role"], content)
            continue
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        said = "".join(_prompts(content))
        if merges:
            prompts.append(said)
        elif said:
            messages.append({"role": "system", "content": said})
    if prompt := "".join(prompts):
        messages.insert(0, {"role": "system", "content": prompt})
    effort = (asked.get("output_config") or {}).get("effort")
    if (asked.get("thinking") or {}).get("type") == "disabled":
        effort = least_effort
    tools = asked.get("tools") or ()
    return {
        "messages": messages,
        "tools": [{"function": _function(tool)} for tool in tools] or None,
        "reasoning_effort": effort,
        "chat_template_kwargs": asked.get("chat_template_kwargs"),
    }


def _prompts(blocks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The texts of a system prompt."""
    for block in blocks:
        if block["type"] != "text":
            raise ValueError
        if not block["text"].startswith(BILLING):
            yield block["text"]


def _turn(role: str, content: Any) -> Iterator[Chat]:
    """The messages that one of Messages is: results of tools have one each, before the others."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[Chat] = []
    calls: list[Chat] = []
    thoughts: list[str] = []
    for block in content:
        match block["type"]:
            case "text":
                parts += [{"type": "text", "text": block["text"]}] if block["text"] else []
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case "tool_use":
                given = block.get("input") or {}
                calls.append(_call(block["id"], arguments=given, name=block["name"]))
            case "tool_result" if role == "user":
                said = _result(block.get("content") or "")
                yield {"role": "tool", "content": said, "tool_call_id": block["tool_use_id"]}
            case _:
                raise ValueError
    message: Chat = {"role": role}
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    elif role == "user":
        return
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    yield message


def _result(content: Any) -> str:
    """A tool's result."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise ValueError
    return "\n".join(part["text"] for part in content)


def _function(tool: Mapping[str, Any]) -> Chat:
    schema = tool["input_schema"]
    return {**tool, "parameters": schema if "type" in schema else {**schema, "type": "object"}}


def _call(number: str, **function: Any) -> Chat:
    """A call as templates get it. Its keys are in vLLM's order, because templates may write it as
    JSON.
    """
    return {"id": number, "function": function, "type": "function"}
