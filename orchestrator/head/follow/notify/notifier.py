"""Runs the commands of --notify beside the head, which never waits for them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.common.errors import UsageError
from orchestrator.common.text import Say, duration, plural
from orchestrator.head.connect import fleet
from orchestrator.head.follow import verdict
from orchestrator.head.follow.notify import command
from orchestrator.head.screen import tracebacks as crash_dump
from orchestrator.head.screen.lines import clean
from orchestrator.protocol.message import encode
from orchestrator.records import manifest
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.outcome import SlowRank, Verdict

SECONDS = 10.0  # for a command
LAST_SECONDS = SECONDS + 2.0  # a head that leaves waits so long
LAST_WORDS = 2000  # bytes of what a command printed
MOST_TEXT = 1900  # characters: a message of a chat program may have 2000
MOST_TRACE = 8000

Event = dict[str, Any]  # as a command gets it, in JSON


class Notifier:
    """Tells commands what happens to a job, one event after the other, in a thread of its own."""

    def __init__(self, commands: Sequence[str], say: Say, tree: str = "") -> None:
        self.commands, self.say = commands, say
        self.tree = tree  # the user's own working tree, for the paths of a verdict
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.problems: dict[str, str] = {}  # command -> what went wrong first, until it is said
        self.slow: set[tuple[object, ...]] = set()
        self.thread = fleet.start(self.run) if commands else None

    def run(self) -> None:
        while (event := self.events.get()) is not None:
            try:
                problems = fleet.everywhere(self.commands, partial(run_command, event=event))
            except OSError as error:
                problems = [error.strerror or type(error).__name__] * len(self.commands)
            for words, problem in zip(self.commands, problems, strict=True):
                if problem:
                    self.problems.setdefault(words, str(problem))

    def straggler(self, record: JobRecord, slow: SlowRank) -> None:
        """Tell of a rank that holds the others up, once for each rank and cause."""
        key = (record.attempt, slow.cause, slow.rank, slow.node)
        if key not in self.slow:
            self.slow.add(key)
            text = f"is held up: {slow.text}" if slow.holds_up else slow.text
            event = event_of("straggler", record, text, time.time())
            self.events.put({**event, "straggler": encode(slow)})

    def over(self, record: JobRecord) -> None:
        """Tell of the end of a job, or of an attempt that is followed by another one."""
        kind, text, when, cause = ending(record)
        self.events.put(event_of(kind, record, text, when, cause, self.tree))

    def report(self) -> None:
        """Say once for each command what went wrong. The job goes on all the same."""
        for words, problem in list(self.problems.items()):
            if problem:
                self.problems[words] = ""
                self.say(f"--notify {command.shown(words)}: {problem}; this is said once")

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Wait for commands that still run, for a while."""
        self.events.put(None)
        if self.thread is not None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                self.say(f"--notify: not all was passed on within {seconds:g} s")
        self.report()


def notifier_of(experiment: Experiment, record: JobRecord, say: Say) -> Notifier:
    """Return the notifier of a job. Of a job started by hand, the first node's head notifies."""
    commands: tuple[str, ...] = ()
    if record.launch.notify and not any(node.index for node in record.nodes[:1]):
        try:
            commands = command.kept(experiment)
        except UsageError as error:
            say(f"no command is notified: {error.what}")
    return Notifier(commands, say, manifest.working_tree(experiment) if commands else "")


def run_command(words: str, event: Event, seconds: float = SECONDS) -> str:
    """Run a shell command with the event as JSON on its standard input; return what failed.

    It runs in a session of its own, which Ctrl-C for the job does not reach. At the limit all of
    that session is killed.
    """
    kind, name = event["event"], event["experiment"]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            ["/bin/sh", "-c", words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=printed,
            env={**os.environ, "NOTIFY_EVENT": kind, "NOTIFY_EXPERIMENT": name},
            start_new_session=True,
        )
        try:
            process.communicate(f"{json.dumps(event)}\n".encode(), seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it was not done within {seconds:g} s"
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - LAST_WORDS))
        lines = printed.read().decode("utf-8", "replace").splitlines()
    code = process.returncode
    return ": ".join([f"exit code {code}", *lines[-1:]]) if code else ""


# -- the events ---------------------------------------------------------------------------------


def ending(record: JobRecord) -> tuple[str, str, float, Verdict | None]:
    """Return the kind of event that an end is, with its words, its time and its cause."""
    if record.goes_on:
        last = record.attempts[-1]
        at = "" if last.step is None else f" at step {last.step}"
        which = f"attempt {last.number} of at most {1 + record.launch.max_restarts} {last.state}"
        text = f"is started again: {which} after {duration(last.ended - last.started)}{at}"
        return "restart", text, last.ended, last.verdict
    ended = record.ended or 0.0
    after = f"after {duration(ended - record.started)} on {plural(len(record.nodes), 'node')}"
    if record.state in ("failed", "lost"):
        how = "failed" if record.state == "failed" else "lost a node"
        return "failure", f"{how} {after}", ended, record.verdict
    was = "is done" if record.state == "done" else f"was {record.state}"
    return "end", f"{was} {after}: {record.experiment}", ended, None


def event_of(
    kind: str,
    record: JobRecord,
    words: str,
    when: float,
    cause: Verdict | None = None,
    tree: str = "",
) -> Event:
    """Return an event; the first line of its text is a title, and the verdict follows in words."""
    name = Path(record.experiment).name
    lines = f"{name} {words}".splitlines()
    if cause is not None:
        cause = crash_dump.in_verdict(cause, tree)
        lines += verdict.to_lines(cause)
        cause = replace(cause, traceback=cause.traceback[-MOST_TRACE:])
    # Lines may quote a node: nothing in them moves a cursor or turns text around.
    text = "\n".join(map(clean, lines))
    return {
        "event": kind,
        "experiment": name,
        "path": record.experiment,
        "job": record.job,
        "state": record.state,
        "attempt": record.attempt,
        "time": when,
        "head": os.uname().nodename,
        "text": text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ...",
        "verdict": encode(cause),
        "straggler": None,
    }
