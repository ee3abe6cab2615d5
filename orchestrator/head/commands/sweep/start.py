"""`orchestrator sweep`: begin a sweep, show how it goes; `orchestrator stop` for a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.common.errors import EXIT_DONE, OrchestratorError, UsageError
from orchestrator.common.text import duration
from orchestrator.config.launch import (
    LONGEST_NOTE,
    LaunchArguments,
    View,
    Where,
    in_one_line,
    words_of,
)
from orchestrator.head.commands.stop import stop as stop_job
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep import space
from orchestrator.head.commands.sweep.journal import About, Journal, MemberState
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.commands.sweep.sweep import LOOK_SECONDS, Optimizer, Sweep
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.output import Column, Table, Terminal, say, write_out
from orchestrator.head.start.nodes import ListedNodes, source_of
from orchestrator.head.start.request import resolve
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment
from orchestrator.records.metrics.curves import better

# One node each, held whole or in part, first come first served; started again once.
DEFAULTS = {"nnodes": 1, "claim": "all", "queue": True, "sync": "always", "max_restarts": 1}
STOP_SECONDS = 600.0


@dataclass(frozen=True)
class Terms:
    """The options of a sweep itself, beside those of its launches."""

    variables: Sequence[Variable] = ()
    optuna: int | None = None
    way: str = "args"
    jobs: int | None = None
    metric: str = ""
    best: str = ""  # least or most


def begin(base: LaunchArguments, terms: Terms, members: Sequence[Member] | None) -> int:
    """Begin a sweep of members with programs of their own, or of one program with values."""
    base.refuse({"detach": "leaves one launch; tmux or nohup keep a sweep"})
    terms = replace(terms, best=terms.best or better(terms.metric))
    if (terms.best or terms.optuna is not None) and not terms.metric:
        raise UsageError("there is no number to compare members by", "add --metric NAME")
    if terms.metric and not terms.best:
        raise UsageError(
            f"it is not known whether more or less {terms.metric} is better",
            "add --minimize or --maximize",
        )
    if members is None and not terms.variables:
        raise UsageError(
            "nothing varies", "--grid lr=1e-4,3e-4, or a file with a command line for each member"
        )
    if members is None and terms.optuna is None:
        members = space.grid(terms.variables)
    options = {"name": "sweep", **DEFAULTS, **base.launch}
    if options["claim"] == "none":  # such members hold nothing that a queue could wait for
        options["queue"] = False
        if terms.jobs is None:
            raise UsageError("--claim none goes with a number of members at once", "add --jobs N")
    base = replace(base, launch=options)
    any_values = {variable.name: "1" for variable in terms.variables}
    check(base, terms, members[0] if members else Member(0, any_values))
    if base.dry_run:
        return show(base, terms, members or [])
    count = len(members) if members is not None else terms.optuna or 0
    about = About(terms.metric, terms.best, count)
    journal = journals.create(base.where.experiments, str(options["name"]), about)
    say(f"{journal.name} is in {output.path(journal.path)}")
    Experiment(journal.path).lock()
    return lead(journal, base, terms, members)


def lead(
    journal: Journal, base: LaunchArguments, terms: Terms, members: Sequence[Member] | None
) -> int:
    supply = members or Optimizer(journal.path, terms.variables, terms.optuna or 0, terms.best)
    sweep = Sweep(
        journal,
        supply,
        lambda member: launch_of(base, terms, journal.name, member),
        jobs=terms.jobs,
        metric=terms.metric,
        show=report_end,
    )
    with contextlib.redirect_stdout(sys.stderr) if base.as_json else contextlib.nullcontext():
        code = sweep.run()
        write_out(to_text(sweep, terms.best, output.terminal()))
        say(f"compare: orchestrator report {journal.name}; ls --all --tag {journal.name}")
    if base.as_json:
        write_out(json.dumps(to_json(sweep, terms.best, code), indent=1))
    return code


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
    launch = {"note": in_one_line(member.words)[:LONGEST_NOTE], **base.launch}
    if any(word.startswith("launch.note=") for word in base.overrides):
        del launch["note"]
    launch["name"] = f"{launch['name']}-{member.number}"
    launch["tag"] = (*launch.get("tag", ()), sweep)
    arguments = replace(
        base,
        as_json=False,
        dry_run=False,
        program=() if engine else program,
        overrides=(*base.overrides, *(program if engine else ())),  # of its config
        env=(*base.env, *env, f"ORCHESTRATOR_SWEEP={sweep}"),
        view=View(quiet=True),
        launch=launch,
    )
    return arguments, ["master_launch", *words_of(arguments)]


def check(base: LaunchArguments, terms: Terms, member: Member) -> None:
    """Refuse a sweep whose members could not be started; keep a secret that was asked for."""
    request = resolve(*launch_of(base, terms, "SWEEP", member))
    if not isinstance(source_of(request), ListedNodes):
        raise UsageError(
            "a sweep shares the machines of a node list, and these are a scheduler's",
            "give each member a job of its own there: sbatch --array",
        )
    for setting in request.env:
        if setting.why == "--secret":  # it was asked for once, and is for all members
            os.environ[setting.name] = setting.value


# -- what is shown ----------------------------------------------------------------------------

BEST, FAILED, LONGEST = 5, 3, 60
BAD = ("failed", "lost", "not started")


def show(base: LaunchArguments, terms: Terms, members: Sequence[Member]) -> int:
    """Print what the members would be."""
    commands = [launch_of(base, terms, "SWEEP", member)[1] for member in members]
    words = "\n".join(map(shlex.join, commands))
    chosen = f"{terms.optuna} members, whose values Optuna chooses"
    write_out(json.dumps(commands, indent=1) if base.as_json else words or chosen)
    return EXIT_DONE


def report_end(sweep: Sweep, end: MemberState) -> None:
    """Print how a member has ended."""
    value = f", {sweep.metric} {end.value:.6g}" if end.value is not None else ""
    why = f": {first_line(end.problem)}" if end.problem else ""
    of = f"{len(sweep.ends)}/{len(sweep.supply)}"
    took = f" after {duration(end.seconds)}" if end.experiment else ""
    say(f"{of}: {end.member} ({cut(end.words)}) {end.state}{took}{value}{why}")


def ranked(sweep: Sweep, best: str) -> list[MemberState]:
    """Return the best members, the best first."""
    sign = -1 if best == "most" else 1
    known = [end for end in sweep.ends.values() if end.is_known]
    return sorted(known, key=lambda end: sign * (end.value or 0.0))[:BEST]


def to_text(sweep: Sweep, best: str, terminal: Terminal) -> str:
    """Return the summary, the best members and those that failed last."""
    counts = Counter(end.state for end in sweep.ends.values())
    parts = {**dict(sorted(counts.items())), "not begun": len(sweep.left)}
    words = ", ".join(f"{count} {state}" for state, count in parts.items() if count)
    bad = [end for end in sweep.ends.values() if end.state in BAD]
    rows = [*ranked(sweep, best), *bad[-FAILED:]]
    table = Table[MemberState](
        (
            Column("MEMBER", lambda end: str(end.member), right=True),
            Column("VALUES", lambda end: cut(end.words)),
            Column("STATE", lambda end: (end.state, styles.STATES.get(end.state, ""))),
            Column(sweep.metric, lambda e: "" if e.value is None else f"{e.value:.6g}", right=True),
            Column("EXPERIMENT", lambda end: end.experiment or first_line(end.problem)),
        )
    )
    return f"{sweep.journal.name}: {words}\n{table.text(rows, terminal) if rows else ''}".rstrip()


def to_json(sweep: Sweep, best: str, code: int) -> dict[str, Any]:
    return {
        "sweep": sweep.journal.name,
        "directory": str(sweep.journal.path),
        "metric": sweep.metric or None,
        "best": next((vars(end) for end in ranked(sweep, best)), None),
        "members": [vars(sweep.ends[number]) for number in sorted(sweep.ends)],
        "left": len(sweep.left),
        "exit_code": code,
    }


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def cut(text: str) -> str:
    text = in_one_line(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
