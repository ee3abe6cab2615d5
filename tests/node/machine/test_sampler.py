"""The process that samples a machine beside a real supervisor."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job import processes
from orchestrator.node.job.processes import Process
from orchestrator.node.machine import sampler
from orchestrator.node.machine.sampler import IN_A_ROW, Causes, Sampler
from orchestrator.records.metrics import samples
from tests.node.running import Job, alive, bare_spec, script, wait_until

WAITS = "import sys; print('up', flush=True); open(sys.argv[1]).read()"


def sampler_of(job: Job) -> Process | None:
    children = [p for p in processes.all_processes().values() if p.parent == job.supervisor.pid]
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
def test_sampler_runs_beside_job(job: Job, tmp_path: Path) -> None:
    go = waiting(job, tmp_path)
    path = tmp_path / "e/outputs/node_00_metrics.jsonl"
    wait_until(
        lambda: path.exists() and samples.read_machine(path).host
    )  # it is there before a line
    own = sampler_of(job)
    assert own is not None and own.pid not in job.living()
    assert samples.read_machine(path).host
    go.write_text("")
    job.wait()
    assert not alive(own.pid)


@pytest.mark.slow
def test_sampler_ends_with_killed_supervisor(job: Job, tmp_path: Path) -> None:
    waiting(job, tmp_path)
    own = wait_until(lambda: sampler_of(job))
    job.supervisor.kill()
    wait_until(lambda: not alive(own.pid))


@pytest.mark.slow
def test_hanging_sampler_does_not_delay_end(job: Job, tmp_path: Path) -> None:
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


def test_notice_is_written_once_per_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "disk_space", lambda _: [1, 64 << 20])
    told = []
    for number in (1, 2):
        own = sampled(tmp_path, attempt=number)
        own.disks = [sampler.SHM]
        told.append([notice.cause for notice in own.sample() + own.sample()])
    assert told == [["shm_full"], ["shm_full"]]
    paths = samples.list_sample_files(tmp_path / "outputs")[0]
    assert [path.name for path in paths] == ["node_00_metrics.jsonl", "node_00_metrics_2.jsonl"]
    assert len(samples.read_last_samples(paths[1], 9)) == 2


def test_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    causes = Causes()
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
def test_cause_is_reported_once(sample: dict[str, Any], words: str | None) -> None:
    assert told(sample) == ([words] if words else [])


def test_spike_is_not_reported() -> None:
    causes = Causes()
    for mask in [0x40] * (IN_A_ROW - 1) + [0] + [0x40] * (IN_A_ROW - 1):
        assert causes.judge({"gpu": {"throttle": [mask]}}) == []
    assert causes.judge({"gpu": {"throttle": [0x40]}})


# -- the kernel's counters, in its own format --------------------------------------------------

STAT = "cpu  {user} 0 50 {idle} 10 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n"
NET = """Inter-|   Receive                    |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets
    lo: 5000 1 0 0 0 0 0 0 5000 1 0 0 0 0 0 0
  eth0: {came} 1 0 0 0 0 0 0 {went} 1 0 0 0 0 0 0
"""
DISKS = """   8  0 sda 1 0 {read} 0 1 0 {written} 0 0 0 0
   8  1 sda1 1 0 {read} 0 1 0 {written} 0 0 0 0
   7  0 loop0 1 0 999 0 1 0 999 0 0 0 0
"""
MEMORY = "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 100 kB\nSwapFree: 60 kB\n"


def write(root: Path, *, user: int, idle: int, came: int, went: int, sectors: int) -> None:
    for name, text in {
        "proc/stat": STAT.format(user=user, idle=idle),
        "proc/net/dev": NET.format(came=came, went=went),
        "proc/diskstats": DISKS.format(read=sectors, written=2 * sectors),
        "proc/meminfo": MEMORY,
        "proc/loadavg": "1.5 1 1 1/100 1\n",
        "proc/vmstat": f"nr_free 1\npswpin {sectors}\npswpout 0\n",
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": str(came),
        "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": str(went),
        "sys/block/sda/device/x": "",
        "sys/class/net/eth0/device/x": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_counters_become_shares_and_rates(tmp_path: Path) -> None:
    write(tmp_path, user=100, idle=840, came=1000, went=2000, sectors=10)
    watched = sampler.Counters(str(tmp_path))
    assert "cpu" not in watched.sample(), "a rate needs two looks"
    write(tmp_path, user=175, idle=865, came=3000, went=2000, sectors=30)
    before, now = watched.before, watched.counters()
    sample = {**watched.levels(), **sampler.counter_rates(before, now, 2.0)}
    assert sample == {
        "load": 1.5,
        "memory_bytes": 600 * 1024,
        "swap_bytes": 40 * 1024,
        "cpu": 0.75,
        "iowait": 0.0,
        "swap_per_s": 10 * sampler.PAGE,
        "disk_read_per_s": 10 * 512,  # not the partition, and not the loop device
        "disk_write_per_s": 20 * 512,
        "net": {"eth0": [1000, 0], "mlx5_0/1": [4000, 0]},  # not lo; RDMA counts words
    }


def test_reset_counter_gives_no_rate() -> None:
    before, now = {"net eth0": (1000, 5)}, {"net eth0": (10, 5), "net eth1": (7, 7)}
    assert sampler.counter_rates(before, now, 1.0)["net"] == {}


def test_real_machine_is_sampled() -> None:
    known, watched = sampler.constant_facts(), sampler.Counters()
    sample = wait_until(lambda: (known := watched.sample()) and "cpu" in known and known)
    assert 0 <= sample["cpu"] <= 1
    assert 0 < sample["memory_bytes"] < known["memory_bytes"]
