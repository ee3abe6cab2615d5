"""Many tasks in few threads: one that waits here lets others of its thread go on.

Hundreds of connections would need a thousand threads, which only wait. greenlet switches between
tasks without one of them knowing. Locks, events and sockets of this module also serve threads that
carry no tasks; paramiko has them, too. Whatever else blocks holds up the tasks of its thread alone.
Without greenlet, which needs a compiled part, each task has a thread of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import heapq
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from orchestrator.common.errors import no_linux

STALE = 1000  # alarms of waits that have ended, before they are looked for
PAUSE_SECONDS = 0.001  # between two looks at a lock that is held, at first
LONGEST_PAUSE_SECONDS = 0.01
STILL_SECONDS = 1.0  # for threads to stand still at the end of the process

T = TypeVar("T")

here = threading.local()  # .carrier: that of a thread that carries tasks


@functools.cache
def switching() -> Any:
    """Return greenlet, or nothing where it is missing."""
    try:
        import greenlet  # type: ignore[import-untyped]
    except ImportError:
        return None
    return greenlet


def current() -> object:
    """Return what tells this task, or this thread, from all others."""
    carrier: Carrier | None = getattr(here, "carrier", None)
    return threading.get_ident() if carrier is None else carrier.current()


# -- threads ----------------------------------------------------------------------------------


class Place:
    """Where a task or a thread waits, once, until it is woken."""

    __slots__ = ("carrier", "lock", "over", "task")

    def __init__(self) -> None:
        self.carrier: Carrier | None = getattr(here, "carrier", None)
        self.over = False
        if self.carrier is None:
            self.lock = threading.Lock()
            self.lock.acquire()
        else:
            self.task = self.carrier.current()

    def wake(self) -> None:
        """End the wait, from any thread; to be called once."""
        if self.carrier is None:
            self.lock.release()
        else:
            self.carrier.soon(functools.partial(self.resume, True))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is woken; False if that took longer."""
        if self.carrier is None:
            return self.lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds))
        if seconds is not None:
            self.carrier.alarm(seconds, self)
        woken: bool = self.carrier.main.switch()
        return woken

    def resume(self, woken: bool) -> None:
        """Go on with the task, in its thread, where nothing else has ended the wait."""
        if not self.over:
            self.over = True
            self.task.switch(woken)


class Carrier(threading.Thread):
    """A thread that carries tasks: it goes on with those whose wait is over."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="tasks")
        self.load = 0  # tasks that have not ended
        self.ready: deque[Callable[[], None]] = deque()
        self.alarms: list[tuple[float, int, Place]] = []
        self.most_alarms = STALE
        self.count = itertools.count()
        self.files: dict[int, list[tuple[Place, int]]] = {}
        self.poll = select.epoll()  # closes itself where there is no room for the other one
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poll.register(self.bell, select.EPOLLIN)
        self.asleep = False

    def soon(self, call: Callable[[], None]) -> None:
        """Have the thread call this; from any thread."""
        self.ready.append(call)
        if self.asleep:
            os.eventfd_write(self.bell, 1)

    def begin(self, work: Callable[[], None]) -> None:
        switching().greenlet(work, self.main).switch()

    def alarm(self, seconds: float, place: Place) -> None:
        """Resume a wait after so many seconds."""
        if len(self.alarms) > self.most_alarms:
            self.alarms = [each for each in self.alarms if not each[2].over]
            heapq.heapify(self.alarms)
            self.most_alarms = STALE + 2 * len(self.alarms)
        heapq.heappush(self.alarms, (time.monotonic() + seconds, next(self.count), place))

    def watch(self, file: int, event: int, place: Place) -> None:
        """Resume a wait once a file is ready, or is closed at its other end."""
        waits = [(each, wanted) for each, wanted in self.files.get(file, ()) if not each.over]
        self.files[file] = [*waits, (place, event)]
        mask = functools.reduce(int.__or__, (wanted for _, wanted in waits), event)
        try:
            self.poll.modify(file, mask | select.EPOLLONESHOT)
        except FileNotFoundError:
            self.poll.register(file, mask | select.EPOLLONESHOT)

    def run(self) -> None:
        here.carrier = self
        self.current = switching().getcurrent
        self.main = self.current()
        while True:
            self.turn()

    def turn(self) -> None:
        """Go on with all that can go on now; wait where nothing can."""
        for _ in range(len(self.ready)):
            self.ready.popleft()()
        now = time.monotonic()
        while self.alarms and self.alarms[0][0] <= now:
            heapq.heappop(self.alarms)[2].resume(False)
        self.asleep = True  # whoever adds something now rings
        wait = max(0.0, self.alarms[0][0] - time.monotonic()) if self.alarms else None
        ready = self.poll.poll(0 if self.ready else wait)
        self.asleep = False
        for file, _ in ready:
            if file == self.bell:
                os.eventfd_read(self.bell)
            for place, _ in self.files.pop(file, ()):
                place.resume(True)


class Threads:
    """At most so many threads, among which tasks are divided: up to so many have one each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.begin_anew()
        os.register_at_fork(after_in_child=self.begin_anew)
        atexit.register(self.stand_still)

    def begin_anew(self) -> None:
        """Know no thread: those of the process that forked this one are not here."""
        self.carriers: deque[Carrier] = deque()  # whose turn it is comes first
        self.idle: list[Carrier] = []
        self.changing = threading.Lock()

    def stand_still(self) -> None:
        """Carry no task any further: libraries of C are about to free what these use.

        OpenSSL does so as a process ends, also while another thread encrypts.
        """
        threads = [
            carrier for carrier in self.carriers if carrier is not threading.current_thread()
        ]
        still = threading.Semaphore(0)

        def stand() -> None:
            still.release()
            never = threading.Lock()
            never.acquire()
            never.acquire()

        for carrier in threads:
            carrier.soon(stand)
        deadline = time.monotonic() + STILL_SECONDS
        for _ in threads:
            still.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def start(self, work: Callable[[], object], beside: Task | None = None) -> Task:
        """Begin a task, in the thread of another one or where there is room."""
        if not hasattr(select, "epoll"):
            raise no_linux()
        task = Task(work, self)
        if switching() is None:
            threading.Thread(target=task.run, daemon=True).start()
            return task
        with self.changing:
            carrier = task.carrier = (beside and beside.carrier) or self.next()
            carrier.load += 1
            if carrier in self.idle:
                self.idle.remove(carrier)
        carrier.soon(lambda: carrier.begin(lambda: self.carry(carrier, task)))
        return task

    def next(self) -> Carrier:
        """Return the thread for another task: one without any, or the one whose turn it is."""
        if self.idle:
            return self.idle[-1]
        if len(self.carriers) < self.most:
            self.add_one()
        carrier = self.carriers[0]
        self.carriers.rotate(-1)
        return carrier

    def add_one(self) -> None:
        """Start a thread; where no more may be started, those that run have to do."""
        carrier = None
        try:
            carrier = Carrier()
            carrier.start()
        except (RuntimeError, OSError):  # no more threads, or files
            if carrier is not None:
                carrier.poll.close()
                os.close(carrier.bell)
            if not self.carriers:
                raise
        else:
            self.carriers.appendleft(carrier)

    def carry(self, carrier: Carrier, task: Task) -> None:
        task.run()
        with self.changing:
            carrier.load -= 1
            if not carrier.load:
                self.idle.append(carrier)


class Task:
    """A piece of work on its way."""

    __slots__ = ("carrier", "over", "threads", "work")

    def __init__(self, work: Callable[[], object], threads: Threads | None = None) -> None:
        self.work, self.threads = work, threads
        self.carrier: Carrier | None = None  # the thread that carries it
        self.over = Event()

    def run(self) -> None:
        try:
            self.work()
        except BaseException:  # noqa: BLE001  a defect, said as for any thread
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))
        finally:
            self.over.set()

    def start_beside(self, work: Callable[[], object]) -> Task:
        """Begin another task in the thread of this one, which wakes it: that costs less there."""
        return (self.threads or WORK).start(work, beside=self)

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it is over; False if that took longer."""
        return self.over.wait(seconds)


WORK = Threads(32)  # what is done for nodes: here it may block for a moment
STREAMS = Threads(4)  # what reads connections: nothing here may block otherwise


def sleep(seconds: float) -> None:
    Place().wait(seconds)


def aside(call: Callable[[], T], seconds: float) -> T:
    """Have a thread apart do what blocks otherwise, while other tasks go on.

    TimeoutError if it takes longer, with its wait for one of so many threads; the thread ends
    whenever it does.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)
        finally:
            APART.leave()

    deadline = time.monotonic() + seconds
    if not APART.enter(seconds):
        raise TimeoutError("timed out")
    task = Task(run)
    try:
        threading.Thread(target=task.run, daemon=True).start()
    except BaseException:
        APART.leave()
        raise
    if not task.join(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("timed out")
    for error in errors:
        raise error
    return results[0]


# -- locks and events ---------------------------------------------------------------------------


class Lock:
    """A lock that one task or thread holds, and which it may take again."""

    __slots__ = ("depth", "lock", "owner")  # each node has some

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: object = None
        self.depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = current()
        if self.owner == me:
            self.depth += 1
            return True
        if isinstance(me, int) or not blocking:
            taken = self.lock.acquire(blocking, timeout)
        else:
            # Held by a task that waits, or for an instant by another thread.
            pause = PAUSE_SECONDS
            while not (taken := self.lock.acquire(blocking=False)):
                sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        if taken:
            self.owner, self.depth = me, 1
        return taken

    def release(self) -> None:
        self.depth -= 1
        if not self.depth:
            self.owner = None
            self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    __slots__ = ("lock", "waits")

    def __init__(self, lock: Lock | None = None) -> None:
        self.lock = lock or Lock()
        self.waits: list[Place] = []  # an empty deque has 700 bytes, and each node some of them

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self.lock.acquire(blocking, timeout)

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        place = Place()
        self.waits.append(place)
        self.release()
        try:
            return place.wait(timeout)
        finally:
            self.acquire()
            with contextlib.suppress(ValueError):  # it was woken
                self.waits.remove(place)

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self.waits))):
            self.waits.pop(0).wake()

    def notify_all(self) -> None:
        self.notify(len(self.waits))


class Room:
    """Lets so many in at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.begin_anew()
        os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        self.changed, self.left = Condition(), self.most

    def enter(self, seconds: float) -> bool:
        """Wait for a place; False if that takes longer."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not self.left:
                wait = deadline - time.monotonic()
                if wait <= 0:
                    return False
                self.changed.wait(wait)
            self.left -= 1
        return True

    def leave(self) -> None:
        with self.changed:
            self.left += 1
            self.changed.notify()


APART = Room(256)  # threads of `aside`


class Event:
    __slots__ = ("changed", "flag")

    def __init__(self) -> None:
        self.changed = Condition()
        self.flag = False

    def is_set(self) -> bool:
        return self.flag

    def set(self) -> None:
        with self.changed:
            self.flag = True
            self.changed.notify_all()

    def clear(self) -> None:
        self.flag = False

    def wait(self, timeout: float | None = None) -> bool:
        with self.changed:
            if not self.flag:
                self.changed.wait(timeout)
            return self.flag


class Queue(Generic[T]):
    def __init__(self) -> None:
        self.changed = Condition()
        self.items: deque[T] = deque()

    def put(self, item: T) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def get(self) -> T:
        with self.changed:
            while not self.items:
                self.changed.wait()
            return self.items.popleft()


class Timer:
    """A timer that never goes off: paramiko has a thread for each, and we have our own limits."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        pass

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        pass


# -- files --------------------------------------------------------------------------------------


def ready(file: int, event: int, seconds: float | None) -> bool:
    """Wait until a file is ready, or is closed at its other end; False if that takes longer."""
    place = Place()
    if place.carrier is None:
        poll = select.poll()
        poll.register(file, event)
        return bool(poll.poll(None if seconds is None else max(0.0, seconds * 1000)))
    place.carrier.watch(file, event, place)
    return place.wait(seconds)


class Socket(socket.socket):
    """A socket whose waits are those of a task, with one time limit for each call."""

    limit: float | None = None

    @classmethod
    def of(cls, plain: socket.socket) -> Socket:
        """Make one of a socket, which is of no use any more."""
        limit = plain.gettimeout()
        sock = cls(plain.family, plain.type, plain.proto, plain.detach())
        socket.socket.settimeout(sock, 0.0)
        sock.limit = limit
        return sock

    @classmethod
    def pair(cls) -> tuple[Socket, Socket]:
        one, other = socket.socketpair()
        return cls.of(one), cls.of(other)

    def settimeout(self, value: float | None, /) -> None:
        self.limit = value

    def gettimeout(self) -> float | None:
        return self.limit

    def patiently(self, event: int, call: Callable[[], T]) -> T:
        deadline = None if self.limit is None else time.monotonic() + self.limit
        while True:
            try:
                return call()
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not ready(self.fileno(), event, left):
                    raise TimeoutError("timed out") from None

    def recv(self, *args: Any) -> bytes:
        return self.patiently(select.EPOLLIN, lambda: socket.socket.recv(self, *args))

    def recv_into(self, *args: Any) -> int:
        return self.patiently(select.EPOLLIN, lambda: socket.socket.recv_into(self, *args))

    def recvmsg(self, *args: Any) -> Any:
        return self.patiently(select.EPOLLIN, lambda: socket.socket.recvmsg(self, *args))

    def send(self, *args: Any) -> int:
        return self.patiently(select.EPOLLOUT, lambda: socket.socket.send(self, *args))

    def sendmsg(self, *args: Any) -> int:
        return self.patiently(select.EPOLLOUT, lambda: socket.socket.sendmsg(self, *args))

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view, flags) :]
