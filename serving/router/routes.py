# SPDX-License-Identifier: Apache-2.0
"""Which paths the router answers, and by how many replicas."""

import enum
import re

from serving.protocol import (
    ADAPTER_ID,
    ADAPTERS,
    ADAPTERS_PATH,
    BATCHES,
    CHAT_COMPLETIONS,
    COMPLETIONS,
    ENGINE_PATHS,
    EXECUTION_PARAMETERS,
    FILES,
    INVOCATIONS,
    INVOCATIONS_PATH,
    MANAGED,
    MANAGEMENT,
    MANAGEMENT_PATH,
    MESSAGES,
    MODELS,
    REQUEST_ID,
    SERVER_LOGGING,
    SESSION_ID,
    VLLM_SESSION_ID,
)

END_TO_END = frozenset((ADAPTER_ID, SESSION_ID, VLLM_SESSION_ID, b"content-type", REQUEST_ID))
"""Headers that say what a request is about, and so are not about a connection."""


class Route(enum.Enum):
    """Who answers a request. The value: the methods of its paths."""

    INFERENCE = "POST"
    """The replica that the strategy chooses."""
    READ = "GET, HEAD"
    """Any replica: they all say the same."""
    CHANGE = "POST, DELETE"
    """All replicas: what it changes they all have."""
    BATCH = "GET, HEAD, POST, DELETE"
    """Any replica: they share the folder of files and batches."""


_INFERENCE = re.compile("|".join((INVOCATIONS_PATH, *ENGINE_PATHS)))
_GENERATES = re.compile("|".join((INVOCATIONS_PATH, CHAT_COMPLETIONS, COMPLETIONS, MESSAGES)))
_READ = re.compile(
    "|".join((f"{MODELS}(/.+)?", EXECUTION_PARAMETERS, f"({ADAPTERS_PATH})(/[^/]+)?"))
)
_CHANGE = re.compile(f"({ADAPTERS_PATH})(/[^/]+(/update)?)?")
_BATCH = re.compile(f"{FILES}(/[^/]+(/content)?)?|{BATCHES}(/[^/]+(/cancel)?)?")


INFERENCE, READ, CHANGE, BATCH = Route  # in Python 3.11 a member takes a call of an enumeration


_MANAGEMENT = re.compile(MANAGEMENT_PATH)
"""Replicas read these or refuse them, each as all others do."""


def route_of(method: bytes, path: str) -> Route | None:
    """The route of a request, None where replicas have nothing to do with it."""
    if method == b"POST" and _INFERENCE.fullmatch(path):
        return INFERENCE
    if method in (b"GET", b"HEAD") and _READ.fullmatch(path):
        return READ
    if _MANAGEMENT.fullmatch(path):
        return READ
    if _BATCH.fullmatch(path):
        return BATCH
    if method in (b"POST", b"DELETE") and _CHANGE.fullmatch(path):
        return CHANGE
    return None


def generates(path: str) -> bool:
    """Whether what is asked for on a path may be text for a prompt, which two replicas can make."""
    return bool(_GENERATES.fullmatch(path))


def creates(method: bytes, path: str) -> bool:
    """Whether what is asked for on a path is made anew each time: a file, a batch."""
    return method == b"POST" and path in (FILES, BATCHES)


_TEMPLATES = [
    (re.compile(re.sub("{[^}]*}", "[^/]+", template)), template)
    for template in (
        *INVOCATIONS,
        *(f"{path}{rest}" for path in ADAPTERS for rest in ("", "/{name}", "/{name}/update")),
        *(*MANAGEMENT, *MANAGED, SERVER_LOGGING),
        f"{MODELS}/{{id}}",
    )
]
_PLAIN = frozenset((*ENGINE_PATHS, MODELS, EXECUTION_PARAMETERS))


def template(path: str) -> str:
    """A path that has a route, as logs and spans have it: without the names in it."""
    if path in _PLAIN:
        return path
    return next((name for pattern, name in _TEMPLATES if pattern.fullmatch(path)), "other")


def methods(path: str) -> list[str]:
    """The methods that a path answers. None where there is no such path."""
    routes = ((_INFERENCE, INFERENCE), (_READ, READ), (_CHANGE, CHANGE))
    return [route.value for pattern, route in routes if pattern.fullmatch(path)]
