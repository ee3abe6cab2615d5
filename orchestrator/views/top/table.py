"""Writes a sample as rows of words: for the live screen and for one look alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.common import text
from orchestrator.protocol.facts import Gpu
from orchestrator.protocol.message import encode
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top.sample import JobSample, Sample
from orchestrator.views.top.watched_node import NodeSample

NODE_HEADINGS = ("NODE", "CPU", "MEMORY", "GPU", "GPU MEMORY", "IN", "OUT", "WHO")
# What changes stands first: 80 columns have room for it.
JOB_HEADINGS = ("JOB", "STEP", "LOSS", "LEFT", "SLOWEST", "SPEED", "FOR", "USER", "NODES")
RANK_HEADINGS = ("RANK", "NODE", "STATE", "STEP", "STEP TIME", "OWN TIME", "MEMORY", "")
BAR = 8  # characters
EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = "▁▂▃▄▅▆▇█"
MOST_USERS = 3


def node_rows(sample: Sample) -> list[list[str]]:
    return [node_row(node) for node in sample.nodes]


def node_row(node: NodeSample) -> list[str]:
    load = node.load
    if node.checkup is None or load is None:
        return [node.name, "-", "-", "-", "-", "-", "-", node.problem or "no answer yet"]
    gpus = node.checkup.gpus or ()
    share = load.cores / max(1, load.cpus)
    used = 1.0 - load.available / load.memory if load.memory else 0.0
    moved = [point.net for point in node.history]
    memory = f"{bar(used)} {text.size(load.memory - load.available, binary=True)}"
    return [
        node.name,
        f"{curve([p.cpu for p in node.history], share)} {load.cores:.1f} of {load.cpus}",
        memory + (f", {text.size(load.swapped, binary=True)} swapped" if load.swapped else ""),
        gpu_words(gpus, [point.gpu for point in node.history]),
        gpu_memory(gpus),
        rate(node.received),
        " ".join(filter(None, (rate(node.sent), spark(moved, max_of(moved))))),
        who(node),
    ]


def job_rows(sample: Sample) -> list[list[str]]:
    return [job_row(job, sample.time) for job in sample.jobs]


def job_row(job: JobSample, now: float) -> list[str]:
    step = "-" if job.step is None else str(job.step)
    if job.steps:
        step += f" of {job.steps}"
    if job.trainer > 1 and job.step is not None:
        step += f" (Trainer {job.trainer})"
    names = ", ".join(job.nodes[:2]) + (f" and {len(job.nodes) - 2} more" * (len(job.nodes) > 2))
    return [
        job.experiment or job.job,
        step,
        "NaN" if job.lost else "-" if job.loss is None else f"{job.loss:.4g}",
        "-" if job.left is None else text.duration(job.left),
        job.slowest or "-",
        "-" if job.rate is None else f"{text.size(job.rate).removesuffix('B').strip()}/s",
        text.duration(max(1.0, now - job.since)),
        job.user,
        names,
    ]


def bar(share: float) -> str:
    """Draw a share as a bar of eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    full, rest = divmod(eighths, 8)
    return (EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")).ljust(BAR)


def curve(shares: Sequence[float | None], now: float) -> str:
    """Draw the last shares as a small curve; a bar where there is only one."""
    return spark(shares, 1.0) or bar(now)


def spark(values: Sequence[float | None], most: float) -> str:
    """Draw the last values as small columns, of which `most` is the highest; a gap for unknown."""
    last = list(values)[-BAR:]
    if sum(value is not None for value in last) < 2:
        return ""
    return "".join(
        " " if value is None else HEIGHTS[min(7, int(8 * max(0.0, value) / most))] for value in last
    ).rjust(BAR)


def max_of(values: Sequence[float | None]) -> float:
    return max((value for value in values if value), default=1.0)


def job_words(job: JobSample) -> str:
    """Say in one line how far a job is."""
    name, step, loss, left, slowest, speed = job_row(job, job.since)[:6]
    words = [name, f"step {step}", f"loss {loss}", f"{left} left", f"slowest: {slowest}", speed]
    return "   ".join(word for word in words if "-" not in word.split())


def rank_rows(job: JobSample) -> list[list[str]]:
    return [rank_row(rank) for rank in job.ranks]


def rank_row(rank: RankProgress) -> list[str]:
    return [
        f"rank {rank.rank}",
        rank.node,
        rank.state,
        "-" if rank.step is None else str(rank.step),
        "-" if rank.step_ms is None else text.duration(rank.step_ms / 1e3),
        "-" if rank.own_ms is None else text.duration(rank.own_ms / 1e3),
        "-" if rank.memory is None else text.size(rank.memory, binary=True),
        f"slow: +{rank.behind:.0%} of a step" if rank.slow else "",
    ]


def gpu_words(gpus: Sequence[Gpu], before: Sequence[float | None] = ()) -> str:
    """Tell how busy the GPUs are: each one's percents where few, the range of many."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    sick = sum(bool(gpu.problem) for gpu in gpus)
    if not gpus:
        return "none"
    words = f"{len(gpus)} x"
    if busy:
        mean = sum(busy) / len(busy)
        words = f"{curve(before, mean / 100)} {len(gpus)} x {mean:.0f} %"
        if max(busy) - min(busy) > 20:
            words += f" ({min(busy)} to {max(busy)})"
    hot = [gpu.temperature for gpu in gpus if gpu.temperature is not None]
    if hot:
        words += f", {max(hot)} °C"
    return f"{words}, {sick} sick" if sick else words


def gpu_memory(gpus: Sequence[Gpu]) -> str:
    known = [(g.used, g.memory) for g in gpus if g.used is not None and g.memory]
    if not known:
        return "-"
    used, whole = sum(u for u, _ in known), sum(m for _, m in known)
    return f"{bar(used / whole)} {text.size(used, binary=True)}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{text.size(value)}/s"


def who(node: NodeSample) -> str:
    """Name the users, those with most first: on the GPUs, then on the processors."""
    assert node.checkup is not None
    holders = [holder.user or "?" for holder in node.checkup.holders or ()]
    users = [user.user for user in node.load.users] if node.load is not None else []
    names = list(dict.fromkeys([*holders, *users]))
    more = f" and {len(names) - MOST_USERS} more" if len(names) > MOST_USERS else ""
    return (", ".join(names[:MOST_USERS]) + more) or "free"


def to_json(sample: Sample) -> dict[str, Any]:
    nodes = []
    for node in sample.nodes:
        known: dict[str, Any] = {"name": node.name, "reached": node.checkup is not None}
        if node.checkup is None:
            known["problem"] = node.problem
        else:
            known.update(received=node.received, sent=node.sent)
            known["history"] = [asdict(point) for point in node.history]
            known.update(encode(node.checkup, nones=True))
        nodes.append(known)
    return {"time": sample.time, "nodes": nodes, "jobs": [asdict(job) for job in sample.jobs]}
