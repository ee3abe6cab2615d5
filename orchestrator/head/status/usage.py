"""Sums up what jobs took of the machines: hours of GPUs and of slots, energy, useful time.

All of it is read from what the experiments have kept. What nobody measured is None, never 0.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.permissions import user_name
from orchestrator.records import goodput, manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import samples
from orchestrator.records.metrics.lines import GrowingFile

HOUR, KILOWATT_HOUR = 3600.0, 3.6e6
GAP_SECONDS = 60.0  # without a sample: what was used then is not known
AMOUNTS = ("gpu_hours", "slot_hours", "energy_kwh", "useful_hours")


@dataclass(frozen=True)
class Held:
    """Tells what a job had of one machine."""

    count: int
    gpus: bool  # else slots


@dataclass(frozen=True)
class Usage:
    """Tells what one job took. `useful_hours`: of its GPUs or slots, in which it trained."""

    user: str
    project: str
    month: str
    gpu_hours: float | None
    slot_hours: float | None
    energy_kwh: float | None
    useful_hours: float | None


@dataclass(frozen=True)
class Total:
    """The sum over jobs of what is known of each amount, and of how many jobs it is not."""

    name: str
    jobs: int
    known: Mapping[str, float | None]
    unknown: Mapping[str, int]
    goodput: float | None  # the useful part, of the jobs where that is known


def of(experiment: Experiment, now: float) -> Usage:
    """Return what a job has taken; UsageError and the like where its record cannot be read."""
    record = experiment.read_record()
    end = now if record.ended is None else record.ended
    if record.ended is None:  # its head may be gone for days
        end = min(end, max(record.started, last_sign(experiment.path)))
    known: dict[str, Any] = {}
    with contextlib.suppress(UsageError):
        known = manifest.read(experiment)
    held = held_by_name(record, known)
    hours = {gpus: hours_of(record, held, end, gpus=gpus) for gpus in (True, False)}
    parts = record.goodput or goodput.of(record, experiment.path, end)
    whole, taken = sum(parts.values()), (hours[True], hours[False])
    useful = None
    if whole and None not in taken and (parts.get("training") or parts.get("load")):
        useful = sum(filter(None, taken)) * parts.get("training", 0.0) / whole
    return Usage(
        user=user_name(experiment.path.stat().st_uid),
        project=Path(str(known.get("directory") or "?")).name,
        month=time.strftime("%Y-%m", time.localtime(record.started)),
        gpu_hours=hours[True],
        slot_hours=hours[False],
        energy_kwh=energy(record, held, experiment.path / "outputs"),
        useful_hours=useful,
    )


def last_sign(path: Path) -> float:
    """Return when something was written last for a job that nobody has seen end."""
    places = (*path.glob("*"), *path.glob("logs/*"), *path.glob("outputs/*"))
    return max((place.lstat().st_mtime for place in places), default=0.0)


def held_by_name(record: JobRecord, known: Mapping[str, Any]) -> dict[str, Held]:
    """Return what the job had of each node of its launch, by the node's name."""
    ranks = {node.name: node.nproc for node in record.nodes}
    named = {str(node["name"]): node for node in known.get("nodes", ())}
    return {name: held_of(node, record, ranks.get(name, 1)) for name, node in named.items()}


def held_of(node: Mapping[str, Any], record: JobRecord, ranks: int) -> Held:
    facts, variables = (node.get(part) or {} for part in ("facts", "environment"))
    gpus = int(facts.get("gpus") or 0)
    if not gpus:
        return Held(ranks, gpus=False)
    named = [word for word in str(variables.get("CUDA_VISIBLE_DEVICES") or "").split(",") if word]
    count = record.launch.gpus or len(named) or gpus
    return Held(min(count, gpus), gpus=True)


def hours_of(
    record: JobRecord, held: Mapping[str, Held], end: float, *, gpus: bool
) -> float | None:
    """Return the hours of all GPUs, or slots; None where it is not known what some node had."""
    names = {attempt.number: attempt.nodes for attempt in record.attempts}
    last = [node.name for node in record.nodes]
    hours = 0.0
    for span in goodput.spans_of(record, end) if record.state != "queued" else ():
        for name in names.get(span.number, last):
            if name not in held:
                return None
            if held[name].gpus == gpus:
                hours += held[name].count * max(0.0, span.ended - span.started) / HOUR
    return hours


def energy(record: JobRecord, held: Mapping[str, Held], outputs: Path) -> float | None:
    """Return the energy of the job's GPUs, where all of them were sampled.

    Of a part of a machine's GPUs, samples do not say which ones were the job's.
    """
    names = {node.index: node.name for node in record.nodes}
    with_gpus = {index for index, name in names.items() if name in held and held[name].gpus}
    files = samples.every(outputs)
    joules = 0.0
    for index in with_gpus:
        for path in files.get(index, ()):
            if len(samples.machine(path).models) != held[names[index]].count:
                return None
            measured = joules_of(path)
            if measured is None:
                return None
            joules += measured
    return joules / KILOWATT_HOUR if with_gpus and with_gpus <= files.keys() else None


def joules_of(path: Path) -> float | None:
    """Return what a machine's GPUs took while it was sampled; None if nothing was measured."""
    lines = map(samples.sample_of, GrowingFile(path, having=b'"watts":').lines())
    known = [
        (one.time, sum(watts))
        for one in lines
        if one is not None and (watts := [each for each in one.gpus.get("watts", ()) if each])
    ]
    if not known:
        return None
    pairs = itertools.pairwise(known)
    return sum(
        watts * (until - since)
        for (since, watts), (until, _) in pairs
        if 0 < until - since <= GAP_SECONDS
    )


# -- sums -----------------------------------------------------------------------------------------


def totals(usages: Iterable[Usage], by: str) -> list[Total]:
    """Sum up by user, project or month, in the order of these."""
    groups: dict[str, list[Usage]] = {}
    for usage in usages:
        groups.setdefault(getattr(usage, by), []).append(usage)
    return [total(name, group) for name, group in sorted(groups.items())]


def total(name: str, group: Sequence[Usage]) -> Total:
    values = {amount: [getattr(usage, amount) for usage in group] for amount in AMOUNTS}
    sure = [usage for usage in group if usage.useful_hours is not None]
    whole = sum((usage.gpu_hours or 0.0) + (usage.slot_hours or 0.0) for usage in sure)
    return Total(
        name=name,
        jobs=len(group),
        known={
            amount: sum(filter(None, found)) if any(one is not None for one in found) else None
            for amount, found in values.items()
        },
        unknown={amount: found.count(None) for amount, found in values.items()},
        goodput=sum(usage.useful_hours or 0.0 for usage in sure) / whole if whole else None,
    )
