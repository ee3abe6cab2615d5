"""A pool as a Python program uses it: this process is the program."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator import Cluster, JobFailed, RanksLost
from orchestrator.api import pool as pools
from orchestrator.common.errors import NodeError, OrchestratorError, UsageError
from tests.clusters.netns import NetnsCluster
from tests.launching import PATIENCE, Head, interrupt_when


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Nodes cannot import this module; what is defined here travels whole."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def cluster_of(head: Head, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.chdir(head.directory)
    return Cluster(head.node_list, ssh_config=head.cluster.ssh_config)


@pytest.fixture
def cluster(head: Head, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return cluster_of(head, monkeypatch)


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def fail(self) -> None:
        raise Own("no", 3)


class Own(LookupError):
    """An exception that no node can import."""


class Mute(Exception):
    """Says nothing: its own code fails."""

    def __str__(self) -> str:
        raise ValueError


class OnNodes:
    """Comes out of a pickle nowhere but on nodes."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.readlink, (Path("/proc/self/no_link"),)


class Counted:
    """Counts its pickles here."""

    pickles = 0

    def __getstate__(self) -> None:
        Counted.pickles += 1


class Apart(BaseException):
    """Is no Exception, like what pytest.fail raises."""


class Picky(Exception):
    """Comes out of no pickle: it wants two arguments and keeps one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def rank() -> int:
    return int(os.environ["RANK"])


def memory() -> int:
    """Return the kB that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_calls_of_all_kinds(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One pool for all of them: each leaves it fit for the next."""
    with cluster.pool(nproc=2) as pool:
        assert pool.size == 4 and repr(pool) == f"<Pool {pool.job.name}: 4 ranks>"
        assert pool.run(lambda x: (rank(), x), x="é") == [(number, "é") for number in range(4)]
        objects(pool)
        torch_groups(pool)
        exceptions(pool)
        debugger(pool, monkeypatch, capfd)
        interrupts(pool)
        interrupts_while_it_sends(pool, monkeypatch)
        assert pool.map(lambda x: (x, rank()), []) == []
        dealt = pool.map(lambda x: (x * x, rank()), range(40))
        assert [square for square, _ in dealt] == [x * x for x in range(40)]
        assert len({number for _, number in dealt}) > 1
        large_one, seen = Counted(), list[int]()
        inputs = range(12)
        assert pool.map(lambda x: (seen.append(x), large_one, len(seen))[2], inputs) == [1] * 12
        assert Counted.pickles == 1
        large = b"x" * (3 * pools.frames.CALL_CHUNK_BYTES + 1)
        assert pool.run(lambda data: data + bytes([rank()]), large) == [
            large + bytes([number]) for number in range(4)
        ]
    assert pool.job.status == "done"
    with pytest.raises(UsageError, match="the pool is closed"):
        pool.run(rank)


def objects(pool: pools.Pool) -> None:
    counter = pool.create(Counter, start=5)
    other = pool.create(Counter, 0)
    assert counter.add(1) == [6] * 4 and counter.add(number=2) == [8] * 4
    assert other.add(1) == [1] * 4
    other.delete()
    other.delete()
    with pytest.raises(UsageError, match="Counter was deleted"):
        other.add(1)
    assert counter.add(0) == [8] * 4
    with pytest.raises(Own) as raised:
        counter.fail()
    assert raised.value.args == ("no", 3)
    with pytest.raises(AttributeError, match="no_such"):
        counter.no_such()


def torch_groups(pool: pools.Pool) -> None:
    def begin() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    def total() -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor)
        return tensor.item()

    pool.run(begin)
    assert pool.run(total) == pool.run(total) == [6.0] * 4


def exceptions(pool: pools.Pool) -> None:
    def odd() -> str:
        if rank() == 1:
            raise ValueError("odd")
        time.sleep(600)  # the others are interrupted
        return "even"

    def picky() -> None:
        raise Picky("no", "way")

    def mute() -> None:
        raise Mute

    def apart() -> None:
        raise Apart

    with pytest.raises(ValueError, match="odd") as raised:
        pool.run(odd)
    cause = str(raised.value.__cause__)
    assert "rank 1:\nTraceback" in cause and "in odd" in cause and "calls/serve.py" not in cause
    with pytest.raises(JobFailed, match="Picky: no way"):
        pool.run(picky)
    with pytest.raises(Mute):
        pool.run(mute)
    with pytest.raises(Apart):
        pool.run(apart)
    with pytest.raises(JobFailed, match=r"rank \d: SystemExit: no data"):  # no rank is lost by it
        pool.run(lambda: sys.exit("no data"))
    with pytest.raises(JobFailed, match=r"rank \d cannot be read here: FileNotFoundError"):
        pool.run(OnNodes)
    with pytest.raises(TypeError, match=r"cannot be sent back: .*\(a generator; return numbers"):
        pool.run(lambda: (x for x in "ab"))
    with pytest.raises(UsageError, match="cannot be sent to the nodes"):
        pool.run(lambda lock: None, threading.Lock())
    with pytest.raises(ZeroDivisionError) as divided:
        pool.map(lambda x: 1 / x, [4, 2, 0, 1])
    assert ", input 2:\nTraceback" in str(divided.value.__cause__)
    with pytest.raises(JobFailed, match="input 0: Picky: no way"):
        pool.map(lambda _: picky(), [5])
    with pytest.raises(ValueError, match="odd"):
        pool.map(lambda x: odd() if rank() == 1 else x, range(8))
    assert pool.run(rank) == [0, 1, 2, 3]


def debugger(
    pool: pools.Pool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stops() -> int:
        answer = 40
        if rank() == 3:
            breakpoint()
        return answer + 2

    monkeypatch.setattr(sys, "stdin", io.StringIO("p answer * 7\nc\n"))
    assert pool.run(stops) == [42] * 4
    shown = capfd.readouterr().out
    assert "\n(Pdb rank 3) 280\n(Pdb rank 3) " in shown
    assert "-> return answer + 2" in shown or "-> breakpoint()" in shown  # from Python 3.13 on


def interrupts(pool: pools.Pool) -> None:
    def stuck(directory: Path) -> None:
        (directory / f"stuck_{rank()}").touch()
        time.sleep(600)

    def all_are() -> bool:
        return all((here / f"stuck_{number}").exists() for number in range(4))

    here = Path.cwd()  # which the nodes share
    with pytest.raises(KeyboardInterrupt):
        interrupt_when(all_are)
        pool.run(stuck, here)
    assert pool.run(rank) == [0, 1, 2, 3]


def interrupts_while_it_sends(pool: pools.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first bytes of a call, in the midst of it, and at its end."""
    write = os.write

    def pressed_at(byte: int) -> Callable[[int, memoryview], int]:
        written = 0

        def interrupted(fd: int, data: memoryview) -> int:
            nonlocal written
            before, sent = written, write(fd, data)
            written += sent
            if before < byte <= written:
                os.kill(os.getpid(), signal.SIGINT)
            return sent

        return interrupted

    large = bytes(2 * pools.frames.CALL_CHUNK_BYTES)
    for byte in (1, pools.frames.CALL_CHUNK_BYTES, len(large)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "write", pressed_at(byte))
            pool.run(len, large)
        assert pool.run(rank) == [0, 1, 2, 3]


def test_a_call_that_does_not_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one says so after a while; close() kills it."""

    def deaf(begun: Path) -> None:
        while rank() == 0:
            if begun.exists():
                raise ValueError
            time.sleep(0.01)
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                begun.touch()
                time.sleep(600)

    monkeypatch.setattr(pools, "SETTLE_SECONDS", 0.3)
    pool = cluster.pool(nnodes=1, nproc=2)
    with pytest.raises(ValueError):
        pool.run(deaf, Path.cwd() / "begun")  # which the nodes share
    with pytest.raises(OrchestratorError, match="still runs in rank 1"):
        pool.run(rank)
    pool.close()
    assert pool.job.status == "stopped"


def test_a_pool_that_is_closed_while_a_thread_calls_it(cluster: Cluster, tmp_path: Path) -> None:
    """As after Ctrl-C in the main thread: its `with` block must not wait for ever."""

    def stuck(x: int) -> None:
        (tmp_path / "begun").touch()
        time.sleep(600)

    pool = cluster.pool(nnodes=1, nproc=2)
    ended: list[BaseException] = []

    def call() -> None:
        try:
            pool.map(stuck, range(2))  # which would start again what was lost
        except BaseException as error:  # noqa: BLE001  it is looked at below
            ended.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists():  # which the nodes share
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(KeyboardInterrupt), pool:
        raise KeyboardInterrupt
    thread.join(PATIENCE)
    assert [type(error) for error in ended] == [pools.RanksLost]
    assert pool.job.status == "stopped" and "closed" in repr(pool)


def test_ranks_that_are_lost(cluster: Cluster, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def once(x: int) -> tuple[int, int]:
        """Kill this rank at the first visit of number 3."""
        with (marks / f"visit_{x}").open("a") as file:
            file.write("x")
        if x == 3 and len((marks / "visit_3").read_text()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x, os.getpid()

    def always(x: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with cluster, cluster.pool(nnodes=1, nproc=2) as pool:
        counter = pool.create(Counter, 0)
        first = pool.job
        assert [x for x, _ in pool.map(once, range(6))] == list(range(6))
        assert pool.job is not first and first.status == "failed"
        visits = {x: len((marks / f"visit_{x}").read_text()) for x in range(6)}
        assert visits[3] == 2 and sum(visits.values()) <= 8  # what had a result was not repeated
        with pytest.raises(RanksLost, match="Counter was lost"):
            counter.add(1)
        with pytest.raises(RanksLost, match=r"SIGKILL") as raised:
            pool.run(always, 1)
        assert raised.value.verdict is None or "SIGKILL" in str(raised.value)
        with pytest.raises(UsageError, match="the pool is closed"):
            pool.run(rank)


def test_a_pool_that_is_stopped(cluster: Cluster, head: Head) -> None:
    pool = cluster.pool(nnodes=1)
    assert pool.job.stop(now=True)
    with pytest.raises(RanksLost, match="stopped"):
        pool.run(rank)
    assert head.nothing_left()


PROGRAM = """
import os, sys, threading, time
from orchestrator import Cluster
pool = Cluster(sys.argv[1], ssh_config=sys.argv[2]).pool(nnodes=1, nproc=2)
print("open", flush=True)
marks = sys.argv[3:]
def long(marks):
    open(marks[int(os.environ["RANK"])], "w").close()
    time.sleep(3600)
if marks:
    threading.Thread(target=pool.run, args=(long, marks), daemon=True).start()
while not all(map(os.path.exists, marks)):
    time.sleep(0.01)
if os.fork():
    os.wait3(os.WUNTRACED)
    os.kill(os.getpid(), 9)
try:
    pool.close()  # leaves the ranks alone
    pool.run(abs, 1)
except Exception as error:
    print(os.getpid(), error, flush=True)
os.closerange(1, 3)
os.kill(os.getpid(), 19)
"""


@pytest.mark.parametrize("calls", [0, 2], ids=["idle", "in a call"])
def test_a_program_that_is_killed_leaves_no_ranks(
    cluster: Cluster, head: Head, tmp_path: Path, calls: int
) -> None:
    """Also where a process that it forked lives on."""
    words = [str(head.node_list), str(head.cluster.ssh_config)]
    words += [str(tmp_path / f"called_{number}") for number in range(calls)]  # the nodes share it
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=head.directory,
        check=False,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    fork = re.match(rb"open\n(\d+) the pool is that of process", done.stdout)
    assert fork, done
    try:
        assert cluster.attach().wait(timeout=PATIENCE) == 0
        assert head.nothing_left()
    finally:
        os.kill(int(fork[1]), signal.SIGKILL)


def test_map_goes_on_without_a_node_that_is_lost(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(netns_cluster(3), tmp_path)
    cluster = cluster_of(head, monkeypatch).with_options(node_loss_timeout=3, connect_timeout=3)
    cut = tmp_path / "cut"

    def wait_for_the_cut(x: int) -> int:
        deadline = time.monotonic() + PATIENCE
        (tmp_path / f"came_{rank()}").touch()
        while not cut.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return x

    def cut_when_all_are_there() -> None:
        deadline = time.monotonic() + PATIENCE
        while not all((tmp_path / f"came_{number}").exists() for number in range(3)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert isinstance(head.cluster, NetnsCluster)
        head.cluster.cut(1)
        cut.touch()

    with cluster.pool() as pool:
        threading.Thread(target=cut_when_all_are_there, daemon=True).start()
        assert pool.map(wait_for_the_cut, range(30)) == list(range(30))
        assert pool.size == 2
    head.cluster.restore(1)


def test_ten_thousand_calls_leave_no_trace(cluster: Cluster) -> None:
    with cluster.pool() as pool:
        counter = pool.create(Counter, 0)
        for _ in range(500):
            counter.add(1)
        before = pool.run(memory)
        here = memory()
        for _ in range(9_500):
            counter.add(1)
        assert counter.add(0) == [10_000] * 2
        for first, then in zip([*before, here], [*pool.run(memory), memory()], strict=True):
            assert then - first < 1000, "kB"


def test_no_node_no_pool(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("127.0.0.1:1\n")
    with pytest.raises(NodeError, match="cannot be used"):
        Cluster(tmp_path / "other.txt", connect_timeout=3).pool()
