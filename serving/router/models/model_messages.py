# SPDX-License-Identifier: Apache-2.0
"""Messages between the router and the supervisor of several models: a JSON object a line, on a
socket in a folder that only this container's processes may read.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

LONGEST = 1 << 20
"""Maximum bytes of a line."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """folder: the supervisor's, with the socket and the file of its series. dynamic: whether calls
    load and unload models. closed: whether requests need a key or another router's signature, as
    for one server with OPTION_ROUTER_SECRET.
    """

    folder: Path
    dynamic: bool
    closed: bool

    @property
    def socket(self) -> Path:
        return self.folder / "models"

    @property
    def series(self) -> Path:
        """The file with the supervisor's series, in Prometheus' text format."""
        return self.folder / "series"


class Row(msgspec.Struct, frozen=True):
    """A model. url: where it comes from. endpoint: the address and port that its server has, or
    would have. running: whether there is a server. open: whether requests may be sent there.
    trouble: why requests are refused at once, or "".
    """

    name: str
    url: str
    state: str
    endpoint: str
    running: bool
    open: bool
    trouble: str

    @property
    def address(self) -> str:
        """The server's address, or ""."""
        return f"http://{self.endpoint}" if self.running else ""


class Answer(msgspec.Struct, frozen=True):
    """The answer to a call. status: of HTTP; text: the reason, if the call failed."""

    number: int
    status: int
    text: str


class Told(msgspec.Struct, frozen=True):
    """A line of the supervisor's. models: all models, in this revision of their states."""

    revision: int
    models: tuple[Row, ...]
    answers: tuple[Answer, ...] = ()


class Work(msgspec.Struct, frozen=True, array_like=True):
    """The requests of a model: that wait, that its server works on, and that have come so far."""

    waiting: int
    in_flight: int
    begun: int


class Call(msgspec.Struct, frozen=True):
    """A call that loads the model of this URL; None unloads it. waits: whether the answer comes
    when the model can answer, not when it begins to start.
    """

    number: int
    name: str
    url: str | None
    waits: bool = True


class Report(msgspec.Struct, frozen=True):
    """A line of the router's. seen: the revision that it follows. work: by the model's name."""

    seen: int
    work: dict[str, Work]
    calls: tuple[Call, ...] = ()


read_told = msgspec.json.Decoder(Told).decode
read_report = msgspec.json.Decoder(Report).decode


def line(message: Told | Report) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"
