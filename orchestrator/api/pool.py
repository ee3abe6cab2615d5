"""Ranks that stay, and are called again and again: orchestrator.Pool.

The ranks are a job like any other, which runs node/calls/serve.py. Calls and answers travel
through a process of our own (api/exchange.py), so this program has no connection or thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar

from orchestrator.api import head_process
from orchestrator.api.functions import Watch, pickled
from orchestrator.api.job import Job, RemoteTraceback, only_here, unreadable
from orchestrator.api.options import Options
from orchestrator.common.errors import (
    EXIT_NODE,
    JobFailed,
    NodeError,
    OrchestratorError,
    UsageError,
)
from orchestrator.config.launch import Where
from orchestrator.head.background.process import Background
from orchestrator.head.nodes.node_list import read_nodes, without
from orchestrator.head.screen import output
from orchestrator.node.calls import serve
from orchestrator.protocol import frames
from orchestrator.protocol.frames import (
    ASK,
    EVERY_RANK,
    GONE,
    INTERRUPT,
    LINE,
    RAISED,
    READY,
    RESULT,
    RUN,
    SHOW,
    Part,
)

if TYPE_CHECKING:
    from orchestrator.head.nodes.machine import Machine

P = ParamSpec("P")
T = TypeVar("T")

END_SECONDS = 60.0  # for a job whose ranks were told to end, or were lost
SMALL_BYTES = 1 << 20  # of a function that a rank may keep until the next one
SETTLE_SECONDS = 10.0  # for ranks that still run a call that was given up
FOREVER = -1.0
DEFAULTS: Options = {
    **{"name": "pool", "hang_timeout": 0.0, "node_loss_timeout": 20.0},
    "on_head_loss": "stop",  # nobody can call these ranks any more
}
MOST_LOSSES = 3  # that one input may cost the pool
READ_BYTES = 1 << 20


class Machines(Protocol):
    """The machines that the ranks of a pool are started on: a Cluster."""

    _where: Where
    _options: Options

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Start a function in every rank on all nodes."""

    def nodes(self) -> list[Machine]:
        """Describe the machines, also those that cannot be reached."""

    def _with(self, options: Options, nodes: Path | None = None) -> Machines:
        """Return these machines with other options, or those of another list."""


class RanksLost(JobFailed):
    """The ranks of the pool are gone, and what they held with them."""


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Put Ctrl-C off for a moment that waits for nothing."""
    answer = signal.getsignal(signal.SIGINT)
    if not callable(answer) or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *press: pressed.append(press))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, answer)
        if pressed:
            answer(*pressed[0])


class Ranks:
    """The way to the ranks of one job: calls go out, whole answers come back."""

    def __init__(self, job: Job, where: Where) -> None:
        self.size = sum(node.nproc for node in job._record().nodes)
        self.busy: dict[int, int] = {}  # rank -> the number of the call that it runs
        self.numbers = itertools.count(1)
        self.splitter = frames.Splitter()
        self.arrived: list[Part] = []
        self.unfinished: dict[int, bytearray] = {}  # rank -> the begin of its answer
        self.unsent: deque[memoryview] = deque()
        self.broken = ""  # why nothing more can be received
        self.process = Background(head_process.calls, where=where, experiment=str(job.directory))
        self.calls = self.process.keys.fileno()
        os.set_blocking(self.calls, False)
        self.room = select.poll()
        self.room.register(self.calls, select.POLLOUT)
        self.answers = self.process.answers.raw.fileno()  # type: ignore[attr-defined]
        self.poll = select.poll()
        self.poll.register(self.answers, select.POLLIN)
        self.process.answer()
        self.call(EVERY_RANK, b"", kind=READY)
        while self.busy:
            self.answer()

    def call(self, rank: int, call: bytes, kind: bytes = RUN) -> None:
        """Send a call. Ctrl-C gives it up; whoever has a part of it answers that it is none."""
        number = next(self.numbers)
        parts = frames.call_frames(rank, number, kind, call)
        try:
            with held():
                ranks = range(self.size) if rank == EVERY_RANK else (rank,)
                self.busy.update(dict.fromkeys(ranks, number))
            for part in parts:
                self.send(part)
        except KeyboardInterrupt:
            with held():
                self.add(rank, number, kind)
                self.interrupt()
            raise

    def add(self, rank: int, number: int, kind: bytes, data: bytes = b"") -> None:
        """Have a message sent by the next flush()."""
        self.unsent += map(memoryview, frames.call_frames(rank, number, kind, data))

    def send(self, frame: bytes) -> None:
        with held():
            self.unsent.append(memoryview(frame))
        self.flush()

    def flush(self, *, wait: bool = True) -> None:
        """Send what there is. After Ctrl-C the rest of it is sent before anything else."""
        while self.unsent and self.room.poll(None if wait else 0):
            with held():
                frame = self.unsent[0]
                try:
                    frame = frame[os.write(self.calls, frame) :]
                except BrokenPipeError:  # nobody is there; receive() says why
                    self.unsent.clear()
                    return
                if frame:
                    self.unsent[0] = frame
                else:
                    self.unsent.popleft()

    def answer(self, timeout: float | None = None) -> Part:
        """Wait for the next rank that has answered its call, and return its answer.

        What its debugger shows and asks for is done on the way. Ctrl-C interrupts the calls.
        """
        try:
            while True:
                part = self.receive(timeout)
                if part.kind == GONE:
                    self.broken = f"rank {part.rank}: {part.data.decode(errors='replace')}"
                    raise RanksLost(self.broken)
                if part.kind == SHOW:
                    output.pass_on(part.data.decode(errors="replace"))
                elif part.kind == ASK:
                    self.add(part.rank, part.number, LINE, output.typed_line().encode())
                    self.flush()
                elif self.busy.get(part.rank) == part.number:
                    del self.busy[part.rank]
                    return part
        except KeyboardInterrupt:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in all ranks that run a call."""
        for rank, number in self.busy.items():
            self.add(rank, number, INTERRUPT)
        self.flush(wait=False)

    def receive(self, timeout: float | None) -> Part:
        """Return the next whole message of any rank."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            while self.arrived:
                part = self.arrived.pop(0)
                data = self.unfinished.setdefault(part.rank, bytearray())
                data += part.data
                if not part.more:
                    return part._replace(data=bytes(self.unfinished.pop(part.rank)))
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.poll.poll(None if left is None else left * 1000):
                raise TimeoutError
            received = os.read(self.answers, READ_BYTES)
            if not received:
                self.broken = self.process.last_words()
                raise RanksLost(self.broken)
            self.arrived += (frames.part(load) for _, load in self.splitter.feed(received))

    def close(self) -> None:
        """Hang up: the process between us tells the ranks to end."""
        self.process.keys.close()
        self.process.answers.close()


class Pool:
    """Ranks on all nodes that stay between calls: `with cluster.pool(nproc=2) as pool`.

        pool.run(f, *args)               calls f in every rank; returns what each returned
        actor = pool.create(Class, ...)  makes an object in every rank, which stays there
        actor.method(...)                calls all of them; returns what each returned
        pool.map(f, inputs)              deals the inputs out to the ranks; results in their order

    torchrun starts the ranks as those of Cluster.run, so torch.distributed works in them. What a
    rank raises is raised here. breakpoint() in a rank opens its debugger here.
    """

    def __init__(self, cluster: Machines) -> None:
        self._cluster = cluster
        self._lock = threading.RLock()  # one call at a time, of all threads
        self._opener = os.getpid()
        self._numbers = itertools.count(1)
        self._list: Path | None = None  # of the nodes that are left
        self._closing = False
        self._ranks: Ranks | None = None
        self._start()

    def _start(self) -> None:
        self._modules = Watch()
        self.job = self._cluster.submit(serve.serve)
        try:
            self._ranks = Ranks(self.job, self._cluster._where)
        except RanksLost as error:
            self._raise_loss(error)
        except BaseException:
            self.job.stop(now=True)
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._open.size

    @property
    def _open(self) -> Ranks:
        if self._ranks is None:
            raise UsageError("the pool is closed", "cluster.pool(...) opens another")
        return self._ranks

    def __repr__(self) -> str:
        state = f"{self._ranks.size} ranks" if self._ranks else "closed"
        return f"<Pool {self.job.name}: {state}>"

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.leave_block(error)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for the calls of other threads; a forked process has no way to the ranks."""
        if self._opener != os.getpid():
            raise UsageError(
                f"the pool is that of process {self._opener}, of which this one is a fork",
                "call it there; or open a pool in the process that calls it",
            )
        with self._lock:
            yield

    # -- calls -----------------------------------------------------------------------------------

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call function(*args, **kwargs) in every rank, and return the results, one per rank."""
        call = pickled(function, args, kwargs)
        with self._turn():
            ranks = self._ready()
            results: dict[int, T] = {}
            try:
                ranks.call(EVERY_RANK, call)
                while len(results) < ranks.size:
                    part = ranks.answer()
                    results[part.rank] = self._result(part)
            except RanksLost as error:
                self._raise_loss(error)
            return [results[rank] for rank in range(ranks.size)]

    def create(self, kind: Callable[..., object], /, *args: object, **kwargs: object) -> Actor:
        """Make an object in every rank, and return what calls them all."""
        number = next(self._numbers)
        self.run(serve.create, number, kind, args, kwargs)
        return Actor(self, number, getattr(kind, "__name__", "object"))

    def map(self, function: Callable[[Any], T], inputs: Iterable[object], /) -> list[T]:
        """Call function(input) for each input, each in the next rank that is free.

        If ranks are lost, the pool starts anew on the nodes that are left, and calls again those
        whose results are missing; objects made in the ranks are lost.
        """
        kept = pickled(serve.keep, (pickled(function, (), {}),), {})  # it may hold much: sent once
        calls = [
            pickled(serve.apply, (value,), {}, name=f"input {index}")
            for index, value in enumerate(inputs)
        ]
        results: dict[int, T] = {}
        losses = [0] * len(calls)
        with self._turn():
            while len(results) < len(calls):
                todo = [index for index in range(len(calls)) if index not in results]
                under_way: dict[int, int] = {}
                try:
                    self._keep(kept)
                    for index, part in self._deal(calls, todo, under_way):
                        results[index] = self._result(part, f", input {index}")
                except RanksLost as error:
                    for index in under_way.values() or todo[:1]:
                        losses[index] += 1
                        if losses[index] == MOST_LOSSES:
                            self._raise_loss(error, f"input {index} costs its rank each time: ")
                    if self._closing:
                        self._raise_loss(error)
                    self._start_again()
            if len(kept) > SMALL_BYTES:
                self._keep(pickled(serve.keep, (b"",), {}))
        return [results[index] for index in range(len(calls))]

    def _keep(self, call: bytes) -> None:
        """Leave the function of a map with every rank, or nothing."""
        ranks = self._ready()
        ranks.call(EVERY_RANK, call)
        while ranks.busy:
            self._result(ranks.answer())

    def _deal(
        self, calls: list[bytes], todo: list[int], under_way: dict[int, int]
    ) -> Iterator[tuple[int, Part]]:
        """Yield the index and the answer of each call as they come; `under_way` is kept."""
        ranks = self._ready()
        waiting = iter(todo)
        for rank, index in zip(range(ranks.size), waiting):  # noqa: B905  the shorter one ends it
            under_way[rank] = index
            ranks.call(rank, calls[index])
        while under_way:
            part = ranks.answer()
            done = under_way.pop(part.rank)
            following = next(waiting, None) if part.kind == RESULT else None
            if following is not None:
                under_way[part.rank] = following
                ranks.call(part.rank, calls[following])
            yield done, part

    def _result(self, part: Part, of: str = "") -> Any:
        """Return what a rank returned, or raise what it raised; `of` says from which input."""
        if part.kind != RAISED:
            try:
                return pickle.loads(part.data) if part.kind == RESULT else None
            except Exception as worse:
                self._open.interrupt()
                raise unreadable(part.rank, worse) from worse
        self._open.interrupt()  # what the other ranks do is of no use any more
        error, summary, text = pickle.loads(part.data)
        try:
            raised = pickle.loads(error)
        except Exception:  # noqa: BLE001  there is none, or its class is not known here
            raised = JobFailed(f"rank {part.rank}{of}: {summary}")
        text += only_here(raised)
        raise raised from RemoteTraceback(f"\n\nrank {part.rank}{of}:\n{text}")

    def _ready(self) -> Ranks:
        """Return the ranks once none is busy with a call that was given up."""
        ranks = self._open
        self._modules.poll()
        if ranks.broken:
            raise RanksLost(
                f"the pool cannot be called: {ranks.broken}", "cluster.pool(...) opens another"
            )
        try:
            ranks.flush()
            while ranks.busy:
                ranks.answer(SETTLE_SECONDS)
        except TimeoutError:
            raise OrchestratorError(
                f"an earlier call still runs in rank {', '.join(map(str, sorted(ranks.busy)))};"
                " does it wait for a rank that raised an exception?",
                "pool.close() ends it; cluster.pool(...) opens another",
            ) from None
        return ranks

    # -- the end ---------------------------------------------------------------------------------

    def _raise_loss(self, error: RanksLost, what: str = "") -> NoReturn:
        """Raise why the job of the ranks ended."""
        self._end()
        record = self.job._record()
        failure = self.job._failure(record)
        lost = NodeError if record.exit_code == EXIT_NODE else RanksLost
        raise lost(f"{what}{error.what}\n{failure.what}", failure.fix) from None

    def _start_again(self) -> None:
        self._end()
        gone = {machine.name for machine in self._cluster.nodes() if not machine.reached}
        if gone:
            self._take_out(gone)
        self._start()

    def _take_out(self, gone: set[str]) -> None:
        """Go on with a node list without the nodes of these names."""
        path = self._cluster._where.node_list
        if not path.is_file():
            raise NodeError(f"{', '.join(sorted(gone))} cannot be reached")
        if all(node.name in gone for node in read_nodes(path)):
            raise NodeError("no node of the list can be reached any more")
        left = without(path.read_text(encoding="utf-8"), str(path), gone)
        if self._list is None:
            handle, name = tempfile.mkstemp(prefix="orchestrator-", suffix=".txt")
            os.close(handle)
            self._list = Path(name)
        self._list.write_text(left, encoding="utf-8")
        self._cluster = self._cluster._with(self._cluster._options, nodes=self._list)

    def _end(self) -> None:
        """Wait for the end of the job, and bring it about where it does not come by itself."""
        ranks, self._ranks = self._ranks, None
        stuck = ranks is not None and bool(ranks.busy) and not ranks.broken
        if ranks is not None:
            ranks.close()
        if stuck:
            self.job.stop(now=True)
        try:
            self.job.wait(END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(NodeError):  # of a lost node there is no proof
                self.job.stop(now=True)

    def leave_block(self, error: BaseException | None) -> None:
        """Act as the `with` block of the cluster says."""
        self._close(FOREVER if error is None else 0.0)

    def close(self) -> None:
        """End the ranks.

        What they still run is killed: a call that was given up at once, one that another thread
        waits for after 10 seconds.
        """
        self._close(SETTLE_SECONDS)

    def _close(self, patience: float) -> None:
        if self._opener != os.getpid():
            return  # the ranks are not a forked process's to end
        self._closing = True
        if not self._lock.acquire(timeout=patience):
            self.job.stop(now=True)  # the other thread's call raises RanksLost
            self._lock.acquire()
        try:
            if self._ranks is not None:
                self._end()
            if self._list is not None:
                self._list.unlink(missing_ok=True)
                self._list = None
        finally:
            self._lock.release()


class Actor:
    """An object in every rank of a pool. Its methods return what each rank's returned."""

    def __init__(self, pool: Pool, number: int, name: str) -> None:
        self._pool, self._number, self._name = pool, number, name
        self._job = pool.job
        self._deleted = False

    def __repr__(self) -> str:
        return f"<Actor {self._name} in {self._pool!r}>"

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: object, **kwargs: object) -> list[Any]:
            if self._deleted:
                raise UsageError(f"{self._name} was deleted", "pool.create(...) makes another")
            if self._pool.job is not self._job:
                what = f"{self._name} was lost with the ranks that held it"
                raise RanksLost(what, "pool.create(...) makes it again")
            return self._pool.run(serve.call, self._number, name, args, kwargs)

        method.__name__ = name
        return method

    def delete(self) -> None:
        """Forget the objects in the ranks."""
        self._deleted = True
        if self._pool.job is self._job:
            self._pool.run(serve.delete, self._number)
