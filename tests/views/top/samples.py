"""Looks at three machines as a cluster would give them: with GPUs, with cores alone, lost."""

from dataclasses import replace
from typing import Any

from orchestrator.protocol.facts import Checkup, Gpu, Holder, Load, User
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top.sample import JobSample, NodeSample, TopSample

NOW = 1_800_000_000.0
GIB = 1 << 30


def gpu(index: int, busy: int, problem: str = "") -> Gpu:
    return Gpu(
        vendor="nvidia", index=index, model="H100", uuid=f"GPU-{index}", memory=80 * GIB,
        used=40 * GIB, busy=busy, temperature=60 + index, problem=problem,
    )  # fmt: skip


def load(job: str = "", cores: float = 1.0) -> Load:
    users = (User("ada", job, cores, GIB, 2, "python3", 9, NOW - 90),) if job else ()
    return Load(
        cores, users, 4, 16 * GIB, 12 * GIB, 0, 1000, 2000, 10.0, disk=10**11, disk_free=3 * 10**9
    )


def job(name: str, **fields: Any) -> JobSample:
    return replace(JobSample(
        job=f"{name}-1f", user="ada", nodes=("one", "two"), since=NOW - 90, experiment=name,
        step=10, steps=40, loss=2.5, rate=1500.0, left=90.0,
    ), **fields)  # fmt: skip


def rank(number: int, **fields: Any) -> RankProgress:
    return replace(RankProgress(number, "one", 0, "started", 10, 250.0, 200.0, GIB), **fields)


def sample(*jobs: JobSample) -> TopSample:
    holders = (Holder(71, "GPU-0", "python3", GIB, "ada"), Holder(72, "GPU-1", "x", 1, "bob"))
    with_gpus = Checkup(gpus=(gpu(0, 97), gpu(1, 3)), holders=holders, load=load("train-1f"))
    return TopSample(
        NOW,
        (
            NodeSample("one", with_gpus, 1e6, None),
            NodeSample("two", Checkup(gpus=(), holders=(), load=load()), 0.0, 2e9),
            NodeSample("gone", problem="it does not answer"),
        ),
        jobs,
    )
