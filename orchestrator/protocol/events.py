"""Types what a supervisor writes into events.jsonl, a line each, and a head reads in the stream.

A reader may be of another version than the supervisor: it passes over keys and kinds that it does
not know. What a rank reports to its supervisor becomes an event, completed with what else is known.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from orchestrator.protocol.message import Message, Moment, Nonsense, decode, encode
from orchestrator.protocol.version import Version

UNSAVED = "no checkpoint"  # a cause of RankSlow that holds no rank up

EVENTS: dict[str, type[Event]] = {}


class Event(Message):
    """Something that happened, at a time of the node's clock; itself, it is of an unknown kind."""

    event: ClassVar[str] = ""

    time: Moment

    def __init_subclass__(cls, event: str = "") -> None:
        super().__init_subclass__()
        if event:
            cls.event = event
            EVENTS[event] = cls


class Started(Event, event="started"):
    """torchrun is on its way."""

    agent: int  # its PID
    supervisor: int
    version: Version = Version()


class TorchReady(Event, event="torch_ready"):
    """torchrun has imported torch; the rendezvous of the nodes is next. For a fast start alone."""


class FirstOutput(Event, event="first_output"):
    """A rank of this node has printed something, for the first time."""


class LeaseFormed(Event, event="lease"):
    """This node's supervisor knows whether it reaches node 0's."""

    active: bool
    why: str = ""  # it does not


class EndOrder(Message):
    """The end that somebody asked for, or that something caused."""

    why: str
    grace: float  # seconds for the ranks to save
    failed: bool = False  # a rank, or torchrun
    certain: bool = False  # the cause is known: nobody else has to be heard first
    headless: bool = False  # there was no head for too long
    lost: Optional[int] = None  # this node was, to the others,
    silent: float = 0.0  # for so many seconds
    gone: bool = False  # it was closed over there: its supervisor has ended


class Ending(EndOrder, Event, event="ending"):
    """The supervisor ends its part."""


class Ended(Event, event="ended"):
    """The last event: nothing of the job is alive here, but what is in `left`."""

    agent: Optional[int]  # torchrun's exit code; None: it was not started, or is unknown
    why: str  # who ended it; nothing where it ended by itself
    killed: dict[int, str]  # PID -> name
    left: tuple[int, ...]  # processes that do not die
    ranks: dict[int, RankState]
    lived: Optional[dict[int, str]] = None  # PID -> name: what lived when its end began
    lost: int = 0  # bytes of the log that a full disk refused
    shared_memory: tuple[str, ...] = ()  # in /dev/shm: the job's, and not removed
    swept: bool = False  # the supervisor was killed; somebody else cleaned up
    oom_kills: int = 0
    shm_full: bool = False
    said: str = ""  # torchrun's last words
    stood_still: float = 0.0  # the longest time for which this supervisor did not run, in seconds


class GpuReport(Event, event="gpu_report"):
    """The driver calls a GPU of this node broken."""

    line: str  # as the kernel has logged it


# -- ranks ------------------------------------------------------------------------------------


class RankError(Message):
    """The exception that ended a rank."""

    type: str
    message: str
    traceback: str
    time: Moment
    pid: int = 0
    file: str = ""  # the innermost line that is the user's own
    line: int = 0
    function: str = ""


class RankEvent(Event):
    """Something that a rank, or its keeper, reported."""

    rank: int
    local: int


class RankStarted(RankEvent, event="rank_started"):
    """The rank runs."""

    pid: int
    keeper: int  # the PID of the process that waits for it


class RankExit(RankEvent, event="rank_exit"):
    """The program called sys.exit with this."""

    code: str


class RankRaised(RankEvent, event="rank_raised"):
    """The exception, sent here because the disk had no room for it."""

    error: RankError


class RankSlow(RankEvent, event="rank_slow"):
    """Ranks cannot save a checkpoint, or the GPUs of a node do nothing."""

    cause: str  # no checkpoint, or GPUs that do nothing
    who: int  # the rank that is the cause; for GPUs, the first one of their node
    node: int
    step: int
    text: str


class RankFinished(RankEvent, event="rank_finished"):
    """The program came to its end."""

    asked: str = ""  # who wanted it to; nothing where it did so by itself


class RankEnded(RankEvent, event="rank_ended"):
    """The process is over. The supervisor adds the fields after `peak_kb` if the rank failed."""

    pid: int
    code: int  # below 0: the signal that killed it
    peak_kb: Optional[int] = None
    error: Optional[RankError] = None
    said: str = ""  # its last words
    asked: str = ""  # who ended it; nothing where it ended by itself
    oom_kills: int = 0
    shm_full: bool = False
    driver: tuple[str, ...] = ()  # what that of the GPUs reported, as the kernel logs it


class RankState(Message):
    """One rank, as its events tell."""

    state: str = "?"
    pid: Optional[int] = None
    words: Optional[str] = None  # that it gave to sys.exit
    code: Optional[int] = None
    peak_kb: Optional[int] = None

    def after(self, event: RankEvent) -> RankState:
        """Return what is known with one event more."""
        changes: dict[str, Any] = {"state": event.event[len("rank_") :]}
        if isinstance(event, (RankStarted, RankEnded)):
            changes["pid"] = event.pid
        if isinstance(event, RankExit):
            changes["words"] = event.code
        if isinstance(event, RankEnded):
            changes["code"] = event.code
            changes["peak_kb"] = self.peak_kb if event.peak_kb is None else event.peak_kb
        return self.replace(**changes)


# -- lines ------------------------------------------------------------------------------------


def to_data(event: Event) -> dict[str, Any]:
    return {"event": event.event, **encode(event)}


def from_data(data: dict[str, Any]) -> Event:
    """Return the event that a line of events.jsonl holds."""
    fields = dict(data)
    name = fields.pop("event", None)
    if not isinstance(name, str):
        raise Nonsense("an event without a name")
    return decode(EVENTS.get(name, Event), fields, newer=True)


def from_report(data: dict[str, Any]) -> RankEvent:
    """Return the event that a rank's report tells of."""
    fields = dict(data)
    kind = EVENTS.get(f"rank_{fields.pop('event', '')}", Event)
    if not issubclass(kind, RankEvent):
        raise Nonsense("not the report of a rank")
    return decode(kind, fields)
