# SPDX-License-Identifier: Apache-2.0
"""The documents of a chat in an order that depends on their contents alone, by consent.

A KV cache serves equal beginnings of prompts only. Requests with the same documents in another
order share none, unless somebody orders the documents. The order here needs no state: every server
finds the same one for the same documents.

Documents are the items of `documents`, which a chat template may use, and parts of a message with
`"orderable": true`. Only those parts move that are next to each other, so no other part changes its
place. A tool's result keeps its order.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

from serving.protocol import CHAT_COMPLETIONS, MESSAGES

CONSENT = "document_order"
"""The key of a body that has the client's consent: CANONICAL, or GIVEN, which is the default."""
CANONICAL, GIVEN = "canonical", "given"
MOST = 512
"""Most documents of a request that are ordered: the answer has a header with all of them."""
LARGEST = 4 * 1024 * 1024
"""Most bytes of a body whose documents are ordered. A digest takes time on the event loop."""
_ORDERABLE = "orderable"
_Run = tuple[list[Any], slice]


def order(path: str, body: dict[str, Any], size: int) -> str:
    """Put the documents of a body into canonical order, in place, and return that order.

    path: the engine's. size: bytes of the body as it came. The order "2,0,1" means that the third
    document as sent is now the first. Each list or run of parts has its own order, separated by
    ";", `documents` first. Returns "" and changes nothing if there are no documents, or too many.
    """
    runs = [*_runs(path, body)] if size <= LARGEST else []
    if sum(run.stop - run.start for _, run in runs) > MOST:
        return ""
    return ";".join(",".join(map(str, _sort(*it))) for it in runs)


def _runs(path: str, body: dict[str, Any]) -> Iterator[_Run]:
    """Yield the lists with documents, and which of their items are documents next to each other."""
    if path == CHAT_COMPLETIONS and isinstance(found := body.get("documents"), list) and found:
        yield found, slice(0, len(found))
    if path not in (CHAT_COMPLETIONS, MESSAGES) or not isinstance(body.get("messages"), list):
        return
    for message in body["messages"]:
        if not isinstance(message, dict) or message.get("role") == "tool":
            continue
        if isinstance(parts := message.get("content"), list):
            numbered = itertools.groupby(range(len(parts)), lambda at: _is_orderable(parts[at]))
            for is_run, places in numbered:
                first, *more = places
                if is_run:
                    yield parts, slice(first, first + len(more) + 1)


def _is_orderable(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and part.get(_ORDERABLE) is True


def _sort(items: list[Any], run: slice) -> list[int]:
    """Sort a run of documents by their digests, and return their former places in the run."""
    digests = [hashlib.sha256(json.dumps(it).encode()).digest() for it in items[run]]
    found = sorted(range(len(digests)), key=digests.__getitem__)
    items[run] = [items[run][at] for at in found]
    return found
