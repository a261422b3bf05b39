# SPDX-License-Identifier: Apache-2.0
"""What the supervisor tells a child to be, and what the child reports when it ends.

What a child is told is a pickle in memory that only the two of them have open. It never was on a
disk, and nobody else can have written it. The plan is in it, so that all copies serve what was
decided once, also one that is started again.
"""

import contextlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from lmi_config.options.declared import Settings
from lmi_config.options.files import Given
from serving.exit import DIED, Exit
from serving.router.fleet.own_copies import OwnCopies
from serving.server.prepare import Deployment

LONGEST = 64 * 1024
"""Bytes of a report."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What every child is told. parent: the supervisor's process. report: the descriptor for its
    report. argued: the command line's options, whose secrets no log may have.
    """

    parent: int
    report: int
    argued: Mapping[str, Given]


@dataclass(frozen=True, kw_only=True)
class CopyPart(Part):
    """A copy of the model. cpus: those that it may run on."""

    number: int
    deployment: Deployment
    cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RouterPart(Part):
    """The router. listener: the descriptor of the socket that it accepts connections from, None
    where it has several processes, which listen for themselves.
    """

    settings: Settings
    listener: int | None
    copies: OwnCopies


def hand(part: Part) -> int:
    """A descriptor from which a child takes its part."""
    descriptor = os.memfd_create("slipway-part")
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(part, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take(descriptor: int) -> Part:
    """The part that our own supervisor has handed to this process."""
    with open(descriptor, "rb") as file:
        found = pickle.load(file)
    assert isinstance(found, Part)
    os.set_inheritable(found.report, False)
    return found


def tell(part: Part, end: Exit) -> None:
    """Report how this process ends."""
    with contextlib.suppress(OSError):
        os.write(part.report, json.dumps(end).encode()[:LONGEST])


def told(descriptor: int, code: int) -> Exit:
    """How a child has ended: as it has reported, or by its exit code alone."""
    report = b""
    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)
        report = os.read(descriptor, LONGEST)
    try:
        found = Exit(*json.loads(report))
    except (ValueError, TypeError):
        return Exit(code or DIED, "serving", f"its process ended with exit code {code}")
    return found if found.code == code else found._replace(code=code)
