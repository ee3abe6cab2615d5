"""What a machine does, from files in the kernel's own format."""

from __future__ import annotations

from pathlib import Path

from orchestrator.node.machine.sampling import counters as machine
from orchestrator.node.machine.sampling.counters import PAGE, Machine, rates
from tests.node.running import wait_until

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
    watched = Machine(str(tmp_path))
    assert "cpu" not in watched.sample(), "a rate needs two looks"
    write(tmp_path, user=175, idle=865, came=3000, went=2000, sectors=30)
    before, now = watched.before, watched.counters()
    sample = {**watched.levels(), **rates(before, now, 2.0)}
    assert sample == {
        "load": 1.5,
        "memory_bytes": 600 * 1024,
        "swap_bytes": 40 * 1024,
        "cpu": 0.75,
        "iowait": 0.0,
        "swap_per_s": 10 * PAGE,
        "disk_read_per_s": 10 * 512,  # not the partition, and not the loop device
        "disk_write_per_s": 20 * 512,
        "net": {"eth0": [1000, 0], "mlx5_0/1": [4000, 0]},  # not lo; RDMA counts words
    }


def test_a_counter_that_was_reset_is_no_rate() -> None:
    before, now = {"net eth0": (1000, 5)}, {"net eth0": (10, 5), "net eth1": (7, 7)}
    assert rates(before, now, 1.0)["net"] == {}


def test_the_machine_itself() -> None:
    known, watched = machine.about(), Machine()
    sample = wait_until(lambda: (known := watched.sample()) and "cpu" in known and known)
    assert 0 <= sample["cpu"] <= 1
    assert 0 < sample["memory_bytes"] < known["memory_bytes"]
