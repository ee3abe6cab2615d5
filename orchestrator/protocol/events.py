"""The events that a supervisor writes into events.jsonl, one a line, and a head reads.

A reader may be of another version than the supervisor: it ignores unknown keys and kinds.
A rank's report becomes an event, completed with other facts by the supervisor.
"""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from orchestrator.protocol.message import Message, NodeTime, Nonsense, decode_value, encode_value
from orchestrator.protocol.version import Version

# A cause of RankSlow that does not delay a rank.
UNSAVED = "no checkpoint"

EVENTS: dict[str, type[Event]] = {}


class Event(Message):
    """Something that happened; the base class is an unknown kind."""

    event: ClassVar[str] = ""

    time: NodeTime

    def __init_subclass__(cls, event: str = "") -> None:
        super().__init_subclass__()
        if event:
            cls.event = event
            EVENTS[event] = cls


class Started(Event, event="started"):
    """torchrun was started."""

    agent: int  # its PID
    supervisor: int
    version: Version = Version()


class TorchReady(Event, event="torch_ready"):
    """torchrun has imported torch; the rendezvous of the nodes is next. Only for a fast start."""


class FirstOutput(Event, event="first_output"):
    """A rank of this node has printed its first output."""


class LeaseFormed(Event, event="lease"):
    """This node's supervisor has connected to node 0's, or failed to."""

    active: bool
    # The reason if the lease is not active.
    why: str = ""


class RankStacks(Message):
    """The present position of one rank."""

    # The state of its process, as in /proc.
    state: str
    stacks: str
    # The last collectives of torch's flight recorders, in JSON.
    collectives: str
    # The running program and its kernel function, if there are no stacks.
    program: str = ""


class EndOrder(Message):
    """An order to end the job, by a request or a failure."""

    why: str
    # Seconds for the ranks to save.
    grace: float
    # True if a rank, or torchrun, has failed.
    failed: bool = False
    # True if the cause is known, so no other node must be waited for.
    certain: bool = False
    # True if a rank waited in vain for others: their positions are wanted.
    late: bool = False
    # True if there was no head for too long.
    headless: bool = False
    # The node that was lost to the others.
    lost: Optional[int] = None
    # Seconds for which that node was silent.
    silent: float = 0.0
    # True if that node closed its connection: its supervisor has ended.
    gone: bool = False


class Ending(EndOrder, Event, event="ending"):
    """The supervisor ends its part."""

    # The positions of the ranks that had not failed, if they are wanted.
    stuck: Optional[dict[int, RankStacks]] = None


class Ended(Event, event="ended"):
    """The last event: no process of the job is alive here, except those in `left`."""

    # torchrun's exit code; None if it was not started, or is unknown.
    agent: Optional[int]
    # The reason of the end; empty if it ended by itself.
    why: str
    # Name by PID.
    killed: dict[int, str]
    # Processes that survive SIGKILL.
    left: tuple[int, ...]
    ranks: dict[int, RankState]
    # Name by PID of the processes that lived when the end began.
    lived: Optional[dict[int, str]] = None
    # Bytes of the log that were lost because the disk was full.
    lost: int = 0
    # Segments of the job in /dev/shm that could not be removed.
    shared_memory: tuple[str, ...] = ()
    # True if the supervisor was killed and another process cleaned up.
    swept: bool = False
    oom_kills: int = 0
    shm_full: bool = False
    # The last output of torchrun.
    said: str = ""
    # The longest time for which this supervisor did not run, in seconds.
    stood_still: float = 0.0


class GpuReport(Event, event="gpu_report"):
    """The driver reports a GPU of this node as broken."""

    # The line of the kernel's log.
    line: str


# -- ranks ------------------------------------------------------------------------------------


class RankError(Message):
    """The exception that ended a rank."""

    type: str
    message: str
    traceback: str
    time: NodeTime
    pid: int = 0
    # The innermost line that is the user's own.
    file: str = ""
    line: int = 0
    function: str = ""


class RankEvent(Event):
    """An event reported by a rank, or by its keeper."""

    rank: int
    local: int


class RankStarted(RankEvent, event="rank_started"):
    """The rank's process was started."""

    pid: int
    # The PID of the process that waits for it.
    keeper: int


class RankExit(RankEvent, event="rank_exit"):
    """The program called sys.exit with this argument."""

    code: str


class RankRaised(RankEvent, event="rank_raised"):
    """The exception of a rank, sent as an event because the disk was full."""

    error: RankError


class RankSlow(RankEvent, event="rank_slow"):
    """Ranks cannot save a checkpoint, or the GPUs of a node do nothing."""

    # Either no checkpoint, or GPUs that do nothing.
    cause: str
    # The rank that is the cause; for GPUs, the first one of their node.
    who: int
    node: int
    step: int
    text: str


class RankFinished(RankEvent, event="rank_finished"):
    """The program has ended without an error."""

    # The reason if the end was requested; empty if it ended by itself.
    asked: str = ""


class RankEnded(RankEvent, event="rank_ended"):
    """The process has ended. The supervisor adds the fields after `peak_kb` if the rank failed."""

    pid: int
    # Below 0, the signal that killed it.
    code: int
    peak_kb: Optional[int] = None
    error: Optional[RankError] = None
    # The last output of the rank.
    said: str = ""
    # The reason if the end was requested; empty if it ended by itself.
    asked: str = ""
    oom_kills: int = 0
    shm_full: bool = False
    # Why the supervisor killed it before memory ran out.
    memory: str = ""
    # Messages of the GPU driver in the kernel's log.
    driver: tuple[str, ...] = ()


class RankState(Message):
    """The state of one rank, from its events."""

    state: str = "?"
    pid: Optional[int] = None
    # The argument of sys.exit.
    words: Optional[str] = None
    code: Optional[int] = None
    peak_kb: Optional[int] = None

    def after(self, event: RankEvent) -> RankState:
        """Return the state after one more event."""
        state = event.event[len("rank_") :]
        if isinstance(event, RankExit):
            return self.replace(state=state, words=event.code)
        if isinstance(event, RankEnded):
            return self.replace(
                state=state,
                pid=event.pid,
                code=event.code,
                peak_kb=self.peak_kb if event.peak_kb is None else event.peak_kb,
            )
        return self.replace(
            state=state, pid=event.pid if isinstance(event, RankStarted) else self.pid
        )


# -- lines ------------------------------------------------------------------------------------


def event_to_data(event: Event) -> dict[str, Any]:
    return {"event": event.event, **encode_value(event)}


def event_from_data(data: dict[str, Any], ahead: float = 0.0) -> Event:
    """Return the event on a line of events.jsonl of a node whose clock is `ahead` of this one."""
    fields = dict(data)
    name = fields.pop("event", None)
    if not isinstance(name, str):
        raise Nonsense("an event without a name")
    return decode_value(EVENTS.get(name, Event), fields, newer=True, ahead=ahead)


def event_from_report(data: dict[str, Any]) -> RankEvent:
    """Return the event for a rank's report."""
    fields = dict(data)
    kind = EVENTS.get(f"rank_{fields.pop('event', '')}", Event)
    if not issubclass(kind, RankEvent):
        raise Nonsense("not the report of a rank")
    return decode_value(kind, fields)
