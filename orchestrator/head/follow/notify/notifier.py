"""Runs the commands of --notify beside the head, which never waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.head.follow.notify import command, notice
from orchestrator.head.follow.notify.notice import Notice
from orchestrator.protocol.message import encode
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import SlowRank

WAITING = 32  # notices; the commands are not run for further ones
SECONDS = 10.0  # for a command
LAST_SECONDS = SECONDS + 2.0  # a head that leaves waits so long
LAST_WORDS = 2000  # bytes of what a command printed


class Notifier:
    """One head's notices about one job. For each, all commands run at once."""

    def __init__(self, commands: Sequence[str], say: Say, tree: str = "") -> None:
        self.commands, self.say = commands, say
        self.tree = tree  # the user's own working tree, for the paths of a verdict
        self.problems: dict[str, str] = {}  # command, or nothing for all -> the first
        self.reported: set[str] = set()
        self.slow: set[tuple[object, ...]] = set()
        self.notices: queue.Queue[Notice | None] = queue.Queue(WAITING)
        self.thread = threading.Thread(target=self.run, daemon=True, name="notify")

    def straggler(self, record: JobRecord, slow: SlowRank) -> None:
        """Notify of a rank that holds the others up, once for each rank and cause."""
        key = (record.attempt, slow.cause, slow.rank, slow.node)
        if key not in self.slow:
            self.slow.add(key)
            self.send(notice.of_straggler(record, slow, time.time()))

    def over(self, record: JobRecord) -> None:
        """Notify of the end of a job, or of an attempt that is followed by another one."""
        self.send((notice.of_restart if record.goes_on else notice.of_end)(record, self.tree))

    def send(self, message: Notice) -> None:
        if not self.commands:
            return
        if self.thread.ident is None:
            self.thread.start()
        try:
            self.notices.put_nowait(message)
        except queue.Full:
            self.complain("the commands are too slow: not every notice is passed on")

    def run(self) -> None:
        while (message := self.notices.get()) is not None:
            threads = [
                threading.Thread(target=self.run_one, args=(words, message), daemon=True)
                for words in self.commands
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def run_one(self, words: str, message: Notice) -> None:
        try:
            problem = run_command(words, message, SECONDS)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if problem:
            self.complain(problem, words)

    def complain(self, problem: str, words: str = "") -> None:
        self.problems.setdefault(words, problem)

    def report(self) -> None:
        """Say once for each command what went wrong. The job goes on all the same."""
        for words in self.problems.keys() - self.reported:
            self.reported.add(words)
            who = f"--notify {command.shown(words)}" if words else "--notify"
            self.say(f"{who}: {self.problems[words]}; this is said once")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until the commands have run for all notices, for a while."""
        if self.thread.ident is not None:
            deadline = time.monotonic() + seconds
            with contextlib.suppress(queue.Full):
                self.notices.put(None, timeout=seconds)
            self.thread.join(max(0.0, deadline - time.monotonic()))
            if self.thread.is_alive():
                self.complain(f"it was not done within {seconds:g} s")
        self.report()


def run_command(words: str, message: Notice, seconds: float) -> str:
    """Run a shell command with the notice as JSON on its standard input; return what failed.

    It runs in a session of its own, which Ctrl-C for the job does not reach. At the limit all of
    that session is killed.
    """
    variables = {
        "NOTIFY_EVENT": message.event,
        "NOTIFY_STATE": message.state,
        "NOTIFY_EXPERIMENT": message.experiment,
        "NOTIFY_PATH": message.path,
        "NOTIFY_TEXT": message.text,
    }
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(f"{json.dumps(encode(message))}\n".encode("utf-8", "replace"))
        given.seek(0)
        process = subprocess.Popen(
            ["/bin/sh", "-c", words],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=printed,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it was not done within {seconds:g} s"
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_WORDS))
        lines = printed.read().decode("utf-8", "replace").splitlines()
    return ": ".join([f"exit code {code}", *lines[-1:]]) if code else ""


def notifier_of(experiment: Experiment, record: JobRecord, say: Say) -> Notifier:
    """Return the notifier of a job. Of a job started by hand, the first node's head notifies."""
    commands: tuple[str, ...] = ()
    if record.launch.notify and not any(node.index for node in record.nodes[:1]):
        try:
            commands = command.kept(experiment)
        except UsageError as error:
            say(f"nobody is notified: {error.what}")
    return Notifier(commands, say, manifest.working_tree(experiment) if commands else "")
