"""A head's requests about a job: its files, its state, its end, its removal."""

from __future__ import annotations

from typing import Any, Optional

from orchestrator.protocol.events import RankStacks, RankState
from orchestrator.protocol.message import Count, Few, Message, Moment, NodeTime
from orchestrator.protocol.requests.request import (
    AttemptRequest,
    Nothing,
    Part,
    PartRequest,
    Request,
)

NONE: dict[int, str] = {}


class Follow(AttemptRequest[Nothing], do="follow"):
    """Stream a job's files from these offsets on; the answer comes before the stream."""

    log: int
    ranks: int
    events: int
    # False if the caller only watches.
    head: bool = False
    # Seconds for which lines that come fast may be held back.
    gather: Optional[float] = None


class PortState(Message):
    """The master's port after the end of the job."""

    number: int
    free: bool


class StopReceipt(Message):
    """The proof that a job is over on a node: which processes were ended, and what remains."""

    job: str
    part: int = 0
    left: tuple[int, ...] = ()
    # Name by PID of the processes that lived before.
    ended: dict[int, str] = NONE
    # Name by PID of those that did not end when asked.
    killed: dict[int, str] = NONE
    # GPU memory that dead processes still hold, by PID.
    gpu_memory: dict[int, str] = NONE
    gpu_unknown: str = ""
    took: float = 0.0
    port: Optional[PortState] = None
    # The owner, if it is another user's job.
    user: str = ""
    # Segments of the job in /dev/shm that could not be removed.
    shared_memory: tuple[str, ...] = ()
    # The experiment of a job that is only shown.
    experiment: str = ""
    # False if this login has neither files nor processes of it, so nothing is proved.
    known: bool = True
    # The identifier of this user's directory for jobs on this machine.
    runs: str = ""


class End(AttemptRequest[Nothing], do="end"):
    """Order the supervisor to end this node's part, without waiting for the end."""

    why: str
    grace: float
    # After a failure, only ranks that handle SIGTERM get the grace.
    failed: bool = False


class Stop(AttemptRequest[StopReceipt], do="stop"):
    """End this node's part, wait until no process is left, and prove it."""

    why: str
    grace: float
    # Seconds after which the remaining processes are killed.
    wait: float
    # True if no later attempt may start either.
    for_good: bool = True


class StopReceipts(Message):
    """One receipt per job."""

    receipts: tuple[StopReceipt, ...]


class StopAll(Request[StopReceipts], do="stop_all"):
    """End every job of this user here, or of all users."""

    why: str
    grace: float
    wait: float
    all_users: bool = False
    # True ends nothing: `left` in the receipts has the living processes.
    only_show: bool = False


class JobState(Message):
    """One job on this node, as `status` shows it."""

    job: str
    part: int
    # One of running, ended, lost, unknown there.
    state: str
    ranks: dict[int, RankState]
    started: Optional[NodeTime] = None
    ended: Optional[NodeTime] = None
    agent: Optional[int] = None
    why: Optional[str] = None
    log_bytes: Optional[int] = None
    log_time: Optional[NodeTime] = None
    processes: Optional[tuple[int, ...]] = None


class AskJobState(AttemptRequest[JobState], do="job_state"):
    """Return the state of one part of a job here."""


class SystemLines(Message):
    """Log lines of supervisors and servers, the newest if there are many.

    Empty if there are none: the job is of an earlier version, or pruned.
    """

    supervisor: str
    server: str


class AskSystem(PartRequest[SystemLines], do="system"):
    """Return the log lines of the supervisors of all attempts, and of servers in their time."""

    # Seconds ago: the node's clock may be another than the head's.
    since: float
    until: float


def has_ended(collective: dict[str, Any]) -> bool:
    """Return True if a flight recorder's collective has ended."""
    return bool(collective.get("retired")) or collective.get("state") == "completed"


class Stuck(Message):
    """The present positions of the node's ranks."""

    stuck: dict[int, RankStacks]
    # The node's clock, by which the flight recorders have their times.
    time: Moment


class AskStuck(AttemptRequest[Stuck], do="stuck"):
    """Return the present position of every rank."""


# -- a profile: two small files in the run directory, which rank 0 looks for once per step -----

REQUEST_FILE, ANSWER_FILE = "profile_request.json", "profile_answer.json"
# The limit of one profile: a trace has megabytes per step.
MOST_STEPS = 20

# Rank 0 has not read the request yet.
ASKED = "asked"
TRACING = "tracing"
WRITTEN = "written"
FAILED = "failed"


class ProfileRequest(Message):
    """A server's request to rank 0 to trace a number of steps."""

    id: str
    steps: Few


class ProfileAnswer(Message):
    """Rank 0's answer: the profile is asked, tracing, written or failed."""

    id: str
    state: str
    # The first and the last step in the trace.
    first: Count = 0
    last: Count = 0
    # The path below the outputs.
    directory: str = ""
    # The reason of a failure, or missing parts.
    text: str = ""


class ProfileState(Message):
    """The progress of the profile, and whether a rank can make one."""

    # Rank 0's answer to this request.
    reply: Optional[ProfileAnswer] = None
    # True if another profile was requested and is not done.
    busy: bool = False
    # Seconds since a rank trained a step; None if none ever did.
    stepped: Optional[float] = None
    # True if the job is over on this node.
    over: bool = False


class AskProfile(AttemptRequest[ProfileState], do="profile"):
    """Request a trace of the same steps of all ranks, and its progress, on the node of rank 0."""

    trace: ProfileRequest


class LivingRuns(Message):
    """The attempts that still have living processes here, each as (job, part, attempt)."""

    living: tuple[tuple[str, int, int], ...]
    # The parts whose spec is here, with which a later attempt begins.
    stored: tuple[Part, ...]


class Living(Request[LivingRuns], do="living"):
    """Return what lives of these parts, and with which of them a later attempt can begin."""

    parts: tuple[Part, ...]


class RemovedPart(Message):
    """A part's directory that was removed, or the reason why it was not."""

    job: str
    part: int
    problem: str


class RemovedParts(Message):
    """The result of a removal; `freed` in bytes."""

    parts: tuple[RemovedPart, ...]
    freed: int


class Remove(Request[RemovedParts], do="remove"):
    """Delete the directories of these parts, and libraries without a user."""

    parts: tuple[Part, ...]
