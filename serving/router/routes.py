# SPDX-License-Identifier: Apache-2.0
"""Which paths the router answers, and by how many replicas."""

import enum
import re
from collections.abc import Sequence

from lmi_config.options.parsers import BELOW, LONGEST_PATH, administers
from serving.protocol import (
    ADAPTER_ID,
    ADAPTERS,
    ADAPTERS_PATH,
    BATCHES,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    CONVERSATIONS,
    ENGINE_PATHS,
    EXECUTION_PARAMETERS,
    FILES,
    FINALS,
    INVOCATIONS,
    INVOCATIONS_PATH,
    KV_PREFETCH,
    KV_PREFETCH_PATH,
    KV_SESSION,
    KV_SESSION_PATH,
    MANAGED,
    MANAGEMENT,
    MANAGEMENT_PATH,
    MESSAGES,
    MODELS,
    OTHERS_PATHS,
    PARENTS,
    REQUEST_ID,
    SERVER_LOGGING,
    SESSION_ID,
)

END_TO_END = frozenset(
    (ADAPTER_ID, SESSION_ID, *CONVERSATIONS, *PARENTS, *FINALS, b"content-type", REQUEST_ID)
)
"""Headers about a request, and not about a connection."""


class Route(enum.Enum):
    """Who answers a request. The value: the methods of its paths."""

    INFERENCE = "POST"
    """The replica that the strategy chooses."""
    READ = "GET, HEAD"
    """Any replica: they all say the same."""
    CHANGE = "POST, DELETE"
    """All replicas, because it changes state that they all have."""
    CONVERSATION = "GET, DELETE"
    """All replicas, because each may keep KV of the conversation. POST to the path below has the
    same route.
    """
    BATCH = "GET, HEAD, POST, DELETE"
    """Any replica: they share the folder of files and batches."""


_INFERENCE = re.compile("|".join((INVOCATIONS_PATH, *ENGINE_PATHS, *OTHERS_PATHS)))
_ENGINES = frozenset((*ENGINE_PATHS, *OTHERS_PATHS))
"""The inference paths without names in them."""
_GENERATES = re.compile("|".join((INVOCATIONS_PATH, CHAT_COMPLETIONS, COMPLETIONS, MESSAGES)))
_READ = re.compile(
    "|".join((f"{MODELS}(/.+)?", EXECUTION_PARAMETERS, f"({ADAPTERS_PATH})(/[^/]+)?"))
)
_CHANGE = re.compile(f"({ADAPTERS_PATH})(/[^/]+(/update)?)?")
_CONVERSATION = re.compile(KV_SESSION_PATH)
_PREFETCH = re.compile(KV_PREFETCH_PATH)
_BATCH = re.compile(f"{FILES}(/[^/]+(/content)?)?|{BATCHES}(/[^/]+(/cancel)?)?")


# In Python 3.11 a member takes a call of an enumeration.
INFERENCE, READ, CHANGE, CONVERSATION, BATCH = Route


_MANAGEMENT = re.compile(MANAGEMENT_PATH)
"""Replicas read these or refuse them, each as all others do."""


class Routes:
    """The routes of requests, with those that an operator adds."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        """more: paths for inference, and prefixes of such that end with /*."""
        self._more = frozenset(more)
        self._prefixes = tuple(it.removesuffix("/*") for it in more if it.endswith("/*"))

    def of(self, method: bytes, path: str) -> Route | None:
        """The route of a request, None if it needs no replica."""
        if self._more and method == b"POST" and self._added(path):
            return INFERENCE
        return route_of(method, path)

    def methods(self, path: str) -> list[str]:
        """The methods that a path answers. None if the path does not exist."""
        return [INFERENCE.value] if self._added(path) else methods(path)

    def template(self, path: str) -> str:
        """A path that has a route, as logs and spans have it: without the names in it."""
        return self._added(path) or template(path)

    def _added(self, path: str) -> str:
        """The operator's path or prefix that has this path, or ""."""
        if path in self._more and not path.endswith("/*"):
            return path
        for prefix in self._prefixes:
            rest = path.removeprefix(prefix)
            if rest != path and BELOW.fullmatch(rest) and not administers(path):
                return f"{prefix}/*"
        return ""


def may_be_added(path: str) -> bool:
    """Whether an operator can have a path passed on."""
    return len(path) <= LONGEST_PATH and bool(BELOW.fullmatch(path)) and not administers(path)


def route_of(method: bytes, path: str) -> Route | None:
    """The route of a request by the paths that are known."""
    if method == b"POST" and (path in _ENGINES or _INFERENCE.fullmatch(path)):
        return INFERENCE
    if method in (b"GET", b"HEAD") and _READ.fullmatch(path):
        return READ
    if _MANAGEMENT.fullmatch(path):
        return READ
    if _BATCH.fullmatch(path):
        return BATCH
    if method in (b"POST", b"DELETE") and _CHANGE.fullmatch(path):
        return CHANGE
    if method in (b"GET", b"DELETE") and _CONVERSATION.fullmatch(path):
        return CONVERSATION
    if method == b"POST" and _PREFETCH.fullmatch(path):
        return CONVERSATION
    return None


def generates(path: str) -> bool:
    """Whether a path may generate text for a prompt, which two replicas can do."""
    return bool(_GENERATES.fullmatch(path))


def creates(method: bytes, path: str) -> bool:
    """Whether each request on a path creates something new: a file, a batch."""
    return method == b"POST" and path in (FILES, BATCHES)


_TEMPLATES = [
    (re.compile(re.sub("{[^}]*}", "[^/]+", template)), template)
    for template in (
        *INVOCATIONS,
        *(f"{path}{rest}" for path in ADAPTERS for rest in ("", "/{name}", "/{name}/update")),
        *(*MANAGEMENT, *MANAGED, SERVER_LOGGING),
        *(f"{MODELS}/{{id}}", KV_SESSION, KV_PREFETCH),
    )
]
_PLAIN = _ENGINES | {MODELS, EXECUTION_PARAMETERS}


def template(path: str) -> str:
    """A path that has a route, as logs and spans have it: without the names in it."""
    if path in _PLAIN:
        return path
    return next((name for pattern, name in _TEMPLATES if pattern.fullmatch(path)), "other")


def methods(path: str) -> list[str]:
    """The methods that a path answers. None if the path does not exist."""
    routes = {
        **{_INFERENCE: INFERENCE.value, _READ: READ.value, _CHANGE: CHANGE.value},
        **{_CONVERSATION: CONVERSATION.value, _PREFETCH: "POST"},
    }
    return [allowed for pattern, allowed in routes.items() if pattern.fullmatch(path)]
