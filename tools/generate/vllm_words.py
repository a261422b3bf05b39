# SPDX-License-Identifier: Apache-2.0
"""Write vllm_words.txt of serving/engine: the words that the pinned vLLM refuses requests with.

Other words in an error may be a client's text, and are compared with the request. Run with the
environment's Python whenever the pin moves; a test fails when the file is stale.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PATH = Path(__file__).parent.parent.parent / "serving" / "engine" / "vllm_words.txt"
_WORD = re.compile(r"[A-Za-z]+")
_PLACES = (
    *("entrypoints/anthropic", "entrypoints/generate", "entrypoints/openai"),
    *("entrypoints/pooling", "entrypoints/serve", "entrypoints/speech_to_text"),
    *("exceptions.py", "inputs", "multimodal", "parser", "platforms/interface.py"),
    *("pooling_params.py", "reasoning", "renderers", "sampling_params.py", "tokenizers"),
    *("tool_parsers", "v1/engine", "v1/structured_output"),
)
_SAYS = re.compile(r"error|exception", re.IGNORECASE)
_MESSAGE = re.compile(r"error|message|msg|suggestion")


def _messages(tree: ast.AST) -> Iterator[ast.AST]:
    """The messages that a module raises or answers, and its models' fields with their allowed
    words.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield node
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if _SAYS.search(name):
                yield node
        elif isinstance(node, ast.Assign):
            if any(_MESSAGE.search(ast.unparse(it)) for it in node.targets):
                yield node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield ast.Constant(node.target.id)
            yield node.annotation


def words() -> list[str]:
    """In lower case, without those of one letter."""
    import vllm
    from pydantic_core._pydantic_core import list_all_errors

    theirs = Path(vllm.__file__).parent
    files = [*PATH.parent.rglob("*.py")]
    for place in _PLACES:
        files += [theirs / place] if place.endswith(".py") else (theirs / place).rglob("*.py")
    texts = [it["message_template_python"] for it in list_all_errors()]
    for file in files:
        for message in _messages(ast.parse(file.read_text())):
            nodes = (it for it in ast.walk(message) if isinstance(it, ast.Constant))
            texts += [it.value for it in nodes if isinstance(it.value, str)]
    found = {word.lower() for text in texts for word in _WORD.findall(text)}
    return sorted(it for it in found if len(it) > 1)


def text() -> str:
    return "\n".join(words()) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
