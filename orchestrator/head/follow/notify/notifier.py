"""Runs the commands of --notify beside the head, which never waits for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say
from orchestrator.head.follow.notify import command, notice
from orchestrator.head.follow.notify.notice import Notice
from orchestrator.protocol.message import encode
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import SlowRank

SECONDS = 10.0  # for a command
LAST_SECONDS = SECONDS + 2.0  # a head that leaves waits so long
LAST_WORDS = 2000  # bytes of what a command printed


class Notifier:
    """One head's notices about one job, one after the other. For each, all commands run at once."""

    def __init__(self, commands: Sequence[str], say: Say, tree: str = "") -> None:
        self.commands, self.say = commands, say
        self.tree = tree  # the user's own working tree, for the paths of a verdict
        self.problems: dict[str, str] = {}  # command -> the first thing that went wrong
        self.reported: set[str] = set()
        self.slow: set[tuple[object, ...]] = set()
        self.latest: threading.Thread | None = None  # it waits for those before it

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
        if self.commands:
            self.latest = start(self.run, message, self.latest)

    def run(self, message: Notice, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        for thread in [start(self.run_one, words, message) for words in self.commands]:
            thread.join()

    def run_one(self, words: str, message: Notice) -> None:
        try:
            problem = run_command(words, message, SECONDS)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if problem:
            self.problems.setdefault(words, problem)

    def report(self) -> None:
        """Say once for each command what went wrong. The job goes on all the same."""
        for words in self.problems.keys() - self.reported:
            self.reported.add(words)
            self.say(f"--notify {command.shown(words)}: {self.problems[words]}; this is said once")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait for commands that still run, for a while."""
        if self.latest is not None:
            self.latest.join(seconds)
            if self.latest.is_alive():
                self.say(f"--notify: not all was passed on within {seconds:g} s")
        self.report()


def start(run: Callable[..., None], *arguments: object) -> threading.Thread:
    """Start a thread that nothing waits for at the end of the process."""
    thread = threading.Thread(target=run, args=arguments, daemon=True, name="notify")
    thread.start()
    return thread


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
