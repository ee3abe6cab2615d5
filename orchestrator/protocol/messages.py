"""Every request that a head sends to a node's server with its answer, and what comes unasked.

A request travels as {"id", "do", its fields}, its answer as {"id", "ok": the answer} or as
{"id", "error", "kind"}. Both ends are of one version (the head ships the server), so a key that
the other end does not know is an error.
"""

from __future__ import annotations

import typing
from typing import Any, ClassVar, Generic, Optional, TypeVar

from orchestrator.protocol.facts import (
    Address,
    Card,
    Checkup,
    Disk,
    Interface,
    Leftover,
    Limits,
    RdmaPort,
    Software,
)
from orchestrator.protocol.message import (
    Count,
    Few,
    IpAddress,
    Message,
    Moment,
    NoAddress,
    Nonsense,
    Port,
    decode,
    encode,
    shown,
)
from orchestrator.protocol.profiling import ProfileNews, ProfileWish
from orchestrator.protocol.spec import Attempt, Spec
from orchestrator.protocol.version import Version

A = TypeVar("A", bound=Message)


class Request(Message, Generic[A]):
    """Asks for an A. `do` is its name in the frame."""

    do: ClassVar[str]
    answer: ClassVar[type[Message]]

    def __init_subclass__(cls, do: str) -> None:
        super().__init_subclass__()
        cls.do = do
        (cls.answer,) = typing.get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        REQUESTS[do] = cls


REQUESTS: dict[str, type[Request[Any]]] = {}


class Nothing(Message):
    """Done."""


# -- the first word ---------------------------------------------------------------------------


class Greeting(Message):
    """The server's first frame."""

    version: Version


# -- before a launch --------------------------------------------------------------------------


class ProbeTarget(Message):
    """A program; the answer's kind is "missing", "unreadable" and so on where it cannot run."""

    kind: str
    name: str


class PortWish(Message):
    """A port that the server shall hold for the job's ranks to meet at."""

    wanted: int
    exact: bool  # or any free one from there on
    peers: bool = False  # listen for the other nodes' supervisors, too


class Probed(Message):
    """One machine, as far as the kernel and the file system tell."""

    hostname: str
    boot: str  # equal on two names of one machine
    network: int  # its network namespace
    user: str
    python: str
    python_version: str
    torch: str
    software: Software
    cpus: Count
    gpus: Few  # each may become a rank
    addresses: tuple[Address, ...]
    routes: dict[str, tuple[str, NoAddress]]  # peer -> (interface, own address) towards it
    workdir: str
    workdir_exists: bool
    target: ProbeTarget
    limits: Limits
    kernel: str
    memory_kb: Count
    memory_available_kb: Count
    omp_num_threads: Optional[str]
    environment: dict[str, str]  # NCCL_* and the like, as they are
    problems: dict[str, str]  # part -> why it is not known
    disk: Optional[Disk]  # of the workdir; None where it does not answer
    shm: Optional[Disk]
    leftovers: tuple[Leftover, ...]
    cards: tuple[Card, ...]
    interfaces: tuple[Interface, ...]
    rdma: tuple[RdmaPort, ...]
    time: Moment
    library: str = ""  # where our program is on the node
    firewall: str = ""  # ufw or firewalld, where it runs
    accelerate: str = ""  # its version, where it was asked for and is there
    accelerate_keys: tuple[str, ...] = ()  # that this version knows in its files
    port: Optional[Port] = None  # the master's: reserved for this job, 0 if none was free
    peers_port: Optional[Port] = None  # the master's: where the other supervisors will call
    marker_seen: bool = False  # the head's directory is on a disk that both share
    torch_elsewhere: tuple[str, ...] = ()  # Pythons that have torch, where this one has none


class Probe(Request[Probed], do="probe"):
    """Say what this machine is. Quick: every launch asks."""

    cwd: str
    workdir: Optional[str]
    peers: tuple[str, ...]  # addresses: by which interface does it reach them?
    target: ProbeTarget
    accelerate: bool = False
    port: Optional[PortWish] = None
    marker: str = ""  # a file that the head has just written: is its directory here, too?


class CheckedUp(Message):
    """The results of an Examine."""

    checkup: Checkup
    time: Moment


class Examine(Request[CheckedUp], do="examine"):
    """Look closer, with commands, for the doctor: it takes seconds."""

    workdir: str
    script: str = ""
    # gpus, xids, code, torch, names: all of these where none is named; and load
    parts: tuple[str, ...] = ()


class Listening(Message):
    """The ports that are open now; 0 for one that is taken."""

    ports: tuple[int, ...]


class Listen(Request[Listening], do="listen"):
    """Answer every caller at these ports with a word."""

    ports: tuple[int, ...]  # 0: any
    word: str
    seconds: Optional[float] = None  # or as long as the program lives


LARGE_LOST = "small packets arrive, large ones do not"  # why a Dial fails where it is the MTU


class Dialed(Message):
    """For each address why it could not be reached, or nothing."""

    answers: tuple[str, ...]


class Dial(Request[Dialed], do="dial"):
    """Call other nodes: does each answer with its own word?"""

    places: tuple[tuple[str, int, str], ...]  # address, port, word
    seconds: float


class Hooked(Message):
    """The changes that the hook made to the environment."""

    env: dict[str, str]
    unset: tuple[str, ...]


class Hook(Request[Hooked], do="hook"):
    """Run the user's shell file for this node."""

    text: str
    env: dict[str, str]
    workdir: str


# -- the code ---------------------------------------------------------------------------------


class CheckedOut(Message):
    """A snapshot that is ready: what is there, as the node reads it."""

    workdir: str
    tree: str  # the digest of what is there
    differ: tuple[str, ...]  # paths that are not as they were sent
    own: tuple[str, ...]  # the node's own names that are linked into the snapshot
    target: ProbeTarget
    disk: Optional[Disk] = None


class CheckOut(Request[CheckedOut], do="check_out"):
    """Make a snapshot of a tree for a job; refused as LACKING where contents have to come first."""

    tree: str  # its digest
    snapshot: str  # its name, new on this machine; a number comes behind it
    title: str  # the last part of the directory's path
    beside: str  # the head's directory: what the node has there of its own is linked
    target: ProbeTarget
    outputs: tuple[str, ...] = ()  # directories there that the program writes: made and linked


class Lacking(Message):
    """The files whose contents the node does not have: first and last position in the list."""

    ranges: tuple[tuple[Count, Count], ...]


class OfferTree(Request[Lacking], do="offer_tree"):
    """Take the list of a tree, compressed in the pieces before this, and say what is lacking."""

    tree: str


class Contents(Request[Nothing], do="contents"):
    """Take contents that are lacking, one after the other, compressed in the pieces before."""

    tree: str
    size: Count  # unpacked


class Compared(Message):
    """Files that the node sees otherwise than the head: path -> SHA-256, or why there is none."""

    differ: dict[str, str]


class Compare(Request[Compared], do="compare"):
    """Look whether a shared directory is here as the head sees it: pieces hold sizes and times."""

    directory: str


# -- a job ------------------------------------------------------------------------------------


class Parcel(Request[Nothing], do="parcel"):
    """Append the pieces that came before to a file for the job's ranks."""

    job: str
    node: int
    name: str


class WarmStart(Message):
    """Tell whether a start took a warm process, or why not where one was expected."""

    warm: bool
    why: str = ""


class StartedHere(Message):
    """The supervisor runs."""

    supervisor: int  # its PID
    shared: bool  # the experiment's directory is the head's own
    run: str  # the run directory
    warm: WarmStart = WarmStart(warm=False)


class Start(Request[StartedHere], do="start"):
    """Start this node's part of a job."""

    spec: Spec


class StandBy(Request[Nothing], do="stand_by"):
    """Keep what a spare needs to take over a part of this job; start nothing."""

    spec: Spec


class TakenPorts(Message):
    """The port where the ranks will meet, 0 if none is free, and that of the supervisors."""

    port: int
    peers_port: int


class TakePorts(Request[TakenPorts], do="take_ports"):
    """Take the ports of a job's next attempt, on its first node."""

    port: PortWish


class StartAgain(Request[StartedHere], do="start_again"):
    """Start the next attempt of this node's part of a job, from what it has of the first one."""

    job: str
    node: int
    attempt: Attempt
    port: int
    peers_port: int  # 0: there are no others, or it cannot
    token: str
    # Where this node stands among those of the attempt, which need not be those of the one before.
    nnodes: int
    first_rank: int
    master: IpAddress


class Kept(Message):
    """The state that a later attempt of a job could go on from."""

    at: Moment  # when something was kept last, by the node's clock; 0: nothing is


class AskKept(Request[Kept], do="kept"):
    """Ask what this node's part of a job has kept for a later attempt."""

    job: str
    node: int


class SavedFile(Message):
    """A file that a program has saved on a node, a link, or a directory that has some."""

    path: str  # below the place
    place: str = ""  # see node/saved/places.py
    kind: str = "file"  # or "link", "directory"
    size: Count = 0
    changed: Count = 0  # nanoseconds; of a copy those of its origin
    mode: Few = 0o600
    target: str = ""  # of a link, inside the place
    by: str = ""  # the name of the node that it is a copy of, untouched since it came
    sound: bool = True  # it does not lack its end
    attempt: Few = 0  # that this node wrote it in


class Saved(Message):
    """Files in which a program has saved something, and what belongs to them."""

    files: tuple[SavedFile, ...]
    roots: dict[str, str]  # place -> the directory that it is here
    whole: bool = True  # these are all
    shared: bool = False  # it runs on the disk of the head's experiment
    kept: bool = False  # a state is in memory, or in a checkpoint of ours


class AskSaved(Request[Saved], do="saved"):
    """Ask what the program has saved on this node in files of its own, since the job began."""

    job: str
    node: int
    given: tuple[str, ...] = ()  # directories of the node's own that the program writes


class GetReady(Request[Nothing], do="get_ready"):
    """Start processes that wait for a later attempt, by what is here of the job's first one."""

    job: str
    node: int


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
    head: Optional[Moment] = None  # when this head came, by its clock; None for one that looks on
    patience: Optional[float] = None  # a head that is silent for so long is lost


class Left(Message):
    """The supervisor knows that the head left."""

    left: bool = True


class Leave(Request[Left], do="leave"):
    """The head leaves on purpose: its absence is not to be taken for a loss."""

    at: Moment


class PortState(Message):
    """The master's port after the end of the job."""

    number: int
    free: bool


class StopReceipt(Message):
    """The proof that a job is over on this node."""

    job: str
    node: int
    ended: dict[int, str]  # PID -> name: what lived before
    killed: dict[int, str]  # of these, what did not go when asked
    left: tuple[int, ...]
    gpu_memory: dict[int, str]  # PID -> what dead processes still hold
    gpu_unknown: str
    took: float
    port: Optional[PortState] = None
    user: str = ""  # another's job
    known: bool = True  # else this login has neither files nor processes of it: no proof at all


class End(Request[Nothing], do="end"):
    """Ask the supervisor to end this node's part; do not wait for it."""

    job: str
    node: int
    why: str
    grace: float


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


class RankState(Message):
    """One rank, as its last event tells."""

    state: str = "?"
    pid: Optional[int] = None
    code: Optional[int] = None


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
    """Every job that left a directory here."""

    jobs: tuple[JobState, ...]
    time: Moment  # by the clock of this node, as all times in it


class Jobs(Request[JobStates], do="jobs"):
    """Say how one job stands here, or all."""

    job: Optional[str] = None


class RankStacks(Message):
    """The place where one rank is."""

    state: str  # of its process, as in /proc
    stacks: str
    collectives: str  # torch's flight recorder, in JSON


class Stuck(Message):
    """The places where the ranks of the node are."""

    stuck: dict[int, RankStacks]
    time: Moment


class AskStuck(Request[Stuck], do="stuck"):
    """Ask every rank where it is."""

    job: str
    node: int


class Pace(Message):
    """The last steps of one rank, as its collectives show them."""

    length: Count  # collectives in a step
    times: dict[int, Moment]  # number of a collective -> when the rank entered it, by its node
    awake: Optional[float] = None  # seconds in which its main thread ran, or wanted to,
    at: float = 0.0  # by a clock that starts somewhere


class Paces(Message):
    """The ranks of the node that make steps, as they were when they were last asked."""

    paces: dict[int, Pace]


class AskPaces(Request[Paces], do="paces"):
    """Have every rank write down which collectives it entered; or, a moment later, read that."""

    job: str
    node: int
    read: bool


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


class Call(Request[Nothing], do="call"):
    """Pass CALL frames on to the ranks, and their answers back, from now on."""

    job: str
    node: int


class OutputFile(Message):
    """A file, a directory or a link on a node."""

    path: str  # below the place that was listed
    size: Count = 0
    kind: str = "file"  # or "directory", "link"
    mode: Few = 0o600
    changed: Moment = 0.0
    target: str = ""  # of a link
    place: str = ""  # where that is not the one that was listed


class OutputFiles(Message):
    """The files of a node that may be fetched."""

    files: tuple[OutputFile, ...]
    place: str
    checkpoints: bool = False  # there are some; they stay unless they are asked for
    left_out: tuple[str, ...] = ()  # what is neither of these, or cannot be read


class Outputs(Request[OutputFiles], do="outputs"):
    """List what the ranks wrote, where the node does not share the head's disk."""

    job: str
    node: int
    checkpoints: bool = False
    # Look so many seconds for what they wrote beside the code that was sent.
    beside: float = 0.0


class Files(Request[OutputFiles], do="files"):
    """List any file or directory of the node."""

    path: str  # absolute, below ~, or below the directory
    directory: str  # or the home directory, where it is not there


class Checkpoints(Request[OutputFiles], do="checkpoints"):
    """List the files of checkpoints that this node has, whole ones and parts."""

    experiment: str = ""  # what its jobs left in their run directories,
    directory: str = ""  # or what is in a directory of the user's


class Room(Message):
    """A directory of the node."""

    directory: str


class MakeRoom(Request[Room], do="make_room"):
    """Name the directory for checkpoints that a job is to find as its own; it goes with the job."""

    job: str
    node: int


class OutputPiece(Message):
    """Bytes of a file; none at its end."""

    data: bytes


class Output(Request[OutputPiece], do="output"):
    """Send a piece of one of the listed files."""

    place: str
    path: str
    offset: int


class OutputSum(Message):
    """The SHA-256 of some bytes, and how many there were."""

    sum: str
    size: Count


class SumOutput(Request[OutputSum], do="sum_output"):
    """Hash a part of one of the listed files."""

    place: str
    path: str
    offset: Count
    size: Count


# -- warm processes ---------------------------------------------------------------------------


class WarmPair(Message):
    """A supervisor and its agent that wait for a job."""

    key: str
    since: Moment
    seconds_left: float  # until they leave by themselves
    ready: bool  # torch is imported
    pids: tuple[int, ...]
    memory: Count  # bytes that nobody else shares
    python: str
    variables: dict[str, str]  # that a job must have, too, to start from them
    skipped: tuple[str, ...]  # packages that every rank imports itself, and why is in the guide


class WarmPairs(Message):
    """All of this user's on this node."""

    pairs: tuple[WarmPair, ...]
    time: Moment  # by the clock of this node, as all times in it


class Warm(Request[WarmPairs], do="warm"):
    """List the processes that wait for a job."""


class WarmEnd(Message):
    """The proof that a pair is gone: PID -> name of what was ended, and of what does not go."""

    key: str
    ended: dict[int, str]
    left: dict[int, str]


class WarmEnds(Message):
    """One for each pair that was there."""

    ends: tuple[WarmEnd, ...]


class WarmOff(Request[WarmEnds], do="warm_off"):
    """End the processes that wait for a job."""


# -- environments -----------------------------------------------------------------------------


class EnvironmentState(Message):
    """This machine's Python, and one environment on it."""

    path: str
    python: str
    version: tuple[Few, Few]
    machine: str  # x86_64, aarch64
    libc: str  # glibc 2.36, or musl
    packages: Optional[dict[str, str]] = None  # name -> version; None: it has to be made


class LookAtEnvironment(Request[EnvironmentState], do="look_at_environment"):
    """Look whether an environment is whole; where it is, names lead to it from now on."""

    key: str
    root: str = ""  # the directory of all environments; the usual one
    name: str = ""


class BuildEnvironment(Request[Nothing], do="build_environment"):
    """Begin to make an environment from the wheels of a tree that is here."""

    key: str
    tree: str  # its digest
    root: str = ""
    name: str = ""


class BuildProgress(Message):
    """The state of what was begun: building, ready or failed."""

    state: str
    step: str
    problem: str = ""
    packages: Optional[dict[str, str]] = None


class AskBuild(Request[BuildProgress], do="ask_build"):
    """Ask how far the environment is."""


class PrunedEnvironments(Message):
    """The environments that are gone; `freed` in bytes."""

    removed: tuple[str, ...]
    freed: Count


class PruneEnvironments(Request[PrunedEnvironments], do="prune_environments"):
    """Remove the environments that no name leads to and no job uses."""

    root: str = ""


# -- files for the node -----------------------------------------------------------------------


class WantedFile(Message):
    """A file of an offer that is not here as it was offered."""

    number: Count  # its place in the offer
    have: Count  # bytes that are here, of it or of another,
    sum: str  # and their SHA-256
    whole: bool  # under its own name: another time or content, and the same size


class WantedFiles(Message):
    """The files of an offer that are to be sent, and those that cannot be taken."""

    wanted: tuple[WantedFile, ...]
    failed: dict[int, str]  # place in the offer -> why


class OfferFiles(Request[WantedFiles], do="offer_files"):
    """Compare a directory with an offer: the piece before, five fields for each file."""

    directory: str
    dry_run: bool = False  # make nothing


class WriteFile(Request[Nothing], do="write_file"):
    """Write the piece before into a file of the offer; the last names the whole file's SHA-256."""

    number: Count
    offset: Count
    sum: str = ""
    here: bool = False  # all of it is here already, and gets its time and mode


# -- from node to node ------------------------------------------------------------------------


class Giving(Message):
    """The port where other nodes may call; 0 where this node may not listen."""

    port: Port


class GiveTree(Request[Giving], do="give_tree"):
    """Give a tree to nodes that have the token: its list and contents, also those still to come."""

    tree: str  # its digest
    token: str
    seconds: float


class NamedFile(Message):
    """A file that is to be the same on another node."""

    path: str  # below the directory
    size: Count
    sum: str  # SHA-256
    mode: Count = 0o600
    changed: Optional[int] = None  # nanoseconds; without it the time is that of its coming


class GiveFiles(Request[Giving], do="give_files"):
    """Give these files of a directory to nodes that have the token."""

    directory: str
    files: tuple[str, ...]  # paths below it
    token: str
    seconds: float
    coming: tuple[NamedFile, ...] = ()  # and these, each once it is here with its size and time


class EndGiving(Request[Nothing], do="end_giving"):
    """Give nothing more to other nodes."""


class GivingNode(Message):
    """A node that gives: all of its addresses where it may answer, the likeliest first."""

    addresses: tuple[IpAddress, ...]
    port: Port
    token: str


class TakeTree(Request[Nothing], do="take_tree"):
    """Begin to take what is lacking of a tree from another node."""

    tree: str  # its digest
    size: Count  # of its list, unpacked
    giver: GivingNode
    seconds: float


class TakeFiles(Request[Nothing], do="take_files"):
    """Begin to take files into a directory from another node; those that are there stay."""

    directory: str
    files: tuple[NamedFile, ...]
    giver: GivingNode
    seconds: float
    label: str = (
        ""  # of what the head sends in the same way: the user's own files, not private ones
    )


class TakeSaved(Request[Nothing], do="take_saved"):
    """Begin to take what another node's ranks saved, and to remove older copies of such files.

    All of it comes, or nothing. What this node's ranks wrote stays as it is, unless it is older:
    then it is kept under a hidden name.
    """

    job: str
    node: int
    given: tuple[str, ...]
    place: str
    by: str  # the name of the node whose ranks wrote it
    files: tuple[NamedFile, ...]
    links: dict[str, str]  # path -> target
    directories: dict[str, Count]  # path -> its time, in nanoseconds
    gone: tuple[str, ...]  # copies whose origins are no more
    older: tuple[str, ...]  # files of an attempt before the one that wrote these
    giver: Optional[GivingNode] = None
    seconds: float


class Taken(Message):
    """Tell how far the transfer is; a problem ends it."""

    size: Count  # bytes that have come
    over: bool
    problem: str = ""
    files: Count = 0  # that were lacking, where that is known


class AskTaken(Request[Taken], do="ask_taken"):
    """Ask how far the transfer is; the answer comes at its end, or a moment later."""


class EndTaking(Request[Nothing], do="end_taking"):
    """Give up what is being taken."""


# -- after a job ------------------------------------------------------------------------------


class LivingRuns(Message):
    """Those of the runs of which anything lives here."""

    living: tuple[tuple[str, int], ...]


class Living(Request[LivingRuns], do="living"):
    """Ask which of these runs (job, node) still live here."""

    runs: tuple[tuple[str, int], ...]


class Released(Message):
    """Tell whether nothing is left of what the attempts of the job shared."""

    gone: bool


class Release(Request[Released], do="release"):
    """Remove what the attempts of a job share on this node: it is not started again."""

    job: str  # of any of its attempts
    node: int


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


# -- time -------------------------------------------------------------------------------------


class Clock(Message):
    """The node's clock."""

    time: Moment


class Beat(Request[Clock], do="beat"):
    """The head is there. What time is it?"""


class Heartbeat(Message):
    """The server is there. Comes unasked, where nothing else is on its way."""

    beat: Moment  # the node's clock
    silent: Optional[float] = None  # seconds since the job printed,
    idle: Optional[float] = None  # and since it moved at all


class SupervisorGone(Message):
    """The stream is complete: the files hold what they will ever hold."""

    supervisor_gone: bool = True


# -- what a frame holds -----------------------------------------------------------------------

UNKNOWN_JOB = "unknown job"
OTHER_VERSION = "other version"
STOPPED = "stopped"  # before it had started
LACKING = "lacking"  # contents of a tree


class Refused(Message):
    """The answer to a request that cannot be done."""

    id: int
    error: str
    kind: str = ""


class Answered(Message):
    """The answer to the request of that number; its sender knows how to decode `ok`."""

    id: int
    ok: dict[str, Any]


Incoming = typing.Union[Greeting, Heartbeat, SupervisorGone, Refused, Answered]


def frame_of_request(number: int, request: Request[Any]) -> dict[str, Any]:
    return {"id": number, "do": request.do, **encode(request)}


def number_of(data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of a request's frame, and its other keys."""
    fields = dict(data)
    number = fields.pop("id", None)
    if type(number) is not int:
        raise Nonsense(f"a request without a number: {shown(data)}")
    return number, fields


def read_request(fields: dict[str, Any]) -> Request[Any]:
    """Return the request that the keys of its frame are, but for the number."""
    kind = REQUESTS.get(str(fields.get("do")))
    if kind is None:
        raise Nonsense(f"no request: {shown(fields.get('do'))}")
    return decode(kind, {name: value for name, value in fields.items() if name != "do"})


def read_incoming(data: dict[str, Any]) -> Incoming:
    """Return what a JSON frame from the node holds."""
    kinds = {"ok": Answered, "error": Refused, "beat": Heartbeat, "version": Greeting}
    for key, kind in kinds.items():
        if key in data:
            return decode(kind, data)
    return decode(SupervisorGone, data)
