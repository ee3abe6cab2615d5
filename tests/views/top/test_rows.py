"""A table whose rows are chosen by keys, and which draws what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from orchestrator.views.top.rows import Rows

Walk = Callable[[Rows, Pilot[None]], Awaitable[None]]


class Shown(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(["NAME", "VALUE"])

    def compose(self) -> ComposeResult:
        yield self.rows


def drive(walk: Walk, size: tuple[int, int] = (30, 6)) -> None:
    async def run() -> None:
        app = Shown()
        async with app.run_test(size=size) as pilot, asyncio.timeout(30):
            app.rows.fill(numbered(20))
            await pilot.pause()
            await walk(app.rows, pilot)

    asyncio.run(run())


def numbered(count: int, value: str = "0") -> list[list[str]]:
    return [[f"row {number}", value] for number in range(count)]


def lines(rows: Rows) -> list[str]:
    """What stands on the screen."""
    return [rows.render_line(y).text.rstrip() for y in range(rows.size.height)]


def test_the_chosen_row_stays_on_the_screen() -> None:
    async def walk(rows: Rows, pilot: Pilot[None]) -> None:
        assert lines(rows)[:2] == ["  NAME    VALUE", "  row 0   0"]
        for key, chosen in [
            *(("up", 0), ("down", 1), ("pagedown", 6), ("end", 19), ("down", 19)),
            *(("pageup", 14), ("up", 13), ("home", 0)),
        ]:
            await pilot.press(key)
            await pilot.pause()
            assert rows.cursor_row == chosen, key
            assert any(f"row {chosen} " in f"{line} " for line in lines(rows)[1:]), key
            assert "NAME" in lines(rows)[0]
        await pilot.click(Rows, offset=(3, 2))
        assert rows.cursor_row == 1
        await pilot.click(Rows, offset=(3, 0))  # the headings
        assert rows.cursor_row == 1

    drive(walk)


def test_it_draws_the_rows_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    async def walk(rows: Rows, pilot: Pilot[None]) -> None:
        drawn: list[int] = []
        draw = rows.draw
        monkeypatch.setattr(rows, "draw", lambda row: (drawn.append(row), draw(row)))
        changed = numbered(20)
        changed[3][1] = "1"
        rows.fill(changed)
        assert drawn == [3]
        await pilot.pause()
        assert lines(rows)[4] == "  row 3   1"
        changed[3][1] = "longer than before"  # all columns move
        rows.fill(changed)
        await pilot.pause()
        assert rows.virtual_size.width > 28 and drawn == [3]

    drive(walk)


def test_others_below_the_cursor_leave_it_where_it_was() -> None:
    async def walk(rows: Rows, _: Pilot[None]) -> None:
        rows.action_choose(5)
        rows.fill(numbered(20)[3:])
        assert rows.rows[rows.cursor_row][0] == "row 5"
        rows.fill([["new", "0"], *numbered(4)])
        assert rows.cursor_row == 0
        rows.fill([])
        rows.action_move(1)
        assert (rows.cursor_row, lines(rows)[1]) == (0, "")

    drive(walk)


def test_wide_letters_and_what_a_node_says_keep_the_columns() -> None:
    async def walk(rows: Rows, _: Pilot[None]) -> None:
        rows.fill([["節点", "1"], ["a\x1b[2Jb", "2"]])
        first, second = lines(rows)[1:3]
        assert first.index("1") + 2 == second.index("2")  # two letters of two cells each
        assert "\x1b" not in second

    drive(walk)


def test_a_table_that_was_wide_in_one_column_may_be_wide_in_another() -> None:
    async def walk(rows: Rows, pilot: Pilot[None]) -> None:
        for cells in (["a", "12", "1" * 14], ["a", "1" * 14, "12"]):
            rows.fill([cells], ["A", "B", "C"], 30)
            await pilot.pause()
            assert rows.virtual_size.width <= 30 and not rows.show_horizontal_scrollbar

    drive(walk)
