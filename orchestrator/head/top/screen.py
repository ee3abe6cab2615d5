"""The screen of `orchestrator top`: two tables whose cells change, and what the keys do.

textual draws it. A thread looks at the nodes; the screen only ever shows what it found last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Label, RichLog, Static

from orchestrator.errors import OrchestratorError
from orchestrator.head.screen.output import printable
from orchestrator.head.top import table
from orchestrator.head.top.sample import JobSample, Sample

Rows = list[list[str]]


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
    """Shows lines of text until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,l,enter", "dismiss", "back")]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self.heading, self.lines = title, lines

    def compose(self) -> ComposeResult:
        yield Static(Text(self.heading, style="bold"))
        yield RichLog(wrap=False)
        yield Footer()

    def on_mount(self) -> None:
        log = self.query_one(RichLog)
        for line in self.lines:
            log.write(Text(printable(line)))
        log.focus()


class Top(App[None]):
    """All nodes and their jobs; `q` leaves everything running."""

    TITLE = "orchestrator top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("l", "log", "log of the job"),
        Binding("s", "stop", "stop the job"),
        Binding("tab", "focus_next", "nodes/jobs"),
    ]
    CSS = """
    #heading { color: $text-muted; height: 1; }
    DataTable { height: auto; max-height: 70%; }
    #jobs { margin-top: 1; }
    """

    def __init__(
        self,
        look: Callable[[], Sample],
        seconds: float,
        lines_of: Callable[[JobSample], Sequence[str]],
        stop: Callable[[JobSample], str],
    ) -> None:
        super().__init__()
        self.look, self.seconds = look, seconds
        self.lines_of, self.stop = lines_of, stop
        self.sample: Sample | None = None
        self.over = Event()
        # Kept here, because a query looks at the screen in front alone.
        self.heading = Static("reaching the nodes ...", id="heading")
        self.nodes: DataTable[Text] = DataTable(id="nodes", cursor_type="row", zebra_stripes=True)
        self.jobs: DataTable[Text] = DataTable(id="jobs", cursor_type="row", zebra_stripes=True)

    def on_unmount(self) -> None:
        self.over.set()

    def compose(self) -> ComposeResult:
        yield self.heading
        with VerticalScroll():
            yield self.nodes
            yield self.jobs
        yield Footer()

    def on_mount(self) -> None:
        self.nodes.add_columns(*table.NODE_HEADINGS)
        self.jobs.add_columns(*table.JOB_HEADINGS)
        self.watch_nodes()

    @work(thread=True, exclusive=True)
    def watch_nodes(self) -> None:
        """Look, show, wait; the thread ends with the screen."""
        while not self.over.is_set():
            sample = self.look()
            if self.over.is_set():
                return
            self.call_from_thread(self.show, sample)
            self.over.wait(self.seconds)

    def show(self, sample: Sample) -> None:
        self.sample = sample
        reached = sum(node.checkup is not None for node in sample.nodes)
        words = f"{reached} of {len(sample.nodes)} nodes"
        words += f", {len(sample.jobs)} jobs" if len(sample.jobs) != 1 else ", 1 job"
        self.heading.update(Text(words))
        fill(self.nodes, table.node_rows(sample))
        fill(self.jobs, table.job_rows(sample))

    # -- keys --------------------------------------------------------------------------------

    @property
    def chosen(self) -> JobSample | None:
        """Return the job under the cursor."""
        at = self.jobs.cursor_row
        jobs = self.sample.jobs if self.sample is not None else ()
        return jobs[at] if 0 <= at < len(jobs) else None

    def action_log(self) -> None:
        job = self.chosen
        if job is None:
            self.notify("no job runs on these nodes")
            return
        self.push_screen(Lines(f"{job.experiment or job.job}: last lines", self.lines_of(job)))

    def action_stop(self) -> None:
        job = self.chosen
        if job is None:
            self.notify("no job runs on these nodes")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.notify(f"ending {job.job} ...")
                self.end(job)

        self.push_screen(Question(f"End {job.experiment or job.job} on all its nodes?"), answered)

    @work(thread=True)
    def end(self, job: JobSample) -> None:
        try:
            said = self.stop(job)
        except OrchestratorError as error:
            said = str(error)
        self.call_from_thread(self.notify, Text(printable(said)).plain)


def fill(shown: DataTable[Text], rows: Rows) -> None:
    """Change the cells that differ; rows are made anew only when they are others.

    Then the cursor stays on the row that it was on: a key must not mean another job than the one
    that was chosen.
    """
    names = [printable(row[0]) for row in rows]
    before = [shown.get_cell_at(Coordinate(y, 0)).plain for y in range(shown.row_count)]
    if before != names:
        chosen = before[shown.cursor_row] if shown.cursor_row < len(before) else ""
        shown.clear()
        for row in rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        if chosen in names:
            shown.move_cursor(row=names.index(chosen))
        return
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            at = Coordinate(y, x)
            if shown.get_cell_at(at).plain != printable(cell):
                shown.update_cell_at(at, Text(printable(cell)), update_width=True)
