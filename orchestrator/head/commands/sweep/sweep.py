"""`orchestrator sweep`: starts members as long as there is room, and notes how each has ended.

A member is a launch of its own in a background process, which goes on if this one is killed. With
--queue the machines themselves say when there is room: a few members wait there, so that one of
them starts as soon as another ends.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import re
import shlex
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.common import files, interrupt
from orchestrator.common.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    OrchestratorError,
    UsageError,
    did_you_mean,
    import_optional,
)
from orchestrator.common.text import format_duration
from orchestrator.config.launch import (
    LaunchArguments,
    View,
    Where,
    command_words,
    in_one_line,
)
from orchestrator.head.background.process import INTERRUPT, Background
from orchestrator.head.commands import launching
from orchestrator.head.commands.stop import stop_job
from orchestrator.head.commands.sweep import journal as journals
from orchestrator.head.commands.sweep import space
from orchestrator.head.commands.sweep.journal import About, Journal, MemberState
from orchestrator.head.commands.sweep.space import Member, Variable
from orchestrator.head.connect import fleet
from orchestrator.head.follow.streams.node_logs import log_files
from orchestrator.head.screen import output, styles
from orchestrator.head.screen.events import say
from orchestrator.head.screen.output import Column, Table, Terminal, write_out
from orchestrator.head.start.nodes import ListedNodes, source_of
from orchestrator.head.start.request import resolve_request
from orchestrator.head.status.comparison import read_curves
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord
from orchestrator.records.metrics.curves import better_direction
from orchestrator.records.metrics.step_lines import GAP

# Members in the queue beside those that run: they have reached the nodes. As many as run, since
# members that began together end together.
LEAST_WAITING, MOST_WAITING = 2, 8
LOOK_SECONDS = 0.1
# A job that no process follows counts as lost after this time.
ALONE_SECONDS = 10.0
# The sweep ends if its first members cannot start.
MOST_VAIN = 3
NOT_STARTED, INTERRUPTED = "not started", "interrupted"
# The reason of a job that its time limit ended contains this text.
TIME_LIMIT = "(--time-limit)"
# The study's file is in the sweep's directory; trial N is member N.
STUDY = "optuna.log"


# -- where members come from ------------------------------------------------------------------


class OptunaStudy:
    """A study of Optuna, which chooses the values of members."""

    def __init__(self, place: Path, some: Sequence[Variable], trials: int, best: str) -> None:
        self.optuna = import_optional(
            "optuna", "optuna", "--optuna needs the package optuna, which"
        )
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        journal = self.optuna.storages.journal
        backend = journal.JournalFileBackend(str(place / STUDY))
        self.study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name=place.name,
            direction="minimize" if best == "least" else "maximize",
        )
        known = self.optuna.distributions
        self.space = {
            one.name: known.CategoricalDistribution(one.values)
            if one.values
            else known.FloatDistribution(one.low, one.high, log=one.log)
            for one in some
        }
        self.trials = trials

    def __len__(self) -> int:
        return self.trials

    def __getitem__(self, number: int) -> Member:
        params = self.study.ask(self.space).params
        return Member(number, {name: str(params[name]) for name in self.space})

    def tell(self, end: MemberState) -> None:
        """Report the result of a member to Optuna; without a value, the trial has failed."""
        state = self.optuna.trial.TrialState["COMPLETE" if end.is_known else "FAIL"]
        self.study.tell(end.member, end.value if end.is_known else None, state=state)


# -- the sweep --------------------------------------------------------------------------------


@dataclass
class StartedMember:
    """A member that was started: it waits in the queue until it has a place."""

    member: Member
    # The head of its job.
    process: Background
    place: Path | None = None
    # The number of times that Ctrl-C was sent to it.
    pressed: int = 0

    def state(self, state: str, **found: Any) -> MemberState:
        return MemberState(
            self.member.number, self.member.words, state, dict(self.member.values), **found
        )


@dataclass
class Sweep:
    """A sweep that this process leads."""

    journal: Journal
    supply: Sequence[Member] | OptunaStudy
    arguments: Callable[[Member], tuple[LaunchArguments, list[str]]]
    jobs: int | None = None
    metric: str = ""
    show: Callable[[Sweep, MemberState], None] = lambda *_: None
    started: dict[int, StartedMember] = field(default_factory=dict)
    ends: dict[int, MemberState] = field(default_factory=dict)
    heard: queue.SimpleQueue[MemberState] = field(default_factory=queue.SimpleQueue)
    interrupts: int = 0

    def __post_init__(self) -> None:
        self.left = deque(range(len(self.supply)))

    def run(self) -> int:
        """Run the sweep until all members have ended, or until it is stopped."""
        before = {number: signal.signal(number, self.interrupted) for number in interrupt.SIGNALS}
        try:
            while self.started or (self.left and not self.over):
                while self.left and not self.over and self.has_room:
                    self.start(self.supply[self.left.popleft()])
                with contextlib.suppress(queue.Empty):
                    self.end(self.heard.get(timeout=LOOK_SECONDS))
                self.press()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.interrupts:
            return EXIT_STOPPED
        done = all(end.state == "done" for end in self.ends.values())
        return EXIT_DONE if done and not self.left else EXIT_FAILED

    def interrupted(self, *_: object) -> None:
        self.interrupts += 1

    @property
    def over(self) -> bool:
        """Return True if no further member is started."""
        vain = [end.state == NOT_STARTED for end in self.ends.values()]
        return bool(self.interrupts) or (all(vain) and len(vain) >= MOST_VAIN)

    @property
    def has_room(self) -> bool:
        if self.jobs is not None:
            return len(self.started) < self.jobs
        waiting = sum(one.place is None for one in self.started.values())
        return waiting < min(max(LEAST_WAITING, len(self.started) - waiting), MOST_WAITING)

    def start(self, member: Member) -> None:
        arguments, command = self.arguments(member)
        process = Background(launching.launch, arguments=arguments, command=command, of_sweep=True)
        one = self.started[member.number] = StartedMember(member, process)
        self.journal.add(one.state("not over"))
        fleet.start_thread(lambda: self.heard.put(self.end_of(one)))

    def end_of(self, one: StartedMember) -> MemberState:
        """Wait until a member has ended, in a thread of its own, and return how."""
        try:
            one.place = Path(one.process.answer(lambda _: None)["place"])
        except OrchestratorError as error:
            state = INTERRUPTED if self.interrupts else NOT_STARTED
            return one.state(state, problem=error.what)
        # Its head reports its own error in head.txt.
        with contextlib.suppress(OrchestratorError):
            one.process.answer(lambda _: None)
        experiment, followed = Experiment(one.place), time.monotonic()
        try:
            while not (record := experiment.read_record()).over:
                # An attach follows the job.
                if experiment.followed:
                    followed = time.monotonic()
                elif time.monotonic() > followed + ALONE_SECONDS:
                    problem = f"no process follows it: orchestrator attach {experiment.name}"
                    return one.state("lost", experiment=experiment.name, problem=problem)
                time.sleep(LOOK_SECONDS)
        except OrchestratorError as error:
            return one.state("lost", experiment=experiment.name, problem=error.what)
        return self.end_of_job(one, experiment, record)

    def end_of_job(
        self, one: StartedMember, experiment: Experiment, record: JobRecord
    ) -> MemberState:
        state, problem = record.state, record.verdict.message if record.verdict else ""
        if TIME_LIMIT in problem:
            # The user set the time limit, so its end is a success.
            state, problem = "done", ""
        elif state == "stopped" and self.interrupts:
            state, problem = INTERRUPTED, ""
        value, unknown = None, ""
        if self.metric:
            value, unknown = last_value(experiment, record, self.metric)
        return one.state(
            state,
            value=value,
            seconds=round((record.ended or record.started) - record.started, 1),
            experiment=experiment.name,
            problem=problem or unknown * (self.metric != USUAL),
        )

    def end(self, end: MemberState) -> None:
        self.journal.add(end)
        self.ends[end.member] = end
        del self.started[end.member]
        if isinstance(self.supply, OptunaStudy):
            self.supply.tell(end)
        self.show(self, end)

    def press(self) -> None:
        """Forward each Ctrl-C to the members: each head stops its job with proof."""
        if not self.interrupts and self.journal.stop_is_asked:
            self.interrupts = 1
        for one in self.started.values():
            if one.pressed < self.interrupts:
                one.process.press(INTERRUPT)
                one.pressed += 1


# -- the metric: a Trainer's, or one that a program prints ------------------------------------

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
LONGEST_LINE = 1 << 16


def last_value(experiment: Experiment, record: JobRecord, metric: str) -> tuple[float | None, str]:
    """Return the last value of a metric, or None and the reason."""
    known = read_curves(experiment)
    values = known[metric].means if metric in known else []
    if not values:
        logs = log_files(experiment, record.nodes)
        values = [value for log in logs for value in printed(log.text, metric)]
    if not values:
        return None, f"nothing measured or printed {metric}{did_you_mean(metric, known)}"
    if not math.isfinite(values[-1]):
        return None, f"the last {metric} is {values[-1]}"
    return values[-1], ""


def printed(log: Path, metric: str) -> Iterator[float]:
    """Yield the values that lines of a log give a metric: val_bpb: 0.98, val_bpb=0.98."""
    name = re.escape(metric)
    wanted = re.compile(rf"(?<![\w./-]){name}[\"']?{GAP}[:=]?{GAP}{NUMBER}(?![\w.])", re.I)
    with contextlib.suppress(OSError), files.open_plain(log) as file:
        for line in io.TextIOWrapper(file, "utf-8", "replace"):
            for match in wanted.finditer(line[:LONGEST_LINE]):
                yield float(match[1])


# -- begin and stop it -----------------------------------------------------------------------------

# One node each, held whole or in part, first come first served; started again once.
DEFAULTS = {"nnodes": 1, "claim": "all", "queue": True, "sync": "always", "max_restarts": 1}
STOP_SECONDS = 600.0
# The metric that members are compared by, unless the user names another.
USUAL = "loss"


@dataclass(frozen=True)
class Terms:
    """The options of a sweep itself, beside those of its launches."""

    variables: Sequence[Variable] = ()
    optuna: int | None = None
    way: str = "args"
    jobs: int | None = None
    metric: str = ""
    # "least" or "most".
    best: str = ""


def begin_sweep(base: LaunchArguments, terms: Terms, members: Sequence[Member] | None) -> int:
    """Begin a sweep of members with programs of their own, or of one program with values."""
    base.refuse({"detach": "leaves one launch; tmux or nohup keep a sweep"})
    metric = terms.metric or USUAL * (not terms.best and terms.optuna is None)
    terms = replace(terms, metric=metric, best=terms.best or better_direction(metric))
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
        members = space.grid_members(terms.variables)
    options = {"name": "sweep", **DEFAULTS, **base.launch}
    # Such members claim nothing, so there is nothing to queue for.
    if options["claim"] == "none":
        options["queue"] = False
        if terms.jobs is None:
            raise UsageError("--claim none needs --jobs", "add --jobs N")
    base = replace(base, launch=options)
    any_values = {variable.name: "1" for variable in terms.variables}
    check(base, terms, members[0] if members else Member(0, any_values))
    if base.dry_run:
        return show(base, terms, members or [])
    count = len(members) if members is not None else terms.optuna or 0
    about = About(terms.metric, terms.best, count)
    journal = journals.create_journal(base.where.experiments, str(options["name"]), about)
    say(f"{journal.name} is in {output.short_path(journal.path)}")
    Experiment(journal.path).lock()
    return lead(journal, base, terms, members)


def lead(
    journal: Journal, base: LaunchArguments, terms: Terms, members: Sequence[Member] | None
) -> int:
    supply = members or OptunaStudy(journal.path, terms.variables, terms.optuna or 0, terms.best)
    sweep = Sweep(
        journal,
        supply,
        lambda member: launch_of(base, terms, journal.name, member),
        jobs=terms.jobs,
        metric=terms.metric,
        show=report_end,
    )
    code = sweep.run()
    write_out(to_text(sweep, terms.best, output.terminal_of()))
    say(f"compare: orchestrator report {journal.name}; ls --all --tag {journal.name}")
    output.print_result(to_json(sweep, terms.best, code))
    return code


def stop_sweep(where: Where, journal: Journal, grace: float | None) -> int:
    """Stop a sweep by the process that leads it; without one, stop the members that still run."""
    experiment = Experiment(journal.path)
    if not experiment.followed:
        running = [one for one in experiments.list_experiments(where) if runs_in(journal, one)]
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
    launch = {"note": in_one_line(member.words), **base.launch}
    if any(word.startswith("launch.note=") for word in base.overrides):
        del launch["note"]
    launch["name"] = f"{launch['name']}-{member.number}"
    launch["tag"] = (*launch.get("tag", ()), sweep)
    arguments = replace(
        base,
        dry_run=False,
        program=() if engine else program,
        # The words of the built-in engine's members are overrides of its config.
        overrides=(*base.overrides, *(program if engine else ())),
        env=(*base.env, *env, f"ORCHESTRATOR_SWEEP={sweep}"),
        view=View(quiet=True),
        launch=launch,
    )
    return arguments, ["master_launch", *command_words(arguments)]


def check(base: LaunchArguments, terms: Terms, member: Member) -> None:
    """Raise if the members could not start; set the secrets that the user typed for all."""
    request = resolve_request(*launch_of(base, terms, "SWEEP", member))
    if not isinstance(source_of(request), ListedNodes):
        raise UsageError(
            "a sweep shares the machines of a node list, and these are a scheduler's",
            "give each member a job of its own there: sbatch --array",
        )
    for setting in request.env:
        # The secret was read once, and is set for all members.
        if setting.why == "--secret":
            os.environ[setting.name] = setting.value


# -- what is shown ----------------------------------------------------------------------------

BEST, FAILED, LONGEST = 5, 3, 60
BAD = ("failed", "lost", "not started")


def show(base: LaunchArguments, terms: Terms, members: Sequence[Member]) -> int:
    """Print what the members would be."""
    commands = [launch_of(base, terms, "SWEEP", member)[1] for member in members]
    chosen = f"{terms.optuna} members, whose values Optuna chooses"
    output.print_result(commands, lambda _: "\n".join(map(shlex.join, commands)) or chosen)
    return EXIT_DONE


def report_end(sweep: Sweep, end: MemberState) -> None:
    """Print how a member has ended."""
    value = f", {sweep.metric} {end.value:.6g}" if end.value is not None else ""
    why = f": {first_line(end.problem)}" if end.problem else ""
    took = f" after {format_duration(end.seconds)}" if end.experiment else ""
    of = f"{len(sweep.ends)}/{len(sweep.supply)}"
    say(f"{of}: {end.member} ({cut(end.words)}) {end.state}{took}{value}{why}")


def ranked(sweep: Sweep, best: str) -> list[MemberState]:
    """Return the best members, the best first."""
    known = [end for end in sweep.ends.values() if end.is_known]
    return sorted(known, key=lambda end: end.value or 0.0, reverse=best == "most")[:BEST]


def to_text(sweep: Sweep, best: str, terminal: Terminal) -> str:
    """Return the summary, the best members and those that failed last."""
    counts = Counter(end.state for end in sweep.ends.values())
    parts = [*sorted(counts.items()), ("not begun", len(sweep.left))]
    words = ", ".join(f"{count} {state}" for state, count in parts if count)
    bad = [end for end in sweep.ends.values() if end.state in BAD][-FAILED:]
    # Without a value that compares them, the first members stand for all.
    others = [end for end in sweep.ends.values() if end.state == "done"][:BEST]
    rows = [*(ranked(sweep, best) or others), *bad]
    table = Table[MemberState](
        (
            Column("MEMBER", lambda end: str(end.member), right=True),
            Column("VALUES", lambda end: cut(end.words), least=16),
            Column("STATE", lambda end: (end.state, styles.STATES.get(end.state, ""))),
            Column(sweep.metric, lambda e: "" if e.value is None else f"{e.value:.6g}", right=True),
            Column(
                "EXPERIMENT",
                lambda end: end.experiment or first_line(end.problem),
                drop=1,
                least=20,
            ),
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
