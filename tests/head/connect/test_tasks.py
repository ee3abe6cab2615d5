"""Tasks: more than there are threads, each waiting for others, for time and for what is sent."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect import fleet, tasks
from orchestrator.head.connect.tasks import Carrier, Socket, Threads

MANY = 300
MOST = 3


def all_of(threads: Threads, works: list[Callable[[], object]]) -> None:
    begun = [threads.start(work) for work in works]
    for task in begun:
        assert task.join(30.0)


def test_each_task_waits_for_the_next_one() -> None:
    """In a pool of threads the first ones would wait for those that never begin."""
    events = [tasks.Event() for _ in range(MANY + 1)]

    def go(number: int) -> None:
        assert events[number + 1].wait(30.0)
        events[number].set()

    threads = Threads(MOST)
    begun = [threads.start(partial(go, number)) for number in range(MANY)]
    events[MANY].set()
    assert all(task.join(30.0) for task in begun) and events[0].is_set()
    assert len(threads.carriers) == MOST and not any(each.load for each in threads.carriers)


def test_a_task_goes_beside_another_one() -> None:
    """Even where that has ended; its thread is then not idle any more."""
    threads = Threads(MOST)
    where: list[int | None] = []

    def note() -> None:
        where.append(threading.get_ident())

    together = threading.Barrier(MOST)
    first = [threads.start(together.wait) for _ in range(MOST)]
    assert all(task.join(30.0) for task in first)
    carriers = [cast("Carrier", task.carrier).ident for task in first]
    assert len(set(carriers)) == MOST
    for task in first:
        assert task.start_beside(note).join(30.0)
    assert where == carriers
    held = threading.Event()
    blocking = first[1].start_beside(held.wait)
    for _ in range(2 * MOST):
        assert threads.start(note).join(30.0), "it waits behind one that blocks its thread"
    held.set()
    assert blocking.join(30.0)


def test_time_passes_for_all_tasks_at_once() -> None:
    began = time.monotonic()
    late = tasks.Event()
    given_up = []
    works: list[Callable[[], object]] = [partial(tasks.sleep, 0.3)] * MANY
    works += [lambda: given_up.append(late.wait(0.2))] * MANY
    all_of(Threads(MOST), works)
    assert given_up == [False] * MANY
    assert time.monotonic() - began < 0.3 * MANY / MOST / 4


def test_one_task_at_a_time_holds_a_lock_while_it_waits() -> None:
    lock, inside, most = tasks.Lock(), [], []

    def go() -> None:
        with lock, lock:
            inside.append(1)
            most.append(len(inside))
            tasks.sleep(0.001)
            inside.pop()

    all_of(Threads(MOST), [go] * 10)
    assert most == [1] * 10


def test_a_task_and_a_thread_hand_each_other_what_they_wait_for() -> None:
    there, back = tasks.Queue[int](), tasks.Queue[int]()

    def go() -> None:
        while number := there.get():
            back.put(number + 1)

    task = Threads(MOST).start(go)
    for number in range(1, 100):
        there.put(number)
        assert back.get() == number + 1
    there.put(0)
    assert task.join(30.0)


@pytest.mark.parametrize("in_a_task", [True, False])
def test_a_socket_waits_for_what_comes_and_for_room(*, in_a_task: bool) -> None:
    """More than its buffers hold, both ways; then nothing comes within its limit, then the end."""
    said: list[bytes | str] = []
    one, other = socket.socketpair()
    ours = Socket.of(one)
    size = 1 << 22

    def go() -> None:
        ours.settimeout(30.0)
        ours.sendall(bytes(size))
        said.append(ours.recv(100))
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError):
            ours.recv(100)
        said.append("nothing came")
        other.close()
        ours.settimeout(None)
        said.append(ours.recv(100))

    def read() -> None:
        left = size
        while left:
            left -= len(other.recv(1 << 16))
        other.sendall(b"all here")

    threading.Thread(target=read, daemon=True).start()
    if in_a_task:
        all_of(Threads(1), [go])
    else:
        go()
    assert said == [b"all here", "nothing came", b""]


def test_tasks_of_one_thread_wait_for_sockets_side_by_side() -> None:
    pairs = [Socket.pair() for _ in range(50)]
    got = []

    def go(number: int) -> None:
        got.append(pairs[number][0].recv(100))
        if number + 1 < len(pairs):
            pairs[number + 1][1].sendall(b"%d" % (number + 1))

    threads = Threads(1)
    begun = [threads.start(partial(go, number)) for number in range(len(pairs))]
    pairs[0][1].sendall(b"0")
    assert all(task.join(30.0) for task in begun)
    assert got == [b"%d" % number for number in range(len(pairs))]


def test_what_blocks_otherwise_holds_up_its_own_thread_alone() -> None:
    blocked = threading.Event()
    threads = Threads(MOST)
    threads.start(blocked.wait)
    begun = [threads.start(lambda: None) for _ in range(MOST - 1)]
    try:
        assert all(task.join(30.0) for task in begun)
    finally:
        blocked.set()


def test_no_more_threads_than_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a login may have few processes the threads that run have to do."""
    threads, start = Threads(MOST), Carrier.start

    def only_one(carrier: Carrier) -> None:
        if threads.carriers:
            raise RuntimeError("can't start new thread")
        start(carrier)

    monkeypatch.setattr(Carrier, "start", only_one)
    before = len(list(Path("/proc/self/fd").iterdir()))
    all_of(threads, [partial(tasks.sleep, 0.01)] * MANY)
    assert len(threads.carriers) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2  # the thread's own


def test_a_defect_in_a_task_is_said_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(args.exc_type))
    threads = Threads(1)
    all_of(threads, [lambda: 1 // 0, lambda: None])
    assert said == [ZeroDivisionError]


def test_alarms_of_waits_that_have_ended_are_dropped() -> None:
    """A stream of lines sets one for each, of up to a minute."""
    event, threads = tasks.Event(), Threads(1)
    event.set()
    one, other = Socket.pair()

    def go() -> None:
        for _ in range(3 * tasks.STALE):
            waiting = threads.start(lambda: other.sendall(b"x"))
            one.settimeout(60.0)
            assert one.recv(1) == b"x"
            waiting.join()

    all_of(threads, [go])
    assert len(threads.carriers[0].alarms) <= tasks.STALE + 1


def test_work_for_a_fleet_has_few_threads_and_its_results_in_order() -> None:
    before = threading.active_count()
    highest = []

    def work(number: int) -> int:
        tasks.sleep(0.05)
        highest.append(threading.active_count())
        return sum(fleet.everywhere([number, 1], lambda inner: inner))  # type: ignore[arg-type]

    assert fleet.everywhere(range(512), work) == [number + 1 for number in range(512)]
    assert max(highest) - before <= tasks.WORK.most


WITHOUT = """
import sys
sys.modules["greenlet"] = None
from orchestrator.common.errors import CheckFailed
from orchestrator.head.connect import fleet, tasks
one, other = tasks.Event(), tasks.Event()
def work(number):
    if number:
        one.set()
        return other.wait(30)
    other.set()
    return one.wait(30)
print(fleet.everywhere([0, 1, 1], work))
"""


def test_without_greenlet_each_task_has_a_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True, True]"


def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    code = """
import os
from orchestrator.head.connect import fleet
assert fleet.everywhere([1, 2], lambda number: number) == [1, 2]
child = os.fork()
assert fleet.everywhere([3, 4], lambda number: number) == [3, 4]
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_task_says_whether_it_is_over() -> None:
    event = tasks.Event()
    task = Threads(1).start(event.wait)
    assert not task.join(0.01)
    event.set()
    assert task.join(30.0)


def test_what_blocks_has_so_many_threads_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no place in time is told so, and a place that is free again is taken."""
    monkeypatch.setattr(tasks, "APART", tasks.Room(MOST))
    gate = threading.Event()
    inside: list[int] = []
    results: list[int] = []

    def block() -> int:
        inside.append(1)
        gate.wait(30.0)
        return 1

    def ask(seconds: float) -> None:
        try:
            results.append(tasks.aside(block, seconds))
        except TimeoutError:
            results.append(0)

    all_of(Threads(2), [partial(ask, 0.2)] * MANY)  # none ends, and each has its time limit
    assert results == [0] * MANY and len(inside) == MOST
    threads = Threads(2)
    patient = [threads.start(partial(ask, 30.0)) for _ in range(MANY)]
    gate.set()
    assert all(task.join(30.0) for task in patient)
    assert results[MANY:] == [1] * MANY and len(inside) == MOST + MANY


def test_a_thread_that_cannot_begin_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "APART", tasks.Room(1))

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Refused)
        with pytest.raises(RuntimeError):
            tasks.aside(int, 1.0)
    assert tasks.aside(lambda: 7, 1.0) == 7


def test_no_task_goes_on_while_the_process_ends() -> None:
    """OpenSSL frees then what a task encrypts with, and the process would be aborted."""
    code = """
import atexit, time
turns = []
def look():
    before = len(turns)
    time.sleep(0.05)
    print(before, len(turns) - before)
atexit.register(look)  # it is called after those that are registered later
from orchestrator.head.connect import tasks
def work():
    while True:
        turns.append(0)
        tasks.sleep(0.0001)
for threads in (tasks.WORK, tasks.STREAMS):
    threads.start(work)
    threads.start(work)
while len(turns) < 100:
    time.sleep(0.001)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=True, timeout=60, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before >= 100 and after == 0


def test_on_a_machine_that_is_no_linux_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "epoll")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CheckFailed, match="reached from Linux, and this machine is darwin"):
        fleet.everywhere(["gpu01"], str)
