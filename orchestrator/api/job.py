"""A job as a Python program sees it: orchestrator.Job.

Everything is read from the experiment's directory, which the job's head fills; the head is a
process of its own (head_process.py).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.api import head_process
from orchestrator.common import files
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_NODE,
    JobFailed,
    NodeError,
    OrchestratorError,
    UsageError,
)
from orchestrator.config.launch import Where
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.follow import verdict as verdicts
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.lines import LineSplitter
from orchestrator.head.screen.log_reader import GOODBYE, NO_RANK, LogFile, LogReader
from orchestrator.protocol.message import decode_value
from orchestrator.protocol.timing import CATCH_UP_SECONDS, SCHEDULER_SECONDS
from orchestrator.records import manifest, outcome
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics import trainers
from orchestrator.records.metrics.lines import GrowingFile
from orchestrator.records.outcome import Receipt

# The recorded command of a job with results begins with this word.
CALLED = "Cluster.run"
# The interval between two looks at the head's files.
LOOK_SECONDS = 0.2
# With the rest of str(verdict), so many lines fit on a small terminal.
TRACEBACK_LINES = 12
# A head that ended sooner than this would end again.
TOO_SOON_SECONDS = 5.0


class Verdict(outcome.JobVerdict):
    """Why a job did not end well. As text: the traceback, and the lines that the command shows."""

    @property
    def text(self) -> str:
        return "\n".join(verdicts.verdict_to_lines(self))

    def __str__(self) -> str:
        return "\n".join(
            [*verdicts.excerpt_of(self.traceback.splitlines(), TRACEBACK_LINES), self.text]
        )


@dataclass(frozen=True)
class Line:
    """A line of a job's logs. As text: with its node and rank in front."""

    text: str
    node: int
    # None: a line of torchrun itself.
    rank: int | None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank{self.rank}"
        return f"node{self.node}{rank} | {self.text}"


class RemoteTraceback(Exception):
    """The traceback of an exception in a rank; it is the __cause__ of that exception here."""

    # A traceback shows the name with this module.
    __module__ = "orchestrator"


class Job:
    """A job that runs, or ran.

    The end of a `with` block waits for the job; if an exception leaves the block, it is stopped.
    """

    def __init__(
        self, experiment: Experiment, where: Where, head: Background | None = None
    ) -> None:
        self._experiment = experiment
        self._which: dict[str, Any] = {"where": where, "experiment": str(experiment.path)}
        self._head = head
        # The time of the last take_up() that started a process.
        self._came = 0.0

    def __repr__(self) -> str:
        return f"<Job {self.name}: {self.status}>"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.leave_block(error)

    def leave_block(self, error: BaseException | None) -> None:
        """Wait for the job, or stop it, at the end of a `with` block."""
        if self._record().over:
            return
        if error is None:
            self.wait()
        elif isinstance(error, KeyboardInterrupt):
            self._interrupt()
        else:
            self.stop()

    # -- what is known ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The experiment's name; Cluster.attach(name) finds the job again."""
        return self._experiment.name

    @property
    def directory(self) -> Path:
        """The experiment's directory: logs/, outputs/, job.json, and head.txt with its messages."""
        return self._experiment.path

    @property
    def status(self) -> str:
        """The state: queued (in Slurm), starting, running, done, failed, stopped or lost."""
        return self._record().state

    @property
    def exit_code(self) -> int | None:
        """The exit code that master_launch would have ended with; None while the job runs."""
        return self._record().exit_code

    @property
    def verdict(self) -> Verdict | None:
        """The reason why it did not end well; None while it runs, and when it is done."""
        verdict = self._record().verdict
        if not verdict:
            return None
        here = crash_dump.own_paths_in_verdict(verdict, manifest.working_tree(self._experiment))
        return Verdict(**vars(here))

    def metrics(self) -> list[dict[str, float]]:
        """Return the steps that rank 0 measured so far: rows with step, loss and more.

        `pandas.DataFrame(job.metrics())` is a table of them.
        """
        files = trainers.newest_metrics_files(self.directory / "outputs")
        lines = GrowingFile(files[min(files)]).lines() if files else ()
        return [
            point.numbers(len(point.line), ())
            for point in map(trainers.Point, lines)
            if point.step is not None
        ]

    def _record(self) -> JobRecord:
        return self._experiment.read_record()

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, check: bool = False) -> int:
        """Wait until the job is over, and return its exit code.

        With `check`, a job that failed is raised as JobFailed. After `timeout` seconds TimeoutError
        is raised, and the job continues. Ctrl-C asks the ranks to save and stop, a second one kills
        them; then it is raised.
        """
        try:
            record = self._until_over(timeout)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        assert record.exit_code is not None
        if check and record.exit_code != EXIT_DONE:
            raise self._failure(record)
        return record.exit_code

    def _until_over(self, timeout: float | None) -> JobRecord:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            record = self._record()
            left = deadline - time.monotonic()
            # The head leaves once the job is over.
            if record.over:
                self._head = None
                return record
            if left <= 0:
                raise TimeoutError(f"{self.name} still runs after {timeout:g} s")
            self._pause(min(left, LOOK_SECONDS))

    def _pause(self, seconds: float) -> None:
        """Wait until the next look; a job without a head gets one first."""
        if self._head is not None and not self._head.gone(seconds):
            return
        self._head = None
        self.take_up()
        if self._head is None:
            time.sleep(seconds)

    def take_up(self) -> None:
        """Start a head if none follows the job, and wait until its logs so far are here."""
        record, now, before = self._record(), time.monotonic(), self._came
        if record.over or self._experiment.followed:
            return
        # The head runs on the job's own machines; a background process checks that it still does.
        if record.head_elsewhere:
            if now - before > SCHEDULER_SECONDS:
                self._came = now
                Background(head_process.follow_job, **self._which).answer()
            return
        if before and now - before < TOO_SOON_SECONDS:
            raise OrchestratorError(
                f"the head of {self.name} ends as soon as it starts",
                f"its last output is in {self.directory / 'head.txt'}",
            )
        self._came = now
        self._head = Background(head_process.follow_job, **self._which)
        self._catch_up(self._head.answer()["logs"])

    def _catch_up(self, sizes: dict[str, int]) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while time.monotonic() < deadline and not self._record().over:
            if self._head is None or self._head.gone():
                # The reason why the head ended is in head.txt.
                return
            files = {str(file.node): file for file in self._log_files()}
            if all(files[node].size() >= size for node, size in sizes.items()):
                return
            time.sleep(0.05)

    def _interrupt(self) -> None:
        """Act like Ctrl-C on the command: the ranks save and stop; a second call kills them."""
        for now in (False, True):
            try:
                if self._head is None or self._head.gone():
                    self.stop(now=now)
                else:
                    self._head.press(INTERRUPT)
                    self._until_over(None)
                return
            except KeyboardInterrupt:
                continue

    def _failure(self, record: JobRecord) -> JobFailed:
        verdict, code = self.verdict, record.exit_code or 0
        what = f"{self.name}: {record.state}, exit code {code}" + (
            f"\n{verdict}" if verdict else ""
        )
        return JobFailed(
            what, f"all logs are in {self._experiment.logs}", exit_code=code, verdict=verdict
        )

    # -- logs ------------------------------------------------------------------------------------

    def logs(
        self, *, rank: int | None = None, node: int | None = None, follow: bool = False
    ) -> Iterator[Line]:
        """Return the log lines so far, or with `follow` all until the job is over.

        str(line) begins with the node and the rank; line.text is the line alone.
        """
        self._record().check_choice(node, rank, "{}={}")
        self.take_up()
        return self._lines(rank, node, follow=follow)

    def _log_files(self) -> list[LogFile]:
        return log_files(self._experiment, self._record().nodes)

    def _lines(self, rank: int | None, node: int | None, *, follow: bool) -> Iterator[Line]:
        files = [file for file in self._log_files() if node in (None, file.node)]
        readers = [LogReader(file) for file in files]
        streams: dict[tuple[int, str], LineSplitter] = {}
        over = False
        while not over:
            # Set before the last pass, so that no line is missed.
            over = not follow or self._record().over
            while any(reader.behind() for reader in readers):
                for reader in readers:
                    for stream, data in reader.read():
                        if rank is None or stream == str(rank):
                            at = (reader.log.node, stream)
                            splitter = streams.setdefault(at, LineSplitter())
                            yield from lines(at, splitter.feed(data))
            if not over:
                self._pause(LOOK_SECONDS)
        for at, splitter in sorted(streams.items()):
            yield from lines(at, splitter.flush())

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, *, grace: float | None = None, now: bool = False) -> tuple[Receipt, ...]:
        """End the job on all nodes and prove it: return a receipt per node, none if it was over.

        The ranks are asked to save and stop; what is left after `grace` seconds (with `now`, at
        once) is killed. Raises NodeError if a node could not be reached, and JobFailed if a process
        is still alive.
        """
        answer = Background(
            head_process.stop_job, **self._which, grace=0.0 if now else grace
        ).answer()
        if answer["code"] == EXIT_NODE:
            raise NodeError(answer["text"])
        if answer["code"] != EXIT_DONE:
            raise JobFailed(answer["text"], verdict=self.verdict)
        if answer["why"]:
            raise OrchestratorError(f"it is stopped, but job.json does not say so: {answer['why']}")
        return tuple(decode_value(Receipt, receipt) for receipt in answer["receipts"])

    # -- results ---------------------------------------------------------------------------------

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for the job, and return what its function returned in each rank.

        The exception that ended the job is raised with its own type and the traceback of its rank
        as the cause; JobFailed if there was none, or if it cannot be unpickled here.
        """
        if self._record().command[:1] != [CALLED]:
            raise UsageError(
                f"{self.name} ran a program, which has no results",
                "cluster.run(function, ...) has; what a program wrote is in "
                f"{self.directory / 'outputs'}",
            )
        self.wait(timeout)
        record = self._record()
        # Unpickling a result executes code from the record's job.
        self._experiment.check_launched(record)
        if record.exit_code != EXIT_DONE:
            self._raise_cause(record)
        world = sum(node.nproc for node in record.nodes)
        return [self._result(rank) for rank in range(world)]

    def _result(self, rank: int) -> Any:
        path = self.directory / "outputs" / "results" / f"rank_{rank}.pkl"
        try:
            return pickle.loads(files.read_plain(path))
        except FileNotFoundError:
            raise JobFailed(
                f"rank {rank} ended well, but left no result: did it call sys.exit?",
                f"what could not be fetched is named in {self.directory / 'head.txt'}",
            ) from None
        except Exception as error:
            raise unreadable(rank, error) from error

    def _raise_cause(self, record: JobRecord) -> NoReturn:
        verdict = self.verdict
        if verdict is None or verdict.rank is None:
            raise self._failure(record)
        path = self.directory / "outputs" / "results" / f"rank_{verdict.rank}.error"
        try:
            error = pickle.loads(files.read_plain(path))
        # There is no such file, or the class of the exception is not known here.
        except Exception as worse:  # noqa: BLE001
            raise self._failure(record) from worse if path.exists() else None
        who = f"rank {verdict.rank} on node {verdict.node} ({verdict.node_name})"
        raise error from RemoteTraceback(f"\n\n{who}:\n{verdict.traceback}")


def unreadable(rank: int, error: Exception) -> JobFailed:
    """Return the error for a result of which this Python cannot make an object again."""
    return JobFailed(
        f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}",
        "return what this Python also knows: numbers, strings, numpy arrays; of tensors, "
        "those that are on the CPU, where torch is installed here",
    )


def lines(at: tuple[int, str], texts: list[str]) -> Iterator[Line]:
    rank = None if at[1] in (NO_RANK, GOODBYE) else int(at[1])
    return (Line(text, at[0], rank) for text in texts)
