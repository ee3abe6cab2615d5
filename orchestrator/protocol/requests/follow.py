"""Names what a head asks about a job: its files, its state, its end, its removal."""

from __future__ import annotations

from typing import Any, Optional

from orchestrator.protocol.events import RankState
from orchestrator.protocol.message import Count, Few, Message, Moment
from orchestrator.protocol.requests.request import Nothing, Request

NONE: dict[int, str] = {}


class Following(Message):
    """The stream begins."""

    time: Moment


class Follow(Request[Following], do="follow"):
    """Stream a job's files from these offsets on."""

    job: str
    node: int
    log: int
    ranks: int
    events: int
    head: bool = False  # False: it only looks on
    gather: Optional[float] = None  # seconds for which lines that come fast may be held back


class PortState(Message):
    """The master's port after the end of the job."""

    number: int
    free: bool


class StopReceipt(Message):
    """The proof that a job is over on this node."""

    job: str
    node: int
    left: tuple[int, ...]
    ended: dict[int, str] = NONE  # PID -> name: what lived before
    killed: dict[int, str] = NONE  # of these, what did not go when asked
    gpu_memory: dict[int, str] = NONE  # PID -> what dead processes still hold
    gpu_unknown: str = ""
    took: float = 0.0
    port: Optional[PortState] = None
    user: str = ""  # another's job
    shared_memory: tuple[str, ...] = ()  # in /dev/shm: the job's, and not removed
    experiment: str = ""  # its directory, where that was only shown which must end
    known: bool = True  # else this login has neither files nor processes of it: no proof at all
    runs: str = ""  # names the directory for jobs: of this user, on this machine


class End(Request[Nothing], do="end"):
    """Ask the supervisor to end this node's part; do not wait for it."""

    job: str
    node: int
    why: str
    grace: float
    failed: bool = False  # something has failed: only ranks that handle SIGTERM have the grace


class Stop(Request[StopReceipt], do="stop"):
    """End this node's part, wait until nothing of it is left, and prove it."""

    job: str
    node: int
    why: str
    grace: float
    wait: float  # seconds after which what is left is killed
    for_good: bool = True  # no later attempt may start either


class StopReceipts(Message):
    """One receipt per job."""

    receipts: tuple[StopReceipt, ...]


class StopAll(Request[StopReceipts], do="stop_all"):
    """End every job of this user here, or of all users."""

    why: str
    grace: float
    wait: float
    all_users: bool = False
    only_show: bool = False  # what lives, which is `left` in the receipts; nothing is ended


class JobState(Message):
    """One job on this node, as `status` shows it."""

    job: str
    node: int
    state: str  # running, ended, lost
    ranks: dict[int, RankState]
    started: Optional[float] = None
    ended: Optional[float] = None
    agent: Optional[int] = None  # torchrun's exit code
    why: Optional[str] = None
    nproc: Optional[int] = None
    first_rank: Optional[int] = None
    nnodes: Optional[int] = None
    experiment: Optional[str] = None
    log_bytes: Optional[int] = None
    log_time: Optional[float] = None
    processes: Optional[tuple[int, ...]] = None


class JobStates(Message):
    """The parts of a job that left a directory here: one, or none."""

    jobs: tuple[JobState, ...]
    time: Moment  # by the clock of this node, as all times in it


class Jobs(Request[JobStates], do="jobs"):
    """Return the state of one part of a job here."""

    part: tuple[str, int]  # (job, node)


class SystemLines(Message):
    """Lines that supervisors and servers wrote about what they did, the newest if there are many.

    Empty, where there are none: of an earlier version, or pruned.
    """

    supervisor: str
    server: str


class AskSystem(Request[SystemLines], do="system"):
    """Ask for the lines of the supervisors of these parts of a job, and of servers in its time."""

    parts: tuple[tuple[str, int], ...]  # (job, node), one for each attempt
    since: Moment
    until: Moment


class RankStacks(Message):
    """The place where one rank is."""

    state: str  # of its process, as in /proc
    stacks: str
    collectives: str  # the last ones in torch's flight recorders, in JSON
    program: str = ""  # what runs, and where in the kernel it waits, where no stacks are known


def has_ended(collective: dict[str, Any]) -> bool:
    """Tell whether a collective has ended, as a flight recorder has it."""
    return bool(collective.get("retired")) or collective.get("state") == "completed"


class Stuck(Message):
    """The places where the ranks of the node are."""

    stuck: dict[int, RankStacks]
    time: Moment


class AskStuck(Request[Stuck], do="stuck"):
    """Ask every rank where it is."""

    job: str
    node: int


# -- a profile: two small files in the run directory, which rank 0 looks for once per step -----

WISH, NEWS = "profile_wish.json", "profile_news.json"
MOST_STEPS = 20  # of one profile: a trace has megabytes per step

PATIENCE_SECONDS = 30.0  # after which a wish is stale that nobody has repeated

ASKED = "asked"  # rank 0 has not seen it yet
TRACING = "tracing"
WRITTEN = "written"
FAILED = "failed"


class ProfileWish(Message):
    """The request that a node's server leaves for rank 0: trace so many steps."""

    id: str
    steps: Few


class ProfileNews(Message):
    """The answer of rank 0: asked, tracing, written or failed."""

    id: str
    state: str
    first: Count = 0  # the steps that are in the trace
    last: Count = 0
    directory: str = ""  # below the outputs
    text: str = ""  # why it failed, or what is lacking


class ProfileState(Message):
    """Tell how far the profile is, and whether any rank there can make one."""

    news: Optional[ProfileNews] = None  # of this profile
    busy: bool = False  # another one was asked for, and is not done
    stepped: Optional[float] = None  # seconds since a rank trained a step; None: none ever did
    over: bool = False  # the job, on this node


class AskProfile(Request[ProfileState], do="profile"):
    """Have all ranks trace the same steps, and ask how far that is; asked on the node of rank 0."""

    job: str
    node: int
    wish: ProfileWish


class LivingRuns(Message):
    """Those of the runs of which anything lives here."""

    living: tuple[tuple[str, int], ...]
    has_part: bool = True  # what a later attempt begins with is here


class Living(Request[LivingRuns], do="living"):
    """Ask which of these runs (job, node) still live here, and whether a later one can begin."""

    runs: tuple[tuple[str, int], ...]
    part: Optional[tuple[str, int]] = None  # that a later attempt begins with


class RemovedRun(Message):
    """A run directory that was removed, or the reason why it was not."""

    job: str
    node: int
    problem: str


class RemovedRuns(Message):
    """The result of a removal; `freed` in bytes."""

    runs: tuple[RemovedRun, ...]
    freed: int
    libraries: int


class Remove(Request[RemovedRuns], do="remove"):
    """Delete the directories of these runs, and libraries that nobody needs."""

    runs: tuple[tuple[str, int], ...]
