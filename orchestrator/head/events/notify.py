"""Run the commands of --notify in a thread; the head does not wait for them while a job runs.

A command may contain a secret, such as a webhook's URL, so records show only its program. The file
with the whole command is private to its owner, and is used only if no other login can write it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common import files
from orchestrator.common.errors import UsageError
from orchestrator.common.hiding import REDACTED, without_secrets
from orchestrator.head.connect import fleet
from orchestrator.head.events.of_job import AttemptOver, NotNotified
from orchestrator.head.events.of_launch import AttemptBegins
from orchestrator.head.screen.events import HeadEvent, event_listener, tell
from orchestrator.head.screen.lines import clean_line
from orchestrator.protocol.message import encode_value
from orchestrator.records.experiment import NOTIFY, Experiment, JobRecord

# The time limit of a command.
SECONDS = 10.0
# A head that leaves waits this long for running commands.
LAST_SECONDS = SECONDS + 2.0
# The last bytes of a command's error output that are read.
LAST_WORDS = 2000
# The most characters of a text; chat programs allow messages of 2000.
MOST_TEXT = 1900
MOST_TRACE = 8000
LARGEST_BYTES = 1 << 20
FORMER = re.compile(r"(cmd|mail|webhook):|https?://", re.IGNORECASE)
PROGRAM = re.compile(r"[A-Za-z0-9_./~+-]+")

# An event as a command receives it in JSON.
Notice = dict[str, Any]


# -- the commands -------------------------------------------------------------------------------


def check_commands(commands: Sequence[str]) -> tuple[str, ...]:
    """Return the commands without duplicates; raise UsageError for an empty or outdated one."""
    for command in map(str.strip, commands):
        if not command or "\0" in command:
            raise UsageError("--notify: there is no command", "write a shell command")
        if FORMER.match(command):
            raise UsageError(
                "--notify takes a shell command, and no longer cmd:, mail:, webhook: or a URL",
                "cmd:X is X; docs/reference/jobs.md has one line with curl and one with mail",
            )
    return tuple(dict.fromkeys(map(str.strip, commands)))


def shown_command(command: str) -> str:
    """Return the command with its arguments redacted, as they may be secret."""
    program, _, arguments = command.partition(" ")
    if not PROGRAM.fullmatch(program):
        return REDACTED
    return f"{program} {REDACTED}" if arguments else program


def kept_commands(experiment: Experiment) -> tuple[str, ...]:
    """Return the commands of a job; raise UsageError if another login may have written them."""
    path = experiment.path / NOTIFY
    try:
        with files.open_plain(path) as file:
            status, text = os.fstat(file.fileno()), file.read(LARGEST_BYTES)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UsageError(f"{path} can be written by another login, and is not used")
        return check_commands(json.loads(text))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged", f"rm {path}; no command is run then") from error


def notifier_of(experiment: Experiment, record: JobRecord) -> Notifier:
    """Return the notifier of a job; with run-node only the first node's head runs commands."""
    commands: tuple[str, ...] = ()
    if record.launch.notify and not any(node.index for node in record.nodes[:1]):
        try:
            commands = kept_commands(experiment)
        except UsageError as error:
            tell(NotNotified(f"no command is notified: {error.what}"))
    return Notifier(commands)


@contextlib.contextmanager
def job_notifier(experiment: Experiment, record: JobRecord) -> Iterator[None]:
    """Within the block, run the commands of a job for its events; wait for them at the end."""
    notifier = notifier_of(experiment, record)
    try:
        with event_listener(notify=notifier.hear):
            yield
    finally:
        notifier.close()


class Notifier:
    """Runs the notify commands for each event of a job, one after the other, in its own thread."""

    def __init__(self, commands: Sequence[str]) -> None:
        self.commands = commands
        self.notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        # The first problem by command; an empty string once it was reported.
        self.problems: dict[str, str] = {}
        self.thread = fleet.start_thread(self.run) if commands else None

    def run(self) -> None:
        while (notice := self.notices.get()) is not None:
            try:
                problems = fleet.map_parallel(self.commands, partial(run_command, notice=notice))
            except OSError as error:
                problems = [error.strerror or type(error).__name__] * len(self.commands)
            for words, problem in zip(self.commands, problems, strict=True):
                if problem:
                    self.problems.setdefault(words, str(problem))

    def hear(self, event: HeadEvent) -> None:
        """Queue the end of a job, or of an attempt that is followed by another."""
        if isinstance(event, AttemptOver):
            self.notices.put(without_secrets(notice_of(event)))
        elif isinstance(event, AttemptBegins):
            self.report()

    def report(self) -> None:
        """Report the first problem of each command once; the job is not affected."""
        for words, problem in list(self.problems.items()):
            if problem:
                self.problems[words] = ""
                what = f"--notify {shown_command(words)}: {problem}; this is said once"
                tell(NotNotified(what))

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait up to `seconds` for running commands, then report problems."""
        self.notices.put(None)
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                tell(NotNotified(f"--notify: not all commands ended within {seconds:g} s"))
        self.report()


def run_command(words: str, notice: Notice, seconds: float = SECONDS) -> str:
    """Run a shell command with the event as JSON on its standard input; return the error, else "".

    It runs in its own session, which Ctrl-C for the job does not reach. At the time limit its
    process group is killed.
    """
    known = {"NOTIFY_EVENT": notice["event"], "NOTIFY_EXPERIMENT": notice["experiment"]}
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            ["/bin/sh", "-c", words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=printed,
            env={**os.environ, **known},
            start_new_session=True,
        )
        try:
            process.communicate(f"{json.dumps(notice)}\n".encode(), seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it was not done within {seconds:g} s"
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_WORDS))
        lines = printed.read().decode("utf-8", "replace").splitlines()
    code = process.returncode
    return ": ".join([f"exit code {code}", *lines[-1:]]) if code else ""


# -- the events ---------------------------------------------------------------------------------


def notice_of(event: AttemptOver) -> Notice:
    """Return what a command receives of the end of a job or of an attempt."""
    record, cause = event.record, event.cause
    # Lines may quote a node's output: control characters are removed from them.
    text = "\n".join(map(clean_line, event.words().splitlines()))
    ended = record.attempts[-1].ended if record.goes_on else record.ended
    return {
        "event": event.kind,
        "experiment": Path(record.experiment).name,
        "path": record.experiment,
        "job": record.job,
        "state": record.state,
        "attempt": record.attempt + record.goes_on,
        "time": ended or time.time(),
        "head": os.uname().nodename,
        "text": text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ...",
        "verdict": encode_value(cause and replace(cause, traceback=cause.traceback[-MOST_TRACE:])),
    }
