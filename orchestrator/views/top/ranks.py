"""The ranks of one job, each with its step and how long a step takes it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from orchestrator.records.experiment import JobRecord
from orchestrator.records.last_metrics import last_values, number, step_of
from orchestrator.records.trainers import Files

HEADINGS = ("RANK", "NODE", "STATE", "STEP", "STEP TIME", "OWN TIME", "MEMORY", "")
NOTABLE = 0.1  # of a step: less is noise


@dataclass(frozen=True)
class RankSample:
    """One rank: what its node says of its process, and its last line of metrics."""

    rank: int
    node: str
    index: int  # the node's
    state: str
    step: int | None = None
    step_ms: float | None = None
    own_ms: float | None = None  # without waiting for the others
    memory: float | None = None
    behind: float = 0.0  # how much longer than the median rank it takes, in parts of a step

    @property
    def slow(self) -> bool:
        return self.behind > NOTABLE


def ranks(record: JobRecord, files: Files) -> list[RankSample]:
    """Return all ranks, in their order, from the record and the last line in the file of each."""
    samples = []
    for node in record.nodes:
        for rank in range(node.first_rank, node.first_rank + node.nproc):
            state = str(node.ranks.get(str(rank), {}).get("state", node.state))
            line = last_values(files.get(rank))
            own = [number(line, name) for name in ("data_ms", "forward_backward_ms")]
            samples.append(
                RankSample(
                    rank,
                    node.name,
                    node.index,
                    state,
                    step_of(line),
                    number(line, "step_ms"),
                    sum(part or 0.0 for part in own) if any(own) else None,
                    number(line, "memory_bytes"),
                )
            )
    return compared(samples)


def compared(samples: list[RankSample]) -> list[RankSample]:
    """Say of each rank how far it is behind the median one."""
    known = [sample.own_ms for sample in samples if sample.own_ms is not None]
    whole = next((sample.step_ms for sample in samples if sample.step_ms), None)
    if len(known) < 2 or not whole:
        return samples
    middle = statistics.median_low(known)
    return [
        RankSample(**{**vars(sample), "behind": (sample.own_ms - middle) / whole})
        if sample.own_ms is not None
        else sample
        for sample in samples
    ]
