"""`orchestrator sweep`: begin a sweep from what was typed; `orchestrator stop` for a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.common import hiding
from orchestrator.common.errors import EXIT_DONE, OrchestratorError, UsageError
from orchestrator.config.label import LONGEST_NOTE, shown
from orchestrator.config.launch import LaunchArguments, View, Where, words_of
from orchestrator.head.background.process import Answers, Background
from orchestrator.head.commands import follow
from orchestrator.head.commands.stop import stop as stop_job
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep import space, table
from orchestrator.head.commands.sweep.journal import About, Journal
from orchestrator.head.commands.sweep.space import Member
from orchestrator.head.commands.sweep.sweep import LOOK_SECONDS, ListedMembers, Supply, Sweep
from orchestrator.head.plan import redact
from orchestrator.head.screen import output
from orchestrator.head.screen.output import say, write_out
from orchestrator.head.start.nodes import ListedNodes, source_of
from orchestrator.head.start.request import Request, resolve
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics.names import better

# One node each, held whole or in part, first come first served; started again once.
DEFAULTS = {"nnodes": 1, "claim": "all", "queue": True, "sync": "always", "max_restarts": 1}
STOP_SECONDS = 600.0


@dataclass(frozen=True)
class Terms:
    """The options of a sweep itself, beside those of its launches."""

    variables: tuple[str, ...] = ()  # NAME=VALUES
    optuna: int | None = None
    way: str = "args"
    jobs: int | None = None
    metric: str = ""
    best: str = ""  # least or most

    @property
    def checked(self) -> Terms:
        """Refuse what contradicts itself; decide which value of the metric is the best."""
        best = self.best or better(self.metric)
        if (self.best or self.optuna is not None) and not self.metric:
            raise UsageError("there is no number to compare members by", "add --metric NAME")
        if self.metric and not best:
            raise UsageError(
                f"it is not known whether more or less {self.metric} is better",
                "add --minimize or --maximize",
            )
        return replace(self, best=best)

    def members(self) -> list[Member] | None:
        """Return all members; None where Optuna chooses them one by one."""
        some = space.variables(self.variables)
        if not some:
            raise UsageError(
                "nothing varies",
                "--grid lr=1e-4,3e-4, or a file with a command line for each member",
            )
        return None if self.optuna is not None else space.grid(some)


def begin(base: LaunchArguments, terms: Terms, members: Sequence[Member] | None) -> int:
    """Begin a sweep of members with programs of their own, or of one program with values."""
    terms = terms.checked
    listed = terms.members() if members is None else list(members)
    detach, base = base.detach, replace(base, detach=False)
    options = {"name": "sweep", **DEFAULTS, **base.launch}
    if options["claim"] == "none":  # such members hold nothing that a queue could wait for
        options["queue"] = False
        if terms.jobs is None:
            raise UsageError("--claim none goes with a number of members at once", "add --jobs N")
    base = replace(base, launch=options)
    names = [text.partition("=")[0] for text in terms.variables]
    first = listed[0] if listed else Member(0, dict.fromkeys(names, "1"))
    check(resolve(*launch_of(base, terms, "SWEEP", first)), words_of(base))
    if base.dry_run:
        return show(base, terms, listed or [])
    count = len(listed) if listed is not None else terms.optuna or 0
    about = About(terms.metric, terms.best, count)
    journal = journals.create(base.where.experiments, str(options["name"]), about)
    say(f"{journal.name} is in {output.path(journal.path)}")
    if not detach:
        Experiment(journal.path).lock()
        return lead(journal, base, terms, listed)
    head = Background(sweep_leader, path=journal.path, plan=(base, terms, listed))
    answer = head.answer(say)
    head.hang_up()
    said = output.path(journal.path / follow.SAID)
    say(f"background process {answer['pid']} leads it; what it says is in {said}")
    say(f"stop it: orchestrator stop {journal.name}")
    return EXIT_DONE


def sweep_leader(answers: Answers, path: Path, plan: tuple[Any, Any, Any]) -> None:
    """Lead a sweep without a terminal."""
    experiment = Experiment(path)
    follow.speak_into(experiment, "leads this sweep")
    experiment.lock()
    answers.send(pid=os.getpid())
    lead(Journal(path), *plan)


def lead(
    journal: Journal, base: LaunchArguments, terms: Terms, members: Sequence[Member] | None
) -> int:
    sweep = Sweep(
        journal,
        ListedMembers(members) if members is not None else optimizer_of(journal, terms),
        lambda member: launch_of(base, terms, journal.name, member),
        jobs=terms.jobs,
        metric=terms.metric,
        show=table.line,
    )
    with contextlib.redirect_stdout(sys.stderr) if base.as_json else contextlib.nullcontext():
        code = sweep.run()
        write_out(table.text(sweep, terms.best, output.terminal()))
        say(f"compare: orchestrator report {journal.name}; ls --all --tag {journal.name}")
    if base.as_json:
        write_out(json.dumps(table.to_json(sweep, terms.best, code), indent=1))
    return code


def optimizer_of(journal: Journal, terms: Terms) -> Supply:
    from orchestrator.head.commands.sweep.optimizer import Optimizer  # it takes a second to load

    some = space.variables(terms.variables)
    return Optimizer(journal.path, some, terms.optuna or 0, terms.best)


def stop(where: Where, journal: Journal, grace: float | None) -> int:
    """Stop a sweep by the process that leads it; without one, stop the members that still run."""
    experiment = Experiment(journal.path)
    if not experiment.followed:
        running = [one for one in experiments.every(where.experiments) if runs_in(journal, one)]
        return max((stop_job(where, str(one.path), grace=grace) for one in running), default=0)
    journal.ask_to_stop()
    deadline = time.monotonic() + STOP_SECONDS
    while experiment.followed:
        if time.monotonic() > deadline:
            raise OrchestratorError(
                f"{journal.name} is still not stopped after {STOP_SECONDS:.0f} s",
                f"stop its members: orchestrator ls --all --tag {journal.name}",
            )
        time.sleep(LOOK_SECONDS)
    say(f"{journal.name} is stopped")
    return EXIT_DONE


def runs_in(journal: Journal, experiment: Experiment) -> bool:
    """Return True for a member of the sweep that is not over."""
    with contextlib.suppress(OrchestratorError, OSError):
        record = experiment.read_record()
        return journal.name in record.launch.tag and not record.over
    return False


# -- launches ---------------------------------------------------------------------------------


def launch_of(
    base: LaunchArguments, terms: Terms, sweep: str, member: Member
) -> tuple[LaunchArguments, list[str]]:
    """Return the launch of a member, and the command line that would start it."""
    engine = not (base.program or member.program or base.module)
    way = "hydra" if engine and terms.way == "args" else terms.way
    program, env = space.command_of(member.program or base.program, member.values, way)
    overrides = (*base.overrides, *(program if engine else ()))  # of its config
    launch = {"note": shown(member.words)[:LONGEST_NOTE], **base.launch}
    if any(word.startswith("launch.note=") for word in base.overrides):
        del launch["note"]
    arguments = replace(
        base,
        as_json=False,
        dry_run=False,
        program=() if engine else program,
        overrides=overrides,
        env=(*base.env, *env, f"ORCHESTRATOR_SWEEP={sweep}"),
        view=View(quiet=True),
        launch={
            **launch,
            "name": f"{launch['name']}-{member.number}",
            "tag": (*launch.get("tag", ()), sweep),
        },
    )
    return arguments, ["master_launch", *words_of(arguments)]


def check(request: Request, words: Sequence[str]) -> None:
    """Refuse a sweep whose members could not be started, or whose file would have a secret."""
    if not isinstance(source_of(request), ListedNodes):
        raise UsageError(
            "a sweep shares the machines of a node list, and these are a scheduler's",
            "give each member a job of its own there: sbatch --array",
        )
    words = list(words)
    if redact.redacted_command(hiding.hide(words, request.secrets)) != words:
        raise UsageError(
            "the command line has a secret, and a sweep writes down what its members are",
            "export it, and write --secret NAME",
        )
    for setting in request.env:
        if setting.why == "--secret":  # it was asked for once, and is for all members
            os.environ[setting.name] = setting.value


def show(base: LaunchArguments, terms: Terms, members: Sequence[Member]) -> int:
    """Print what the members would be."""
    commands = [launch_of(base, terms, "SWEEP", member)[1] for member in members]
    if base.as_json:
        write_out(json.dumps(commands, indent=1))
    elif commands:
        write_out("\n".join(map(shlex.join, commands)))
    else:
        write_out(f"{terms.optuna} members, whose values Optuna chooses")
    return EXIT_DONE
