"""The process that samples a machine beside a real supervisor."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.machine.sampling import sampler
from orchestrator.node.machine.sampling.sampler import IN_A_ROW, Causes, Sampler
from orchestrator.records.metrics import samples
from tests.node.running import Job, alive, bare_spec, script, wait_until

WAITS = "import sys; print('up', flush=True); open(sys.argv[1]).read()"


def sampler_of(job: Job) -> Process | None:
    assert job.supervisor is not None
    children = [p for p in processes.everyone().values() if p.parent == job.supervisor.pid]
    command = {p.pid: Path(f"/proc/{p.pid}/cmdline").read_bytes().split(b"\0") for p in children}
    return next((p for p in children if b"sample" in command[p.pid]), None)


def waiting(job: Job, tmp_path: Path) -> Path:
    """Start a job that waits until its FIFO is opened."""
    go = tmp_path / "go"
    os.mkfifo(go)
    (tmp_path / "e/outputs").mkdir(parents=True)
    target = {**script(tmp_path, WAITS), "args": [str(go)]}
    job.start(job.spec(target, env={"ORCHESTRATOR_EXPERIMENT": str(tmp_path / "e")}))
    return go


@pytest.mark.slow
def test_it_samples_beside_a_job_and_is_no_part_of_it(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = new_job()
    go = waiting(job, tmp_path)
    path = tmp_path / "e/outputs/node_00_metrics.jsonl"
    wait_until(lambda: path.exists() and samples.machine(path).host)  # it is there before a line
    own = sampler_of(job)
    assert own is not None and own.pid not in job.living()
    assert samples.machine(path).host
    go.write_text("")
    job.wait()
    assert not alive(own.pid)


@pytest.mark.slow
def test_a_killed_supervisor_takes_it_along(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    waiting(job, tmp_path)
    own = wait_until(lambda: sampler_of(job))
    assert job.supervisor is not None
    job.supervisor.kill()
    wait_until(lambda: not alive(own.pid))


@pytest.mark.slow
def test_a_sampler_that_hangs_holds_nobody_up(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    go = waiting(job, tmp_path)
    own = wait_until(lambda: sampler_of(job))
    os.kill(own.pid, signal.SIGSTOP)
    go.write_text("")
    assert job.wait()["agent"] == 0
    assert not alive(own.pid)


def sampled(tmp_path: Path, **fields: object) -> Sampler:
    (tmp_path / "outputs").mkdir(exist_ok=True)
    env = {"ORCHESTRATOR_EXPERIMENT": str(tmp_path)}
    return Sampler(bare_spec(env=env, **fields), seconds=0.01)


def test_notices_are_in_the_stream_once_for_an_attempt(tmp_path: Path) -> None:
    first = {"number": 1, "restarts": 2, "first_job": "job", "first_node": 0}
    told = []
    for number in (1, 2):
        own = sampled(tmp_path, attempt={**first, "number": number})
        own.disks.sample = lambda: {"/dev/shm": [1, 64 << 20]}  # type: ignore[method-assign]
        told.append([notice.cause for notice in own.sample() + own.sample()])
    assert told == [["shm_full"], ["shm_full"]]
    paths = samples.every(tmp_path / "outputs")[0]
    assert [path.name for path in paths] == ["node_00_metrics.jsonl", "node_00_metrics_2.jsonl"]
    assert [n.text for n in samples.Events(paths[0], 0).read()] == [
        "/dev/shm is full: 1 B free of 64 MiB"
    ]
    assert len(samples.RecentSamples(paths[1]).read()) == 2


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = sampler.Lines(str(tmp_path / "lines"))
    lines.write({"time": 1})
    write = os.write
    monkeypatch.setattr(sampler.os, "write", lambda fd, data: write(fd, data[:3]))
    lines.write({"time": 2})
    monkeypatch.undo()
    lines.write({"time": 3})
    text = (tmp_path / "lines").read_text()
    assert [json.loads(line)["time"] for line in text.splitlines()] == [1, 3]


GB = 1 << 30


def told(sample: dict[str, Any], times: int = 10) -> list[str]:
    causes = Causes(set())
    return [notice.text for _ in range(times) for notice in causes.judge(sample)]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"disks": {"/": [3 * GB, 100 * GB]}}, "/: 3 GiB free of 100 GiB"),
        ({"disks": {"/": [6 * GB, 100 * GB]}}, None),
        ({"disks": {"/dev/shm": [1 << 20, 64 << 20]}}, "/dev/shm is full: 1 MiB free of 64 MiB"),
        ({"disks": {"/dev/shm": [1 * GB, 100 * GB]}}, None),
        ({"disks": {"/empty": [0, 0]}}, None),
        (
            {"gpu": {"ecc_uncorrected": [0, None, 2]}},
            "GPU 2: 2 uncorrected memory errors since its driver started",
        ),
        (
            {"gpu": {"throttle": [0x4, 0x48], "celsius": [50, 91], "mhz": [1980, None]}},
            "GPU 1 (91 C): slowed down by heat or by its power supply",
        ),
        ({"gpu": {"throttle": [0x1, 0x4, None]}}, None),  # idle, and at its power limit
        (
            {"swap_per_s": 5 << 20, "swap_bytes": 1 * GB},
            "it swaps 5 MiB a second, 1 GiB of memory are on disk",
        ),
        ({"swap_per_s": 1000, "swap_bytes": 1 * GB}, None),
    ],
)
def test_each_cause_is_told_once(sample: dict[str, Any], words: str | None) -> None:
    assert told(sample) == ([words] if words else [])


def test_a_spike_is_not_told() -> None:
    causes = Causes(set())
    for mask in [0x40] * (IN_A_ROW - 1) + [0] + [0x40] * (IN_A_ROW - 1):
        assert causes.judge({"gpu": {"throttle": [mask]}}) == []
    assert causes.judge({"gpu": {"throttle": [0x40]}})


def test_what_an_earlier_attempt_told_is_not_told_again() -> None:
    assert Causes({"shm_full"}).judge({"disks": {"/dev/shm": [0, GB]}}) == []
