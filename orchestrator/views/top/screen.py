"""The screen of `orchestrator top`: tables whose cells change, and what the keys do.

textual draws it. A thread looks at the nodes; the screen only ever shows what it found last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Label, RichLog, Static

from orchestrator.common.errors import OrchestratorError
from orchestrator.common.text import plural
from orchestrator.head.screen.output import Table, printable
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.tail import More
from orchestrator.views.top import table
from orchestrator.views.top.heat import heat_map
from orchestrator.views.top.rows import HEAD, Rows
from orchestrator.views.top.sample import JobSample, NodeSample, Sample

R = TypeVar("R")
HELP = [
    "arrows, page up and down   choose a row",
    "tab                        go from jobs to nodes and back",
    "enter                      closer: a job's ranks; a node's GPUs, then their",
    "                           processes, then the stack of one",
    "escape                     back",
    "/                          show only rows with a word; escape shows all",
    "o                          sort by the next column, the most first",
    "l                          follow the log of a job, a rank, or a node's job",
    "t                          the stack of a rank or of a process",
    "r                          the ranks of a job",
    "e                          what happened so far",
    "s                          stop a job, after asking",
    "? h F1                     this list",
    "q                          quit; everything keeps running",
    "",
    "Green is in use, yellow nearly all of it; red is not well.",
    "A small terminal has no room for all columns; enter shows the rest.",
]
AROUND = 3  # lines: the heading, the one between the tables, the keys
LEAST_ROWS = 4  # of a table, with its headings
LOG_SECONDS = 0.5  # between two looks at a log
KEPT_LINES = 5000  # of a log that is followed


@dataclass(frozen=True)
class Actions:
    """The actions of the keys; each may take a while, and may raise an OrchestratorError."""

    log: Callable[[JobSample, RankProgress | None, str], More]  # of a rank, a node, or all
    stack: Callable[[JobSample, RankProgress], Sequence[str]]
    process: Callable[[str, int], Sequence[str]]  # the stack of a process on a node
    events: Callable[[JobSample], Sequence[str]]
    stop: Callable[[JobSample], str]
    over: Callable[[str], bool]  # as far as the record of that job tells


class Question(ModalScreen[bool]):
    """Asks before something is ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]
    CSS = """
    Question { align: center middle; }
    Question Label { border: round $warning; padding: 1 3; }
    """

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def compose(self) -> ComposeResult:
        yield Label(Text(f"{self.words}  (y/n)"))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Lines(ModalScreen[None]):
    """Shows lines of text until a key closes it; of a log, those that come, too."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]

    def __init__(
        self, title: str, lines: Sequence[str], *, from_end: bool = False, more: More | None = None
    ) -> None:
        super().__init__()
        self.heading, self.lines, self.more = title, lines, more
        self.log_of = RichLog(wrap=False, auto_scroll=from_end, max_lines=KEPT_LINES)
        self.over = Event()

    def compose(self) -> ComposeResult:
        yield Static(Text(self.heading, style="bold"))
        yield self.log_of
        yield Footer()

    def on_mount(self) -> None:
        self.add(self.lines)
        self.log_of.focus()
        if self.more is not None:
            self.follow(self.more)

    def on_unmount(self) -> None:
        self.over.set()

    @work(thread=True)
    def follow(self, more: More) -> None:
        while not self.over.is_set():
            if (lines := more()) and not self.over.is_set():
                self.app.call_from_thread(self.add, lines)
            self.over.wait(LOG_SECONDS)

    def add(self, lines: Sequence[str]) -> None:
        """Add lines; whoever has scrolled up stays there."""
        log = self.log_of
        follows = log.auto_scroll or (self.more is not None and log.is_vertical_scroll_end)
        for line in lines:
            log.write(Text(printable(line)), scroll_end=follows)


class JobKeys:
    """Does what the keys say with the chosen job, and with its rank where ranks are shown."""

    app: Any

    def subject(self) -> tuple[JobSample, RankProgress | None] | None:
        """Return what the keys are about; nothing where no job is there, which is said."""
        raise NotImplementedError

    def action_log(self) -> None:
        if subject := self.subject():
            self.app.follow(title(*subject), lambda: self.app.actions.log(*subject, ""))

    def action_events(self) -> None:
        if subject := self.subject():
            job = subject[0]
            heading = f"{title(job, None)}: events"
            self.app.read(heading, lambda: self.app.actions.events(job), from_end=True)

    def action_stop(self) -> None:
        if subject := self.subject():
            self.app.ask_to_stop(subject[0])


class Closer(ModalScreen[None]):
    """Shows one thing closer: a line about it, and a table of its parts."""

    CSS = """
    Closer Static { color: $text-muted; height: 1; }
    Closer Rows { height: 1fr; max-height: 100%; }
    """

    def __init__(self, headings: Sequence[str]) -> None:
        super().__init__()
        self.heading, self.rows = Static(""), Rows(headings)

    def compose(self) -> ComposeResult:
        yield self.heading
        yield self.rows
        yield Footer()

    def on_mount(self) -> None:
        self.rows.focus()


class Ranks(JobKeys, Closer):
    """The ranks of one job; the slow ones say so."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", "back"),
        Binding("l", "log", "log of the rank"),
        Binding("t", "stack", "its stack"),
        Binding("e", "events", "events"),
        Binding("s", "stop", "stop the job"),
    ]

    def __init__(self, job: JobSample, *, alone: bool) -> None:
        super().__init__(table.RANKS.headings)
        self.job, self.alone = job, alone

    def on_mount(self) -> None:
        self.show(self.job)

    def show(self, job: JobSample) -> None:
        self.job = job
        self.heading.update(Text(printable(table.job_words(job))))
        self.rows.fill([table.RANKS.cells(rank) for rank in job.ranks])

    def subject(self) -> tuple[JobSample, RankProgress | None]:
        at = self.rows.cursor_row
        return self.job, self.job.ranks[at] if 0 <= at < len(self.job.ranks) else None

    def action_back(self) -> None:
        if self.alone:
            self.app.exit()
        else:
            self.dismiss()

    def action_stack(self) -> None:
        job, rank = self.subject()
        if rank is not None:
            heading = f"{title(job, rank)}: stack"  # the line that runs stands first
            self.app.read(heading, lambda: self.app.actions.stack(job, rank))


class Parts(Closer):
    """The GPUs of one node and what runs on them; enter goes on to the stack of a process."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("enter", "closer", "closer"),
        Binding("t", "stack", "stack"),
        Binding("l", "log", "log"),
    ]
    app: Top

    def __init__(self, node: NodeSample, gpu: str | None = None) -> None:
        super().__init__(table.PARTS.headings)
        self.node, self.gpu = node, gpu
        self.parts: list[table.Part] = []

    def on_mount(self) -> None:
        self.show(self.node)

    def show(self, node: NodeSample) -> None:
        self.node, self.parts = node, table.parts_of(node, self.gpu)
        problem = " -> ".join(filter(None, [node.problem, node.fix]))
        nothing = problem or ("nothing runs here" if node.checkup else "connecting ...")
        cells = dict(zip(table.NODES.headings, table.NODES.words(node), strict=True))
        known = [" ".join([name.lower(), *cells[name].split()]) for name in ("CPU", "MEMORY")]
        words = nothing if not self.parts else "   ".join(known)
        self.heading.update(Text(printable(f"{node.name}   {words}")))
        parts = table.PARTS.fitted(self.parts, self.app.size.width)
        self.rows.fill(
            [parts.cells(part) for part in self.parts], parts.headings, self.app.size.width
        )

    def chosen(self) -> table.Part | None:
        at = self.rows.cursor_row
        return self.parts[at] if 0 <= at < len(self.parts) else None

    def action_closer(self) -> None:
        """Go on from a GPU to its processes, and from a process to its stack."""
        part = self.chosen()
        if part is not None and part.gpu is not None and self.gpu is None:
            self.app.push_screen(Parts(self.node, part.gpu))
        else:
            self.action_stack()

    def action_stack(self) -> None:
        part = self.chosen()
        if part is None or part.pid is None:
            self.app.notify("a process has a stack; choose one")
            return
        name, pid = self.node.name, part.pid
        heading = f"{name}, process {pid} ({part.what}): stack"
        self.app.read(heading, lambda: self.app.actions.process(name, pid))

    def action_log(self) -> None:
        self.app.follow_node(self.node.name)


def title(job: JobSample, rank: RankProgress | None) -> str:
    return f"{job.experiment or job.job}{f', rank {rank.rank}' if rank is not None else ''}"


class Top(JobKeys, App[None]):
    """All nodes and their jobs; `q` leaves everything running."""

    TITLE = "orchestrator top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("r", "ranks", "ranks"),
        Binding("l", "log", "log"),
        Binding("e", "events", "events"),
        Binding("s", "stop", "stop"),
        Binding("tab", "focus_next", "nodes/jobs"),
        Binding("enter", "closer", "closer"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("o", "sort", "sort"),
        Binding("question_mark,h,f1", "help", "help", key_display="?"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    #heading { color: $text-muted; height: 1; }
    #heat { height: auto; margin-bottom: 1; display: none; }
    Top Rows { height: auto; }
    #jobs { margin-top: 1; }
    #filter { display: none; height: 1; border: none; }
    """

    def __init__(
        self,
        sample: Callable[[], Sample],
        first: Sample,  # shown until the first look is over
        seconds: float,
        actions: Actions,
        closer: Callable[[str], None] = lambda _: None,
        alone: str = "",  # the one job that is shown; the screen ends with it
    ) -> None:
        super().__init__()
        self.observe, self.first, self.seconds = sample, first, seconds
        self.actions, self.closer, self.alone = actions, closer, alone
        self.seen = False  # the one job has been there
        self.sample: Sample | None = None
        self.over = Event()
        # Kept here, because a query looks at the screen in front alone.
        self.heading = Static("reaching the nodes ...", id="heading")
        self.heat = Static("", id="heat")
        self.nodes = Rows(table.NODES.headings, id="nodes")
        self.jobs = Rows(table.JOB_HEADINGS, id="jobs")
        self.filter = Input(placeholder="only rows with ...", id="filter")
        self.sorts = {self.nodes: "", self.jobs: ""}  # the column of each table
        self.shown: tuple[list[NodeSample], list[JobSample]] = ([], [])

    def on_unmount(self) -> None:
        self.over.set()

    def compose(self) -> ComposeResult:
        yield self.heading
        with VerticalScroll() as both:
            both.can_focus = False  # the tables are what keys move in
            yield self.heat
            yield self.nodes
            yield self.jobs
        yield self.filter
        yield Footer()

    def on_mount(self) -> None:
        self.show(self.first)
        self.jobs.focus()
        self.call_after_refresh(self.watch_nodes)  # many logins would leave no time to draw

    @work(thread=True, exclusive=True)
    def watch_nodes(self) -> None:
        """Look, show, wait; the thread ends with the screen."""
        while not self.over.is_set():
            sample = self.observe()
            if self.over.is_set():
                return
            self.call_from_thread(self.show, sample)
            self.over.wait(self.seconds)

    def show(self, sample: Sample) -> None:
        self.sample = sample
        reached = sum(node.checkup is not None for node in sample.nodes)
        words = f"{reached} of {len(sample.nodes)} nodes"
        words += f", {plural(len(sample.jobs), 'job')}"
        words += f", only rows with {self.filter.value!r}" if self.filter.value else ""
        self.heading.update(Text(words))
        jobs = table.job_table(sample.time)
        self.shown = (
            self.chosen(sample.nodes, table.NODES, self.sorts[self.nodes], table.OF_NODES),
            self.chosen(sample.jobs, jobs, self.sorts[self.jobs], table.OF_JOBS),
        )
        width, height = self.size
        lines = heat_map(self.shown[0], width, 2 * height // 5)
        self.heat.styles.display = "block" if lines else "none"
        self.heat.update(Text("\n").join(Text.assemble(*line) for line in lines))
        self.fill(self.nodes, table.NODES, self.shown[0])
        self.fill(self.jobs, jobs, self.shown[1])
        # The jobs are seen whole where they take no more than a third.
        room = height - AROUND - (len(lines) + 1 if lines else 0)
        of_jobs = min(len(self.shown[1]) + HEAD, max(LEAST_ROWS, room // 3))
        self.jobs.styles.max_height = of_jobs
        self.nodes.styles.max_height = max(LEAST_ROWS, room - of_jobs)
        self.show_closer(sample)

    def fill(self, rows: Rows, columns: Table[R], every: Sequence[R]) -> None:
        """Show the columns for which there is room, and by which of them rows are sorted."""
        fitted = columns.fitted(every, self.size.width)
        by = self.sorts[rows]
        headings = [f"{name} ▼" if name == by else name for name in fitted.headings]
        rows.fill([fitted.cells(row) for row in every], headings, self.size.width)

    def on_resize(self) -> None:
        if self.sample is not None:
            self.show(self.sample)

    def chosen(
        self,
        rows: Sequence[R],
        columns: Table[R],
        by: str,
        orders: Mapping[str, Callable[[R], float | None]],
    ) -> list[R]:
        """Return the rows that have the word of the filter, in the order that was chosen."""
        word = self.filter.value.lower()
        kept = [row for row in rows if word in " ".join(columns.words(row)).lower()]
        if by:
            values = {id(row): orders[by](row) for row in kept}
            kept.sort(key=lambda row: -math.inf if (v := values[id(row)]) is None else v)
            kept.reverse()
        return kept

    def show_closer(self, sample: Sample) -> None:
        """Show the job or node that is looked at closer; with the one job the screen ends."""
        if self.alone:
            job = next((job for job in sample.jobs if job.job == self.alone), None)
            if job is not None and not self.seen:
                self.seen = True
                self.push_screen(Ranks(job, alone=True))
            elif job is None and self.seen:
                answered = all(node.checkup for node in sample.nodes)
                if answered or self.actions.over(self.alone):
                    self.exit()
        for screen in self.screen_stack:
            if isinstance(screen, Ranks):
                for job in sample.jobs:
                    if job.job == screen.job.job:
                        screen.show(job)
            if isinstance(screen, Parts):
                for node in sample.nodes:
                    if node.name == screen.node.name:
                        screen.show(node)

    # -- keys --------------------------------------------------------------------------------

    def subject(self) -> tuple[JobSample, None] | None:
        """Return the job under the cursor."""
        at, jobs = self.jobs.cursor_row, self.shown[1]
        if 0 <= at < len(jobs):
            return jobs[at], None
        nodes = self.sample.nodes if self.sample is not None else ()
        silent = sum(node.checkup is None for node in nodes)
        of_these = f"; {silent} of {len(nodes)} have not answered" if silent else ""
        self.notify(f"no job is seen on these nodes{of_these}")
        return None

    def action_ranks(self) -> None:
        if subject := self.subject():
            self.closer(subject[0].job)
            self.push_screen(Ranks(subject[0], alone=False), lambda _: self.closer(""))

    def action_closer(self) -> None:
        """Show the ranks of a job, or the GPUs and processes of a node."""
        at, nodes = self.nodes.cursor_row, self.shown[0]
        if self.focused is not self.nodes:
            self.action_ranks()
        elif 0 <= at < len(nodes):
            self.push_screen(Parts(nodes[at]))

    def action_log(self) -> None:
        at, nodes = self.nodes.cursor_row, self.shown[0]
        if self.focused is self.nodes and 0 <= at < len(nodes):
            self.follow_node(nodes[at].name)
        else:
            super().action_log()

    def follow_node(self, name: str) -> None:
        """Follow what the job of this directory that runs on a node prints there."""
        jobs = self.sample.jobs if self.sample is not None else ()
        job = next((job for job in jobs if job.experiment and name in job.nodes), None)
        if job is None:
            self.notify(f"no job of this directory runs on {name}")
        else:
            opened = partial(self.actions.log, job, None, name)
            self.follow(f"{title(job, None)} on {name}", opened)

    def action_filter(self) -> None:
        self.filter.styles.display = "block"
        self.filter.focus()

    def on_input_changed(self) -> None:
        if self.sample is not None:
            self.show(self.sample)

    def on_input_submitted(self) -> None:
        self.leave_filter()

    def on_key(self, event: events.Key) -> None:
        if event.key == "escape" and self.focused is self.filter:
            self.filter.value = ""
            self.leave_filter()

    def leave_filter(self) -> None:
        self.filter.styles.display = "none"
        self.jobs.focus()

    def action_sort(self) -> None:
        """Sort the table that has the cursor by its next column, or as it was."""
        rows, orders = self.jobs, [*table.OF_JOBS]
        if self.focused is self.nodes:
            rows, orders = self.nodes, [*table.OF_NODES]
        ways = ["", *orders]
        self.sorts[rows] = ways[(ways.index(self.sorts[rows]) + 1) % len(ways)]
        if self.sample is not None:
            self.show(self.sample)

    def action_help(self) -> None:
        self.push_screen(Lines("keys", HELP))

    @work(thread=True)
    def read(
        self, heading: str, lines: Callable[[], Sequence[str]], *, from_end: bool = False
    ) -> None:
        """Get lines, which may take a node's time to answer, and show them."""
        try:
            found = lines()
        except OrchestratorError as error:
            found = str(error).splitlines()
        self.call_from_thread(self.push_screen, Lines(heading, found, from_end=from_end))

    @work(thread=True)
    def follow(self, heading: str, opened: Callable[[], More]) -> None:
        """Open a log, and show its last lines and those that come."""
        try:
            screen = Lines(f"{heading}: log", [], more=opened())
        except OrchestratorError as error:
            screen = Lines(heading, str(error).splitlines())
        self.call_from_thread(self.push_screen, screen)

    def ask_to_stop(self, job: JobSample) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self.notify(f"ending {job.job} ...")
                self.end(job)

        self.push_screen(Question(f"End {job.experiment or job.job} on all its nodes?"), answered)

    @work(thread=True)
    def end(self, job: JobSample) -> None:
        try:
            said = self.actions.stop(job)
        except OrchestratorError as error:
            said = str(error)
        self.call_from_thread(self.notify, Text(printable(said)).plain)
