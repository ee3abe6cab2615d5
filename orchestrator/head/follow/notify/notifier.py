"""Tells all targets of a job what happens to it, beside the head and never in its way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.head.follow.notify import notice, target
from orchestrator.head.follow.notify.notice import Notice
from orchestrator.head.follow.notify.target import Target
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import SlowRank

WAITING = 32  # notices for one target; what is more is not told
SECONDS = 10.0  # that one notice may take
LAST_SECONDS = SECONDS + 2.0  # a head that leaves waits so long for what it has told


class Notifier:
    """One head's notices about one job."""

    def __init__(self, targets: Sequence[Target], say: Say, tree: str = "") -> None:
        self.say = say
        self.tree = tree  # the user's own working tree, for the paths of a verdict
        self.problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.couriers = [Courier(each, self.problems) for each in targets]
        self.slow: set[tuple[object, ...]] = set()

    def straggler(self, record: JobRecord, slow: SlowRank) -> None:
        """Tell who holds the others up, once for each of them and each cause."""
        key = (record.attempt, slow.cause, slow.rank, slow.node)
        if self.couriers and key not in self.slow:
            self.slow.add(key)
            self.send(notice.of_straggler(record, slow, time.time()))

    def over(self, record: JobRecord) -> None:
        """Tell how a job has ended, or that its next attempt comes."""
        if not self.couriers:
            return
        self.send((notice.of_restart if record.goes_on else notice.of_end)(record, self.tree))

    def send(self, message: Notice) -> None:
        for courier in self.couriers:
            courier.take(message)

    def report(self) -> None:
        """Say what could not be told. The job goes on all the same."""
        while not self.problems.empty():
            self.say(self.problems.get())

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait a while for what is still on its way."""
        deadline = time.monotonic() + seconds
        for courier in self.couriers:
            courier.close(max(0.0, deadline - time.monotonic()))
        self.report()


class Courier:
    """Takes notices to one target, one after the other, in a thread that nobody waits for."""

    def __init__(self, to: Target, problems: queue.SimpleQueue[str]) -> None:
        self.to = to
        self.problems = problems
        self.notices: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self.thread: threading.Thread | None = None
        self.complained = False

    def take(self, message: Notice) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True, name="notify")
            self.thread.start()
        try:
            self.notices.put_nowait(message)
        except queue.Full:
            self.complain("it is too slow, and is not told everything")

    def run(self) -> None:
        from orchestrator.head.follow.notify import delivery  # 50 ms of HTTP and mail, for few jobs

        while (message := self.notices.get()) is not None:
            if problem := delivery.deliver(self.to, message, SECONDS):
                self.complain(problem)

    def complain(self, problem: str) -> None:
        if not self.complained:
            self.complained = True
            self.problems.put(f"--notify {self.to.shown}: {problem}; this is said once")

    def close(self, seconds: float) -> None:
        if self.thread is None:
            return
        try:
            self.notices.put(None, timeout=seconds)
        except queue.Full:
            return
        self.thread.join(seconds)
        if self.thread.is_alive():
            self.complain(f"it was not told within {LAST_SECONDS:g} s")


def notifier_of(experiment: Experiment, record: JobRecord, say: Say) -> Notifier:
    """Return what tells about a job. Of a job started by hand, only the first node's head tells."""
    if not record.launch.notify or any(node.index for node in record.nodes[:1]):
        return Notifier((), say)
    try:
        targets = target.kept(experiment)
    except UsageError as error:
        say(f"nobody is notified: {error.what}")
        targets = ()
    return Notifier(targets, say, manifest.working_tree(experiment))
