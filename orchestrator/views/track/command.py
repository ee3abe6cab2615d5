"""`orchestrator track`: the numbers of jobs for other programs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.common.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from orchestrator.common.hosts import in_url, is_loopback
from orchestrator.common.text import plural
from orchestrator.common.wings import needed
from orchestrator.config.launch import Where
from orchestrator.config.parse import one_of
from orchestrator.head.screen.output import say
from orchestrator.head.status.find_job import find_experiment
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.trackers.known import KNOWN, module
from orchestrator.views.track.passing_on import OfLaterTrainers, OfNodes, OfRanks, PassingOn

TRACKING = ".tracking"  # in the experiment: held by the one that tracks it
LOOK_SECONDS = 2.0  # between two looks at files that grow
BUSY_SECONDS = 0.1  # and while a tracker has much to take
LONGEST_TOKEN = 4096
SLOW_SECONDS = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def track(where: Where, wanted: str | None, names: Sequence[str], options: Sequence[str]) -> int:
    """Pass the numbers of a job on to trackers until it is over, or until Ctrl-C."""
    for name in names:
        one_of("--to", name, tuple(KNOWN))
        module(KNOWN[name].package, KNOWN[name].imports)
    parameters = parsed(options, names)
    experiment = find_experiment(where, wanted)
    if experiment is None:
        raise experiments.missing(where.experiments, wanted)
    record = experiment.read_record()
    if not experiment.hold(TRACKING):
        raise UsageError(f"{experiment.name} is tracked already, by another process")
    passing: list[PassingOn] = []

    def begin(kind: type[PassingOn], record: JobRecord) -> None:
        failed = {each.to.name for each in passing if each.to.failed}
        for name in dict.fromkeys(name for name in names if name not in failed):
            each = kind(experiment, record, name, parameters.get(name, {}), say)
            passing.append(each)
            with said_if_slow(name):
                each.to.wait_open()

    try:
        for kind in (OfRanks, OfNodes):
            begin(kind, record)
        code = until_over(experiment, record, passing, begin)
    finally:
        for each in passing:
            if each.to.tried.is_set():
                each.to.close()
    for each in passing:
        each.keep()
    lines = sum(each.to.sent for each in passing)
    say(f"{plural(lines, 'line')} of {experiment.name} passed on to {', '.join(names)}")
    return EXIT_FAILED if any(each.to.failed for each in passing) else code


@contextlib.contextmanager
def said_if_slow(name: str) -> Iterator[None]:
    """Say that a tracker is waited for: some ask a server that is down for many minutes."""
    what = f"waiting for {name} to answer; Ctrl-C leaves, and the job continues"
    timer = threading.Timer(SLOW_SECONDS, say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def until_over(
    experiment: Experiment,
    record: JobRecord,
    passing: Sequence[PassingOn],
    begin: Callable[[type[PassingOn], JobRecord], None],
) -> int:
    """Look again and again; after Ctrl-C what was read before is still passed on.

    A tracker hears of a run for the later Trainers of a program when there is one.
    """
    asked = threading.Event()
    before = [signal.signal(number, lambda *_: asked.set()) for number in SIGNALS]
    passed = waits = more = False
    while True:
        if not more and OfLaterTrainers.are_there(experiment.path / "outputs"):
            more = True
            begin(OfLaterTrainers, record)
        results = [each.pass_on(record) for each in passing]
        whole = all(results)
        lost = all(each.to.failed for each in passing)
        if asked.is_set() or lost or (whole and record.over):
            break
        if not whole:
            if not waits:
                say("there is more than a tracker takes at once. Ctrl-C ends it, and later it goes"
                    f" on from there: orchestrator track {experiment.name}")  # fmt: skip
            waits = True
            asked.wait(BUSY_SECONDS)
            continue
        if not passed and not experiment.followed and not record.head_elsewhere:
            say(f"nobody follows {experiment.name}, so its numbers may stay on the nodes:"
                f" orchestrator attach {experiment.name}")  # fmt: skip
            passed = True
        asked.wait(LOOK_SECONDS)
        record = experiment.read_record()
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    return EXIT_STOPPED if asked.is_set() else EXIT_DONE


def parsed(options: Sequence[str], names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Read --set TRACKER.OPTION=VALUE."""
    found: dict[str, dict[str, Any]] = {}
    for option in options:
        key, equals, value = option.partition("=")
        tracker, dot, name = key.partition(".")
        if not (equals and dot and name and tracker in names):
            raise UsageError(
                f"--set {option}: not TRACKER.OPTION=VALUE with a tracker that --to names",
                f"such as: --set {names[0]}.{'project=p' if names[0] == 'wandb' else 'name=value'}",
            )
        found.setdefault(tracker, {})[name] = value
    return found


def metrics(where: Where, host: str, port: int, token_file: Path | None) -> int:
    """Serve the state of all jobs to Prometheus until Ctrl-C."""
    token = token_of(host, token_file)
    with needed("track --serve"):
        from orchestrator.views.serve import listen, serve
        from orchestrator.views.track import exposition
    listening = listen(host, port)
    say(f"http://{in_url(host)}:{listening.getsockname()[1]}/metrics, until Ctrl-C")
    jobs = exposition.Exposition(where.experiments, where.trust_record)
    serve(exposition.app(jobs, token), listening)
    return EXIT_DONE


def token_of(host: str, token_file: Path | None) -> str:
    if token_file is None:
        if is_loopback(host):
            return ""
        raise UsageError(
            f"on {host} anybody in the network could read the metrics",
            "put a long random word into a file and add --token-file FILE; in Prometheus:"
            " authorization: {credentials_file: FILE}",
        )
    try:
        token = token_file.read_text(encoding="ascii")[:LONGEST_TOKEN].strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise UsageError(f"{token_file} cannot be read: {reason}") from error
    if not token:
        raise UsageError(f"{token_file} is empty", "put a long random word into it")
    return token
