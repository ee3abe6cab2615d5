"""The tables of a sample, for the live screen and for text output. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.common import text
from orchestrator.common.hosts import fold_names
from orchestrator.head.nodes.machine import UNKNOWN, hides_users, unknown_users
from orchestrator.head.screen import styles
from orchestrator.head.screen.output import UNLIMITED_COLUMNS, Cell, Column, Table
from orchestrator.head.screen.progress import join_parts
from orchestrator.protocol.facts import Gpu, Holder
from orchestrator.protocol.message import encode_value
from orchestrator.protocol.requests.claims import SLOT, WAITING, ClaimEntry
from orchestrator.records.metrics.curves import count_in_thousands
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top.sample import CONNECTING, JobSample, NodeSample, TopSample

BAR_CHARACTERS = 8
EIGHTHS = " ▏▎▍▌▋▊▉█"
MOST_USERS = 3
# In characters, of folded names.
LONGEST_PLACE = 20
# Below this free share, a disk may soon be full.
LITTLE_DISK = 0.1
# The shares in use from which on a cell has a colour.
IDLE, FULL, NO_ROOM = 0.05, 0.85, 0.95


# -- nodes ----------------------------------------------------------------------------------------


def heat(share: float | None) -> str:
    """Return the style of a share that is in use."""
    limits = ((FULL, styles.WARNING), (IDLE, styles.DONE))
    return next((style for limit, style in limits if share is not None and share >= limit), "")


def cpu_share(node: NodeSample) -> float | None:
    return node.load.cores / max(1, node.load.cpus) if node.load else None


def memory_share(node: NodeSample) -> float | None:
    load = node.load
    return 1.0 - load.available / load.memory if load and load.memory else None


def gpu_share(node: NodeSample) -> float | None:
    busy = [gpu.busy for gpu in node.gpus if gpu.busy is not None]
    return sum(busy) / len(busy) / 100 if busy else None


def gpu_memory_share(node: NodeSample) -> float | None:
    used, whole = memory_of(node.gpus)
    return used / whole if whole else None


def cpu_words(node: NodeSample) -> Cell:
    load, share = node.load, cpu_share(node)
    if load is None or share is None:
        return UNKNOWN
    return f"{share_bar(share)} {load.cores:.1f} of {load.cpus}", heat(share)


def memory_words(node: NodeSample) -> Cell:
    load, used = node.load, memory_share(node) or 0.0
    if load is None:
        return UNKNOWN
    words = f"{share_bar(used)} {text.format_bytes(load.memory - load.available, binary=True)}"
    if not load.swapped:
        return words, styles.FAILED if used >= NO_ROOM else heat(used)
    return f"{words}, {text.format_bytes(load.swapped, binary=True)} swapped", styles.FAILED


def disk_words(node: NodeSample) -> Cell:
    load = node.load
    if load is None or not load.disk:
        return "-"
    share = load.disk_free / load.disk
    style = styles.FAILED if share < LITTLE_DISK / 5 else styles.WARNING
    return text.format_bytes(load.disk_free), style if share < LITTLE_DISK else ""


def gpus_of(node: NodeSample) -> Cell:
    if node.checkup is None or node.checkup.gpus is None:
        return UNKNOWN
    sick = any(gpu.problem for gpu in node.gpus)
    return gpu_words(node.gpus), (styles.FAILED if sick else styles.DONE if gpu_share(node) else "")


def who_words(node: NodeSample) -> Cell:
    names = who(node)
    return names, styles.DONE if names == "free" else ""


def who(node: NodeSample) -> str:
    """Return the names of the users: those who hold GPUs first, then those on the processors."""
    assert node.checkup is not None
    holders = [holder.user or UNKNOWN for holder in node.checkup.holders or ()]
    users = [user.user for user in node.load.users] if node.load is not None else []
    names = list(dict.fromkeys([*holders, *users]))
    more = f" and {len(names) - MOST_USERS} more" if len(names) > MOST_USERS else ""
    shown = ", ".join(names[:MOST_USERS]) + more
    unseen = not holders and any(map(hides_users, node.gpus))
    if UNKNOWN not in names and (unseen or unknown_users(node.checkup)):
        return f"{shown}, {UNKNOWN}" if shown else UNKNOWN
    return shown or "free"


NODES: Table[NodeSample] = Table(
    (
        Column("NODE", lambda node: node.name, absent=lambda node: node.name, least=10),
        Column("CPU", cpu_words, drop=1),
        Column("MEMORY", memory_words, drop=2),
        Column("DISK FREE", disk_words, drop=6),
        Column("GPU", gpus_of, least=14),
        Column(
            "GPU MEMORY",
            lambda node: (gpu_memory(node.gpus), heat(gpu_memory_share(node))),
            drop=3,
        ),
        Column("IN", lambda node: rate(node.received), drop=5),
        Column("OUT", lambda node: rate(node.sent), drop=4),
        Column(
            "WHO",
            who_words,
            absent=lambda node: (node.problem or "no answer yet", styles.WARNING),
            least=18,
        ),
    ),
    is_absent=lambda node: node.checkup is None,
)

# -- all nodes together ---------------------------------------------------------------------------


def totals_line(sample: TopSample, width: int | None) -> str:
    """Return one line about the whole cluster: its nodes, GPUs and jobs."""
    every = text.plural(len(sample.nodes), "node")
    reached = sum(node.checkup is not None for node in sample.nodes)
    if not reached and any(node.problem == CONNECTING for node in sample.nodes):
        return f"connecting to {every} ..."
    claims = [claim for node in sample.nodes for claim in node.claims]
    waiting = len({claim.id for claim in claims if claim.state == WAITING})
    jobs = f"{text.plural(len(sample.jobs), 'job')} running, {waiting} queued"
    # Without room the nodes are left out first: the table below has them.
    parts = [(f"{reached} of {every}", "", 2), (gpu_totals(sample, claims), "", 1), (jobs, "", 0)]
    return join_parts(parts, width or UNLIMITED_COLUMNS)


def gpu_totals(sample: TopSample, claims: Sequence[ClaimEntry]) -> str:
    """Return how many GPUs are in use by a process, and how many are held by jobs."""
    every = [(node, gpu) for node in sample.nodes for gpu in node.gpus]
    used = sum(is_used(node, gpu) for node, gpu in every)
    held = sum(not key.startswith(SLOT) for claim in claims for key in claim.keys)
    return f"{used} of {text.plural(len(every), 'GPU')} used, {held} held" if every else ""


def is_used(node: NodeSample, gpu: Gpu) -> bool:
    """Return True if a process has the GPU, or it computes for one that is not seen."""
    holders = (node.checkup.holders or ()) if node.checkup is not None else ()
    return any(holder.gpu == gpu.uuid for holder in holders) or (gpu.busy or 0) > 100 * IDLE


# -- one node, closer -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DetailRow:
    """A GPU of a node, a process on it, or a user of its processors."""

    name: str
    what: str = ""
    use: str = ""
    memory: str = ""
    user: str = ""
    job: str = ""
    problem: str = ""
    pid: int | None = None


def rows_of_node(node: NodeSample) -> list[DetailRow]:
    """Return each GPU of a node with its processes, the users of its processors, and others."""
    parts = []
    holders = (node.checkup.holders or ()) if node.checkup is not None else ()
    for each in node.gpus:
        busy = UNKNOWN if each.busy is None else f"{each.busy:3} %"
        busy += f"  {each.temperature} °C" if each.temperature is not None else ""
        memory = f"{size_words(each.used)} of {size_words(each.memory)}"
        parts.append(DetailRow(f"GPU {each.index}", each.model, busy, memory, problem=each.problem))
        parts += [process(holder) for holder in holders if holder.gpu == each.uuid]
    for user in node.load.users if node.load else ():
        use, memory = f"{user.cores:.1f} cores", size_words(user.memory)
        parts.append(
            DetailRow(f"{user.pid}", user.name, use, memory, user.user, user.job, pid=user.pid)
        )
    if node.checkup is not None and (why := unknown_users(node.checkup)):
        parts.append(DetailRow("others", why, f"{node.load.unseen:.1f} cores" if node.load else ""))
    return parts


def process(holder: Holder) -> DetailRow:
    memory, user = size_words(holder.used), holder.user or UNKNOWN
    return DetailRow(f"  {holder.pid}", holder.name, "", memory, user, holder.job, pid=holder.pid)


PARTS: Table[DetailRow] = Table(
    (
        Column("PART", lambda part: part.name),
        Column("WHAT", lambda part: part.what, least=8),
        Column("USE", lambda part: part.use, drop=2),
        Column("MEMORY", lambda part: part.memory, drop=1),
        Column("WHO", lambda part: part.user),
        Column(
            "JOB",
            lambda part: (part.problem, styles.FAILED) if part.problem else part.job,
            least=12,
        ),
    )
)


# -- jobs -----------------------------------------------------------------------------------------


def step_words(job: JobSample) -> Cell:
    step = "-" if job.step is None else str(job.step)
    step += f" of {job.steps}" * bool(job.steps)
    return (f"{step}, {job.stalled}", styles.WARNING) if job.stalled else step


def loss_words(job: JobSample) -> Cell:
    if job.lost:
        return "NaN", styles.FAILED
    return "-" if job.loss is None else f"{job.loss:.4g}"


def speed_words(job: JobSample) -> str:
    if job.rate is None:
        return "-"
    return f"{count_in_thousands(job.rate)} {job.unit}/s"


def place_words(job: JobSample) -> str:
    short = fold_names(job.nodes)
    if "[" in short and len(short) <= LONGEST_PLACE:
        return short
    return ", ".join(job.nodes[:2]) + (f" and {len(job.nodes) - 2} more" * (len(job.nodes) > 2))


def job_table(now: float) -> Table[JobSample]:
    """Return the columns of jobs; those that change come first, to fit into 80 columns."""
    return Table(
        (
            Column("JOB", lambda job: job.experiment or job.job, least=16),
            Column("STEP", step_words),
            Column("LOSS", loss_words),
            Column(
                "LEFT",
                lambda job: time_words(None if job.left is None else round(job.left)),
                drop=1,
            ),
            Column(
                "SLOWEST",
                lambda job: (job.slowest, styles.WARNING) if job.slowest else "-",
                drop=2,
            ),
            Column("SPEED", speed_words, drop=4),
            Column(
                "FOR", lambda job: text.format_duration(round(max(1.0, now - job.since))), drop=6
            ),
            Column("USER", lambda job: job.user, drop=5),
            Column("NODES", place_words, drop=7),
            Column("COMMAND", lambda job: job.command or "-", drop=3, least=16),
        )
    )


def job_words(job: JobSample) -> str:
    """Return a job's progress in one line."""
    name, step, loss, left, slowest, speed = job_table(job.since).words(job)[:6]
    words = [name, f"step {step}", f"loss {loss}", f"{left} left", f"slowest: {slowest}", speed]
    return "   ".join(word for word in words if "-" not in word.split())


# -- the ranks of a job ---------------------------------------------------------------------------


def slow_words(rank: RankProgress) -> Cell:
    part = rank.how_slow and f":{rank.how_slow} of a step"
    return (f"{rank.cause}{part}", styles.WARNING) if rank.slow else ""


RANKS: Table[RankProgress] = Table(
    (
        Column("RANK", lambda rank: f"rank {rank.rank}"),
        Column("NODE", lambda rank: rank.node, least=8),
        Column("STATE", lambda rank: rank.state),
        Column("STEP", lambda rank: "-" if rank.step is None else str(rank.step)),
        Column("STEP TIME", lambda rank: time_words(rank.step_ms, 1e-3), drop=3),
        Column("OWN TIME", lambda rank: time_words(rank.own_ms, 1e-3), drop=2),
        Column("MEMORY", lambda rank: size_words(rank.memory), drop=1),
        Column("", slow_words),
    )
)


# -- cells ----------------------------------------------------------------------------------------


def time_words(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else text.format_duration(value * unit)


def size_words(value: float | None) -> str:
    return "-" if value is None else text.format_bytes(value, binary=True)


def share_bar(share: float) -> str:
    """Return a bar of a share, drawn in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_CHARACTERS * 8)
    full, rest = divmod(eighths, 8)
    return (EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")).ljust(BAR_CHARACTERS)


def gpu_words(gpus: Sequence[Gpu]) -> str:
    """Return how busy the GPUs are: the mean, the range if wide, and the highest temperature."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    sick = sum(bool(gpu.problem) for gpu in gpus)
    if not gpus:
        return "none"
    words = f"{len(gpus)} x {UNKNOWN}"
    if busy:
        mean = sum(busy) / len(busy)
        words = f"{share_bar(mean / 100)} {len(gpus)} x {mean:.0f} %"
        if max(busy) - min(busy) > 20:
            words += f" ({min(busy)} to {max(busy)})"
    hot = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
    if hot:
        words += f", {max(hot)} °C"
    return f"{words}, {sick} sick" if sick else words


def gpu_memory(gpus: Sequence[Gpu]) -> str:
    used, whole = memory_of(gpus)
    return f"{share_bar(used / whole)} {text.format_bytes(used, binary=True)}" if whole else "-"


def memory_of(gpus: Sequence[Gpu]) -> tuple[int, int]:
    """Return the used and the total memory of the GPUs that report both."""
    known = [(gpu.used, gpu.memory) for gpu in gpus if gpu.used is not None and gpu.memory]
    return sum(used for used, _ in known), sum(whole for _, whole in known)


def rate(value: float | None) -> str:
    return "-" if value is None else f"{text.format_bytes(value)}/s"


def sample_to_json(sample: TopSample) -> dict[str, Any]:
    nodes = []
    for node in sample.nodes:
        known: dict[str, Any] = {"name": node.name, "reached": node.checkup is not None}
        if node.checkup is None:
            known.update(problem=node.problem, fix=node.fix)
        else:
            known.update(received=node.received, sent=node.sent)
            known.update(encode_value(node.checkup, nones=True))
        nodes.append(known)
    return {"time": sample.time, "nodes": nodes, "jobs": [asdict(job) for job in sample.jobs]}
