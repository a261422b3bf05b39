# SPDX-License-Identifier: Apache-2.0
"""How adapters on the Hugging Face hub are named, and which of them an operator allows."""

import re
from collections.abc import Iterable
from typing import NamedTuple

SCHEME = "hf://"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"(?:{SCHEME})?(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?")


class HubId(NamedTuple):
    """revision: a branch, a tag or a commit; None for the main branch."""

    repo: str
    revision: str | None


def hub_id(src: str) -> HubId | None:
    """What `org/name`, `hf://org/name` or either with `@revision` names; None for anything else."""
    found = _ID.fullmatch(src)
    return HubId(found["repo"], found["revision"]) if found else None


def allowed(repo: str, repos: Iterable[str]) -> bool:
    """Whether a list of `org/name` and `org/*` names a repository."""
    return any(repo == it or f"{repo.partition('/')[0]}/*" == it for it in repos)
