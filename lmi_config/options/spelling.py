# SPDX-License-Identifier: Apache-2.0
"""Unknown names: finds the intended known name, and whether that is certain."""

import difflib
import re
from collections.abc import Collection, Mapping

_NEAR = 0.8  # max_num_sequences and max_num_seqs, but not max_input_len and max_log_len
_SHORT_WORD, _LONG_WORD = 3, 8  # letters: cpu and gpu, min and max are not typos of each other
SHORTEST = 6  # letters of a name in which a typo is certain


def nearest(name: str, known: Collection[str], near: float = _NEAR) -> str | None:
    """The suggestion for an unknown name, or None."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=near)), None)


def mistyped(name: str, known: Mapping[str, str]) -> str | None:
    """Return the known name that was clearly meant: one typo away, and the only one; or None.

    known: name → meaning; two names of one option do not compete.
    """
    found = {meaning: other for other, meaning in known.items() if _slip(name, other)}
    return next(iter(found.values())) if len(found) == 1 else None


_OTHERS = frozenset(("CACHE", "LLM", "OPTIONAL", "SERVICE"))  # prefixes with meanings of their own
_KUBERNETES = re.compile(r".*_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets this variable for a service (its documentation, "Service")."""
    return bool(_KUBERNETES.fullmatch(name)) or re.match(r"(tcp|udp|sctp)://", value) is not None


def other_prefix(name: str, prefixes: Collection[str], known: Collection[str]) -> str | None:
    """Return the known name for a name whose prefix is nearly one of these, or None.

    OPTIONS_SEED, SAGMAKER_BIND_TO_PORT, SM_VLM_SEED: the rest must be right; otherwise this would
    be a guess.
    """
    if name.startswith(tuple(prefixes)):
        return None
    for end in (it.end() for it in re.finditer("_", name)):
        head, rest = name[: end - 1], name[end:]
        for prefix in prefixes:
            meant = prefix[:-1]
            if head not in _OTHERS and prefix + rest in known and _near(head, meant):
                return prefix + rest
    return None


def _near(head: str, meant: str) -> bool:
    """Whether a prefix is a typo of another."""
    edits = _edits(head.replace("_", "").upper(), meant.replace("_", ""))
    return edits < 2 or (edits == 2 and len(meant) > _LONG_WORD - 2 and head[:1] == meant[:1])


def _slip(one: str, other: str) -> bool:
    """Whether two names only differ by underscores, or by one or two mistyped letters."""
    if min(len(one), len(other)) < SHORTEST or re.sub(r"\D", "", one) != re.sub(r"\D", "", other):
        return False
    if one.replace("_", "") == other.replace("_", ""):
        return True
    pairs = list(zip(one.split("_"), other.split("_"), strict=False))
    if one.count("_") != other.count("_"):
        return False
    slips = [_slips(*pair) for pair in pairs if pair[0] != pair[1]]
    return None not in slips and sum(it or 0 for it in slips) <= 2


def _slips(one: str, other: str) -> int | None:
    """Return the number of wrong letters in a word, or None if it is another word."""
    longest = max(len(one), len(other))
    edits = _edits(one, other)
    allowed = 0 if longest <= _SHORT_WORD else 1 if longest < _LONG_WORD else 2
    return edits if edits <= allowed else None


def _edits(one: str, other: str) -> int:
    """Count the letters to insert, remove, replace or swap (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]
