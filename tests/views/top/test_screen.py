"""The live screen, driven by keys in a terminal of any size."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from threading import Event

import pytest
from textual.pilot import Pilot
from textual.widgets import RichLog

from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top.sample import JobSample, NodeSample, TopSample
from orchestrator.views.top.screen import Actions, DetailScreen, LinesScreen, Question, Rows, Top
from tests.views.top.samples import NOW, job, rank, sample

pytestmark = pytest.mark.slow

# A busy machine needs so many seconds.
PATIENCE = 120
EVERY = 0.2  # a walk waits until nothing is to be drawn
FIRST = TopSample(NOW, (NodeSample("one", problem="connecting ..."),), ())
ACTIONS = Actions(
    log=lambda *_: list, stack=lambda *_: [], stop=str,
    over=lambda _: False,
)  # fmt: skip
Walk = Callable[[Top, Pilot[None]], Awaitable[None]]


def drive(
    walk: Walk,
    *samples: TopSample,
    size: tuple[int, int] = (110, 30),
    stop: Callable[[JobSample], str] = lambda _: "all ended",
    lines: Sequence[str] = ("node 0: hello",),
    closer: Callable[[str], None] | None = None,
    alone: str = "",
    over: Callable[[str], bool] = lambda _: False,
    grows: Sequence[str] = (),
) -> None:
    """Show the samples one after the other, the last one again and again, and walk."""
    left: Iterator[TopSample] = iter(samples)
    shown = [samples[-1]]

    def look() -> TopSample:
        return next(left, shown[0])

    def log(job: JobSample, rank: RankProgress | None, node: str) -> Callable[[], Sequence[str]]:
        return lambda: [*lines, f"of {rank.rank if rank else node or 'all'}", *grows]

    async def run() -> None:
        actions = Actions(
            log=log,
            stack=lambda _, rank: [f"stack of {rank.rank}", *map(str, range(40))],
            stop=stop,
            over=over,
        )
        app = Top(look, FIRST, EVERY, actions, closer or (lambda _: None), alone)
        async with app.run_test(size=size) as pilot:
            async with asyncio.timeout(PATIENCE):
                await until(pilot, lambda: app.sample is samples[-1])
                await walk(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    while not true():
        await pilot.pause(0.01)


def cells(rows: Rows) -> list[list[str]]:
    return [[str(cell) for cell in rows.get_row_at(at)] for at in range(rows.row_count)]


@pytest.mark.parametrize("size", [(110, 30)])
def test_nodes_and_jobs_are_shown_and_updated(size: tuple[int, int]) -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        assert [row[0] for row in cells(app.nodes)] == ["one", "two", "gone"]
        assert [row[1] for row in cells(app.jobs)] == ["12 of 40"]

    drive(walk, sample(job("train")), sample(job("train", step=12)), size=size)


def test_cursor_stays_on_its_job() -> None:
    before = sample(job("a"), job("b"))
    after = sample(job("new"), job("a"), job("b"))
    ended: list[str] = []

    def stop(which: JobSample) -> str:
        ended.append(which.experiment)
        return "all ended"

    async def walk(app: Top, pilot: Pilot[None]) -> None:
        app.show(before)
        app.jobs.move_cursor(row=1)
        app.show(after)
        await pilot.press("s")
        assert isinstance(app.screen, Question) and "End b on all" in app.screen.words
        await pilot.press("n")
        assert ended == []
        await pilot.press("s", "y")
        await until(pilot, lambda: ended == ["b"])

    drive(walk, after, stop=stop)


def test_log_is_shown_without_escapes() -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("l")
        found = await read(app, pilot)
        assert found == ["node 0: [bold]x[/bold]", "node 1: ␇2J", "of all"]
        await pilot.press("escape")
        assert not isinstance(app.screen, LinesScreen)

    drive(walk, sample(job("train")), lines=["node 0: [bold]x[/bold]", "node 1: \x072J"])


async def read(app: Top, pilot: Pilot[None]) -> list[str]:
    """The lines that a key has brought."""
    await until(pilot, lambda: isinstance(app.screen, LinesScreen))
    await until(pilot, lambda: bool(app.screen.query_one(RichLog).lines))
    await pilot.pause()
    return [line.text.rstrip() for line in app.screen.query_one(RichLog).lines]


@pytest.mark.parametrize("size", [(110, 30), (80, 24), (30, 8)])
def test_ranks_of_job_are_shown(size: tuple[int, int]) -> None:
    asked: list[str] = []
    ranks = (rank(0), rank(1, behind=0.4, cause="slow compute"))

    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, DetailScreen))
        shown = app.screen
        assert isinstance(shown, DetailScreen) and asked == ["train-1f"]
        await until(pilot, lambda: shown.rows.row_count == 2)
        last = [row[-1] for row in cells(shown.rows)]
        assert last == ["", "slow compute: +40% of a step"]
        await pilot.press("down", "l")
        assert (await read(app, pilot))[-1] == "of 1"
        await pilot.press("escape", "t")
        assert (await read(app, pilot))[0] == "stack of 1"
        assert app.screen.query_one(RichLog).scroll_y == 0, "the line that runs stands first"
        await pilot.press("escape", "escape")
        assert len(app.screen_stack) == 1 and asked == ["train-1f", ""]

    drive(walk, sample(job("train", ranks=ranks)), size=size, closer=asked.append)


@pytest.mark.parametrize("how", ["all nodes say so", "its record says so"])
def test_single_job_shows_ranks_until_over(how: str) -> None:
    over = Event()

    async def walk(app: Top, pilot: Pilot[None]) -> None:
        app.show(sample(job("train", ranks=(rank(0),))))
        assert isinstance(app.screen, DetailScreen)
        without = sample(job("other"))  # a node of it is gone, and its job may still be there
        app.show(without)
        await pilot.pause()
        assert app.is_running and isinstance(app.screen, DetailScreen)
        if how == "its record says so":
            over.set()
        else:
            without = replace(without, nodes=without.nodes[:2])
        app.show(without)
        await until(pilot, lambda: not app.is_running)

    ours = sample(job("train", ranks=(rank(0),)))
    drive(walk, ours, alone="train-1f", over=lambda _: over.is_set())


def test_keys_without_jobs_explain_and_q_quits() -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("s", "l")
        assert len(app.screen_stack) == 1
        assert {each.message for each in app._notifications} == {
            "no job is seen on these nodes; 1 of 3 have not answered"
        }
        await pilot.press("q")
        assert not app.is_running

    drive(walk, sample())


def test_nodes_are_listed_before_they_answer() -> None:
    answered = Event()

    def look() -> TopSample:
        answered.wait(60)
        return sample()

    async def run() -> None:
        app = Top(look, FIRST, EVERY, ACTIONS)
        try:
            async with app.run_test() as pilot, asyncio.timeout(PATIENCE):
                await until(
                    pilot, lambda: cells(app.nodes) == [["one", *"-------", "connecting ..."]]
                )
                answered.set()
                await until(pilot, lambda: app.nodes.row_count == 3)
        finally:
            answered.set()

    asyncio.run(run())


def test_rows_are_filtered_and_opened() -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"bert", "enter")
        assert [row[0] for row in cells(app.jobs)] == ["bert"] and cells(app.nodes) == []
        await pilot.press("enter")  # the keys mean what is shown
        await until(pilot, lambda: isinstance(app.screen, DetailScreen))
        assert app.screen.of.experiment == "bert"  # type: ignore[attr-defined]
        await pilot.press("escape", "slash", "escape")
        assert [row[0] for row in cells(app.jobs)] == ["gpt", "bert"]

    drive(walk, sample(job("gpt"), job("bert", step=30)))


def test_colour_shows_use() -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        first = dict(zip(app.nodes.headings, app.nodes.drawn[0], strict=True))
        looks = {name: str(cell.style) for name, cell in first.items()}
        assert (looks["GPU MEMORY"], looks["GPU"], looks["NODE"]) == ("green", "green", "")
        # The node does not answer.
        assert str(app.nodes.drawn[2][-1].style) == "yellow"
        assert ("NaN", "bold red") in {(str(c), str(c.style)) for c in app.jobs.drawn[0]}

    drive(walk, sample(job("gpt", lost=True)), size=(120, 30))


def test_node_shows_processes_and_stack() -> None:
    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "enter")
        await until(pilot, lambda: isinstance(app.screen, DetailScreen))
        node = app.screen
        assert isinstance(node, DetailScreen)
        await until(pilot, lambda: node.rows.row_count == 5)
        assert [row[0] for row in cells(node.rows)] == ["GPU 0", "  71", "GPU 1", "  72", "9"]
        # A GPU has no stack to show.
        await pilot.press("down", "down", "enter")
        assert app.screen is node
        await pilot.press("down")
        app.show(sample(job("train")))  # it is live, and stays where it is
        await pilot.press("escape")
        assert len(app.screen_stack) == 1

    drive(walk, sample(job("train")))


def test_log_of_node_is_followed_and_keeps_position() -> None:
    come: list[str] = []

    async def walk(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("tab", "down", "down", "l")
        assert {each.message for each in app._notifications} == {
            "no job of this directory runs on gone"
        }
        await pilot.press("up", "up", "l")
        assert (await read(app, pilot))[-1] == "of one"
        log = app.screen.query_one(RichLog)
        come.extend(map(str, range(50)))
        await until(pilot, lambda: len(log.lines) == 52 and log.is_vertical_scroll_end)
        await pilot.press("home")
        await until(pilot, lambda: log.scroll_y == 0)
        come.append("more")
        await pilot.pause(1.5)
        assert log.scroll_y == 0 and len(log.lines) == 52
        await pilot.press("end")
        await until(pilot, lambda: len(log.lines) == 53)

    drive(walk, sample(job("train")), grows=come)


@pytest.mark.parametrize(("size", "left_out"), [((80, 24), True), ((200, 40), False)])
def test_who_column_fits_every_screen(size: tuple[int, int], left_out: bool) -> None:
    of_one = sample().nodes[0]
    nodes = tuple(replace(of_one, name=f"gpu{number:03}") for number in range(20))
    silent = NodeSample("gone", problem="it does not answer")

    async def walk(app: Top, pilot: Pilot[None]) -> None:
        assert app.nodes.headings[-1] == "WHO" and ("IN" not in app.nodes.headings) is left_out
        assert [row[-1] for row in cells(app.nodes)[-2:]] == ["ada, bob", "it does not answer"]
        await until(pilot, lambda: app.jobs.size.height > 1)
        assert app.jobs.region.bottom < size[1]

    drive(walk, TopSample(NOW, (*nodes, silent), (job("train"),)), size=size)
