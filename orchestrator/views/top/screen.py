"""The screen of `orchestrator top`: tables whose cells change, and the actions of the keys.

textual draws it. A thread asks the nodes; the screen shows the newest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, RichLog, Static

from orchestrator.common.errors import OrchestratorError
from orchestrator.head.screen.output import Cell, Table, printable_text
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top import table
from orchestrator.views.top.sample import JobSample, NodeSample, TopSample

R = TypeVar("R")
# The time between two reads of a log.
LOG_SECONDS = 0.5
LONGEST_CELL = 80

Lines = Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Actions:
    """The actions of the keys; each may take a while, and may raise an OrchestratorError."""

    # The last lines of a rank's log, of a node's, or of all nodes' logs.
    log: Callable[[JobSample, RankProgress | None, str], Lines]
    stack: Callable[[JobSample, RankProgress], Sequence[str]]
    stop: Callable[[JobSample], str]
    # Returns True if the record of the job says that it is over.
    over: Callable[[str], bool]


class Rows(DataTable[Text]):
    """A table whose cells change in place; a row is identified by the text of its first column."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "closer")]

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=True)
        self.drawn: list[list[Text]] = []
        self.headings: list[str] = []

    def fill(self, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Show these rows; the cursor stays on its row even if that has moved.

        Otherwise a key would act on another job than the user chose.
        """
        before, self.drawn = self.drawn, [[drawn(cell) for cell in row] for row in rows]
        names = [row[0].plain for row in self.drawn]
        chosen = before[self.cursor_row][0].plain if 0 <= self.cursor_row < len(before) else ""
        if self.headings == list(headings) and [row[0].plain for row in before] == names:
            for y, (old, new) in enumerate(zip(before, self.drawn, strict=True)):
                for x, cell in enumerate(new):
                    if cell != old[x]:
                        self.update_cell_at(Coordinate(y, x), cell, update_width=True)
            return
        self.headings = list(headings)
        self.clear(columns=True)
        self.add_columns(*headings)
        for row in self.drawn:
            self.add_row(*row)
        self.move_cursor(row=names.index(chosen) if chosen in names else 0)

    def chosen(self, items: Sequence[R]) -> R | None:
        return items[self.cursor_row] if 0 <= self.cursor_row < len(items) else None


def drawn(cell: Cell) -> Text:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(printable_text(text)[:LONGEST_CELL], style)


class Question(ModalScreen[bool]):
    """Asks for confirmation before a job is ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q", "dismiss(False)", "no"),
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


class LinesScreen(ModalScreen[None]):
    """Shows lines of text until a key closes it; a log's last lines are read repeatedly."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]

    def __init__(self, title: str, lines: Lines, *, follow: bool = False) -> None:
        super().__init__()
        self.heading, self.lines, self.follows = title, lines, follow
        self.log_of = RichLog(wrap=False, auto_scroll=follow)
        self.over = Event()

    def compose(self) -> ComposeResult:
        yield Static(Text(self.heading, style="bold"))
        yield self.log_of
        yield Footer()

    def on_mount(self) -> None:
        self.log_of.focus()
        self.read()

    def on_unmount(self) -> None:
        self.over.set()

    @work(thread=True)
    def read(self) -> None:
        shown: Sequence[str] = ()
        while not self.over.is_set():
            try:
                lines = list(self.lines())
            except OrchestratorError as error:
                lines = str(error).splitlines()
            at_end = not shown or self.log_of.is_vertical_scroll_end
            # Lines are not replaced while the user has scrolled up.
            if lines != shown and at_end and not self.over.is_set():
                shown = lines
                self.app.call_from_thread(self.show, lines)
            if not self.follows:
                return
            self.over.wait(LOG_SECONDS)

    def show(self, lines: Sequence[str]) -> None:
        self.log_of.clear()
        for line in lines:
            self.log_of.write(Text(printable_text(line)))


class DetailScreen(ModalScreen[None]):
    """Shows the ranks of a job, or the GPUs and processes of a node."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", "back"),
        Binding("l", "log", "log"),
        Binding("t", "stack", "stack"),
        Binding("s", "stop", "stop the job"),
    ]
    app: Top

    def __init__(self, of: JobSample | NodeSample) -> None:
        super().__init__()
        self.of = of
        self.items: Sequence[Any] = ()
        self.heading, self.rows = Static(""), Rows()

    def compose(self) -> ComposeResult:
        yield self.heading
        yield self.rows
        yield Footer()

    def on_mount(self) -> None:
        self.rows.focus()
        self.show()

    def update(self, sample: TopSample) -> None:
        """Show the same job or node as it is now."""
        if isinstance(self.of, JobSample):
            job = self.of.job
            self.of = next((each for each in sample.jobs if each.job == job), self.of)
        else:
            name = self.of.name
            self.of = next((each for each in sample.nodes if each.name == name), self.of)
        self.show()

    def show(self) -> None:
        columns: Table[Any] = table.RANKS
        if isinstance(self.of, JobSample):
            words, self.items = table.job_words(self.of), self.of.ranks
        else:
            problem = " -> ".join(filter(None, [self.of.problem, self.of.fix]))
            words = f"{self.of.name}   {problem}"
            self.items = table.rows_of_node(self.of)
            columns = table.PARTS
        self.heading.update(Text(printable_text(words)))
        columns = columns.fitted(self.items, self.app.size.width)
        self.rows.fill(columns.headings, [columns.cells(item) for item in self.items])

    def action_back(self) -> None:
        if self.app.alone:
            self.app.exit()
        else:
            self.app.closer("")
            self.dismiss()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        self.action_stack()

    def action_stack(self) -> None:
        item = self.rows.chosen(self.items)
        if isinstance(item, RankProgress) and isinstance(self.of, JobSample):
            lines = partial(self.app.actions.stack, self.of, item)
            self.app.push_screen(LinesScreen(f"{title(self.of, item)}: stack", lines))
        else:
            self.app.notify("a rank has a stack: choose one of a job")

    def action_log(self) -> None:
        if isinstance(self.of, JobSample):
            self.app.follow(self.of, self.rows.chosen(self.items))
        else:
            self.app.follow_node(self.of.name)

    def action_stop(self) -> None:
        if isinstance(self.of, JobSample):
            self.app.ask_to_stop(self.of)


def title(job: JobSample, rank: RankProgress | None = None) -> str:
    return f"{job.experiment or job.job}{f', rank {rank.rank}' if rank is not None else ''}"


class Top(App[None]):
    """All nodes and their jobs; `q` leaves everything running."""

    TITLE = "orchestrator top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("l", "log", "log"),
        Binding("s", "stop", "stop"),
        Binding("tab", "focus_next", "nodes/jobs"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    CSS = """
    #heading { color: $text-muted; height: 1; }
    #nodes { height: auto; max-height: 65%; }
    #jobs { height: auto; max-height: 30%; margin-top: 1; }
    #filter { display: none; height: 1; border: none; }
    DetailScreen, LinesScreen { background: $background; }
    """

    def __init__(
        self,
        sample: Callable[[], TopSample],
        # The sample that is shown until the first one has come.
        first: TopSample,
        seconds: float,
        actions: Actions,
        closer: Callable[[str], None] = lambda _: None,
        # The one job that is shown; the screen ends with it.
        alone: str = "",
    ) -> None:
        super().__init__()
        self.observe, self.sample, self.seconds = sample, first, seconds
        self.actions, self.closer, self.alone = actions, closer, alone
        # Set once that job was in a sample.
        self.seen = False
        self.over = Event()
        # Kept here, because a query looks at the screen in front alone.
        self.heading = Static("reaching the nodes ...", id="heading")
        self.nodes, self.jobs = Rows("nodes"), Rows("jobs")
        self.filter = Input(placeholder="only rows with ...", id="filter")
        self.shown: tuple[list[NodeSample], list[JobSample]] = ([], [])

    def on_unmount(self) -> None:
        self.over.set()

    def compose(self) -> ComposeResult:
        yield from (self.heading, self.nodes, self.jobs, self.filter, Footer())

    def on_mount(self) -> None:
        self.show(self.sample)
        self.jobs.focus()
        # Started after the first drawing, as many logins at once would leave no time to draw.
        self.call_after_refresh(self.watch_nodes)

    @work(thread=True, exclusive=True)
    def watch_nodes(self) -> None:
        """Show one sample after the other until the screen ends; runs in a thread."""
        while not self.over.is_set():
            sample = self.observe()
            if self.over.is_set():
                return
            self.call_from_thread(self.show, sample)
            self.over.wait(self.seconds)

    def show(self, sample: TopSample) -> None:
        self.sample = sample
        words = table.totals_line(sample, self.size.width)
        words += f", only rows with {self.filter.value!r}" if self.filter.value else ""
        self.heading.update(Text(words))
        self.shown = (
            self.fill(self.nodes, table.NODES, sample.nodes),
            self.fill(self.jobs, table.job_table(sample.time), sample.jobs),
        )
        self.show_closer(sample)

    def fill(self, rows: Rows, columns: Table[R], every: Sequence[R]) -> list[R]:
        """Show the rows that contain the filter's text, and return them."""
        word = self.filter.value.lower()
        kept = [row for row in every if word in " ".join(columns.words(row)).lower()]
        fitted = columns.fitted(kept, self.size.width)
        rows.fill(fitted.headings, [fitted.cells(row) for row in kept])
        return kept

    def on_resize(self) -> None:
        self.show(self.sample)

    def show_closer(self, sample: TopSample) -> None:
        """Update the detail screen; if only one job is shown, end once it is over."""
        if self.alone:
            job = next((job for job in sample.jobs if job.job == self.alone), None)
            if job is not None and not self.seen:
                self.seen = True
                self.push_screen(DetailScreen(job))
            elif job is None and self.seen:
                answered = all(node.checkup for node in sample.nodes)
                if answered or self.actions.over(self.alone):
                    self.exit()
        for screen in self.screen_stack:
            if isinstance(screen, DetailScreen) and screen.is_mounted:
                screen.update(sample)

    # -- keys --------------------------------------------------------------------------------

    def job(self) -> JobSample | None:
        """Return the job under the cursor; if there is none, notify the user."""
        job = self.jobs.chosen(self.shown[1])
        if job is None:
            silent = sum(node.checkup is None for node in self.sample.nodes)
            of_these = f"; {silent} of {len(self.sample.nodes)} have not answered" if silent else ""
            self.notify(f"no job is seen on these nodes{of_these}")
        return job

    def node(self) -> NodeSample | None:
        """Return the node under the cursor if the table of nodes has the focus."""
        return self.nodes.chosen(self.shown[0]) if self.focused is self.nodes else None

    def on_data_table_row_selected(self) -> None:
        """Show the ranks of a job, or the GPUs and processes of a node."""
        if node := self.node():
            self.push_screen(DetailScreen(node))
        elif job := self.job():
            self.closer(job.job)
            self.push_screen(DetailScreen(job))

    def action_log(self) -> None:
        if node := self.node():
            self.follow_node(node.name)
        elif job := self.job():
            self.follow(job, None)

    def follow_node(self, name: str) -> None:
        """Follow the log on a node of the job from this directory that runs there."""
        jobs = self.sample.jobs
        job = next((job for job in jobs if job.experiment and name in job.nodes), None)
        if job is None:
            self.notify(f"no job of this directory runs on {name}")
        else:
            self.follow(job, None, name)

    def follow(self, job: JobSample, rank: RankProgress | None, node: str = "") -> None:
        try:
            lines = self.actions.log(job, rank, node)
        except OrchestratorError as error:
            self.notify(str(error))
            return
        where = f" on {node}" if node else ""
        self.push_screen(LinesScreen(f"{title(job, rank)}{where}: log", lines, follow=True))

    def action_filter(self) -> None:
        self.filter.styles.display = "block"
        self.filter.focus()

    def on_input_changed(self) -> None:
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

    def action_stop(self) -> None:
        if job := self.job():
            self.ask_to_stop(job)

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
        self.call_from_thread(self.notify, Text(printable_text(said)).plain)
