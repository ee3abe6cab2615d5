"""Requests of a head to a node's server, their answers, and unsolicited messages.

A request travels as {"id", "do", its fields}, its answer as {"id", "ok": the answer} or as
{"id", "error", "kind"}. Both ends are of one version (the head ships the server), so a key that
the other end does not know is an error. Each room of the node has its requests in a module of this
package. `do` is "room.name", so that a node loads the module only for a request to that room.
"""

from __future__ import annotations

import importlib
import typing
from typing import Any, ClassVar, Generic, Optional, TypeVar

from orchestrator.protocol.message import (
    Message,
    Moment,
    Nonsense,
    decode_value,
    shorten_value,
    to_dict,
    to_json,
)
from orchestrator.protocol.version import Version

A = TypeVar("A", bound=Message)

# Frequent requests, which are logged only if their answer is slow.
ROUTINE = frozenset(
    {
        *("request.beat", "start.read_lock_table", "follow.stuck", "environments.ask_build"),
        *("transfer.contents", "transfer.outputs", "transfer.read_file"),
    }
)
SLOW_SECONDS = 5.0

ROOMS = ("machine", "transfer", "environments", "start", "follow", "warm")


class Request(Message, Generic[A]):
    """A request with an answer of type A. `do` is its name in the frame, after the room's name."""

    do: ClassVar[str]
    room: ClassVar[str]
    answer: ClassVar[type[Message]]

    def __init_subclass__(cls, do: str = "") -> None:
        super().__init_subclass__()
        if not do:
            return
        cls.room = cls.__module__.rpartition(".")[2]
        cls.do = f"{cls.room}.{do}"
        (cls.answer,) = typing.get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        REQUESTS[cls.do] = cls


REQUESTS: dict[str, type[Request[Any]]] = {}


# A job, and the number of a node's part of it.
Part = tuple[str, int]


class PartRequest(Request[A]):
    """A request about one node's part of a job."""

    job: str
    part: int


class AttemptRequest(PartRequest[A]):
    """A request about one attempt of a node's part of a job."""

    attempt: int


class Nothing(Message):
    """An answer without contents."""


class Clock(Message):
    """The node's clock."""

    time: Moment


class Ping(Request[Clock], do="beat"):
    """Return the node's time; shows as well that the head is alive."""


# -- unsolicited messages ---------------------------------------------------------------------


class Greeting(Message):
    """The server's first frame."""

    version: Version
    # The node's clock.
    time: Moment


class Heartbeat(Message):
    """The server is alive. Sent if no other data waits to be sent."""

    # The node's clock.
    beat: Moment
    # Seconds since the job printed.
    silent: Optional[float] = None
    # Seconds since the job made any progress.
    idle: Optional[float] = None


class SupervisorGone(Message):
    """The stream is complete: the files will not grow any more."""

    supervisor_gone: bool = True


# -- what a frame holds -----------------------------------------------------------------------

UNKNOWN_JOB = "unknown job"
OTHER_VERSION = "other version"
# The job was stopped before it had started.
STOPPED = "stopped"
# The part of the job with which a later attempt begins is lost.
NO_PART = "no part"


class Refused(Message):
    """The answer to a request that cannot be done."""

    id: int
    error: str
    kind: str = ""


class Answered(Message):
    """The answer to the request with this number; its sender knows how to decode `ok`."""

    id: int
    ok: dict[str, Any]


Incoming = typing.Union[Greeting, Heartbeat, SupervisorGone, Refused, Answered]


def frame_of_request(number: int, request: Request[Any]) -> str:
    return to_json({"id": number, "do": request.do, **to_dict(request)})


def number_of(data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of a request's frame, and its other keys."""
    fields = dict(data)
    number = fields.pop("id", None)
    if type(number) is not int:
        raise Nonsense(f"a request without a number: {shorten_value(data)}")
    return number, fields


def read_request(fields: dict[str, Any]) -> Request[Any]:
    """Return the request in a frame, from its keys without the number."""
    do = str(fields.get("do"))
    room = do.partition(".")[0]
    if room in ROOMS:
        importlib.import_module(f"orchestrator.protocol.requests.{room}")
    kind = REQUESTS.get(do)
    if kind is None:
        raise Nonsense(f"not a request: {shorten_value(fields.get('do'))}")
    return decode_value(kind, {name: value for name, value in fields.items() if name != "do"})


def read_incoming(data: dict[str, Any]) -> Incoming:
    """Return the message in a JSON frame from the node."""
    kinds = {"ok": Answered, "error": Refused, "beat": Heartbeat, "version": Greeting}
    kind = next((kinds[key] for key in kinds if key in data), SupervisorGone)
    return decode_value(kind, data)
