# SPDX-License-Identifier: Apache-2.0
"""The part that the supervisor gives to a child, and the child's report at its end.

A part is a pickle in memory that only these two processes have open. It is never on a disk, and no
other process can write it. It contains the plan, so all copies, also restarted ones, follow the
same decisions.
"""

import contextlib
import json
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass

from lmi_config.options.declared import Settings
from lmi_config.options.option_files import Given
from serving.exit import DIED, Exit
from serving.router.fleet.own_copies import OwnCopies
from serving.router.models.model_messages import Door
from serving.server.prepare import Deployment

LONGEST = 64 * 1024
"""Maximum bytes of a report."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The fields of every child. parent: the supervisor's process. report: the descriptor for its
    report. argued: the command line's options. Their secrets must not reach a log.
    """

    parent: int
    report: int
    argued: Mapping[str, Given]


@dataclass(frozen=True, kw_only=True)
class CopyPart(Part):
    """A copy of the model, or one of several models. cpus: the CPUs that it may run on. model: its
    name among several models, or "". orders: the descriptor of a socket for orders; None for a
    server that gets none.
    """

    number: int
    model: str = ""
    orders: int | None = None
    deployment: Deployment
    cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RouterPart(Part):
    """The router. listener: the descriptor of its public socket; None if the router has several
    processes, because each of them listens itself. copies, models: the servers behind it.
    """

    settings: Settings
    listener: int | None
    copies: OwnCopies | None = None
    models: Door | None = None


def hand(part: Part) -> int:
    """Write the part into memory. Returns the descriptor for the child."""
    descriptor = os.memfd_create("slipway-part")
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(part, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def take(descriptor: int) -> Part:
    """Read the part that this process's supervisor has written."""
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
