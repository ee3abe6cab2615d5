"""`orchestrator track`: the numbers of jobs for other programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
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
from orchestrator.views.track.passing_on import PassingOn, later_trainers

TRACKING = ".tracking"  # in the experiment: held by the one that tracks it
LOOK_SECONDS = 2.0  # between two looks at files that grow
LONGEST_TOKEN = 4096


def track(where: Where, wanted: str | None, names: Sequence[str], options: Sequence[str]) -> int:
    """Pass the numbers of a job on to trackers until it is over, or until Ctrl-C."""
    for name in names:
        one_of("--to", name, tuple(KNOWN))
        module(KNOWN[name].package, KNOWN[name].imports)
    parameters = parsed(options, names)
    experiment = find_experiment(where, wanted)
    if experiment is None:
        raise experiments.missing(where.experiments, wanted)
    if not experiment.hold(TRACKING):
        raise UsageError(f"{experiment.name} is tracked already, by another process")
    say(
        f"passing {experiment.name} on to {', '.join(names)}; Ctrl-C ends it, and the job continues"
    )
    tracking = Tracking(experiment, {name: parameters.get(name, {}) for name in names})
    code = EXIT_DONE
    try:
        tracking.until_over()
    except KeyboardInterrupt:
        code = EXIT_STOPPED
    finally:
        tracking.close()
    lines = sum(each.sent for each in tracking.passing.values())
    say(f"{plural(lines, 'line')} of {experiment.name} passed on to {', '.join(names)}")
    return EXIT_FAILED if tracking.failed else code


@dataclass
class Tracking:
    """A job, the trackers that it is passed on to, and those that failed."""

    experiment: Experiment
    options: Mapping[str, Mapping[str, Any]]  # of each tracker
    passing: dict[tuple[str, str], PassingOn] = field(default_factory=dict)  # kind, tracker
    failed: set[str] = field(default_factory=set)

    def until_over(self) -> None:
        """Look again and again."""
        record, warned = self.experiment.read_record(), False
        while True:
            self.look(record)
            if record.over or self.failed == self.options.keys():
                return
            if not warned and not self.experiment.followed and not record.head_elsewhere:
                say(
                    f"nothing follows {self.experiment.name}, so its numbers may stay on the"
                    f" nodes: orchestrator attach {self.experiment.name}"
                )
                warned = True
            time.sleep(LOOK_SECONDS)
            record = self.experiment.read_record()

    def look(self, record: JobRecord) -> None:
        """Pass on what is new, to each tracker that has not failed.

        A tracker hears of a run for the later Trainers of a program when there is one.
        """
        kinds = ["training", "nodes"]
        kinds += ["trainers"] * bool(later_trainers(self.experiment.path / "outputs"))
        for name, kind in product(self.options, kinds):
            if name in self.failed:
                continue
            what = "could not be opened, and gets no values"
            try:
                if (kind, name) not in self.passing:
                    own = PassingOn(self.experiment, record, kind, name, self.options[name])
                    self.passing[kind, name] = own
                what = "failed and is switched off from now on"
                self.passing[kind, name].pass_on(record)
            except UsageError:  # of an option that it does not know
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 (the network, a server)
                self.failed.add(name)
                say(f"WARNING: {name} {what}: {str(error) or type(error).__name__}")

    def close(self) -> None:
        for each in self.passing.values():
            if each.name not in self.failed:
                with contextlib.suppress(Exception):  # what was sent is sent
                    each.tracker.close()


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
