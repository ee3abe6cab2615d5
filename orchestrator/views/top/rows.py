"""A table of plain text of which many cells change each second, with a row that is chosen.

textual's own DataTable draws all of its rows anew when one cell has changed, and measures them;
this one draws the rows that differ. Of 64 nodes a look costs 8 ms so, and 83 ms with DataTable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from orchestrator.head.screen.output import Cell, printable

BETWEEN = "  "
LEAST_COLUMNS = 8  # of a cell that is cut
HEAD = 1  # the line of the headings, which stays while the rows scroll


class Rows(ScrollView, can_focus=True):
    """Rows with headings; a row is known by what stands in its first column."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "rows--head",
        "rows--even",
        "rows--odd",
        "rows--chosen",
    }
    DEFAULT_CSS = """
    Rows { background: $surface; color: $foreground; height: 1fr; }
    Rows > .rows--head { background: $panel; color: $foreground; text-style: bold; }
    Rows > .rows--even { background: $surface; color: $foreground; }
    Rows > .rows--odd { background: $boost; color: $foreground; }
    Rows > .rows--chosen { background: $block-cursor-blurred-background; color: $foreground; }
    Rows:focus > .rows--chosen { background: $primary; color: $text; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "choose(0)", show=False),
        Binding("end", "choose(-1)", show=False),
    ]

    def __init__(self, headings: Sequence[str], id: str | None = None) -> None:
        super().__init__(id=id)
        self.headings = list(headings)
        self.rows: list[list[str]] = []
        self.styles_of: list[list[str]] = []  # of each cell
        self.cursor_row = 0
        self.widths = [cell_len(heading) for heading in headings]

    # -- what is shown -----------------------------------------------------------------------

    def fill(
        self,
        rows: Sequence[Sequence[Cell]],
        headings: Sequence[str] | None = None,
        most: int | None = None,
    ) -> None:
        """Show these rows; the last cell of one that is wider than `most` ends in three dots.

        A column stays as wide as it once was while there is room for that. The cursor stays on the
        row that it was on, wherever that is now: a key must not mean another job than was chosen.
        """
        pairs = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
        before, self.rows = self.rows, [[printable(text) for text, _ in row] for row in pairs]
        looked, self.styles_of = self.styles_of, [[style for _, style in row] for row in pairs]
        names = [row[0] for row in self.rows]
        chosen = before[self.cursor_row][0] if self.cursor_row < len(before) else None
        same = [row[0] for row in before] == names and headings in (None, self.headings)
        self.headings = list(headings or self.headings)
        if not same:
            self.widths = [0] * len(self.headings)
            self.cursor_row = names.index(chosen) if chosen in names else 0
        heads = [cell_len(heading) for heading in self.headings]
        cells = [max(map(cell_len, column)) for column in zip(*self.rows, strict=True)] or heads
        widths = [max(each) for each in zip(self.widths, heads, cells, strict=True)]
        if most is not None and self.total(widths) > most:
            widths = [max(each) for each in zip(heads, cells, strict=True)]
        if most is not None:
            self.shorten(widths, most - 2 * len(BETWEEN))  # and the scroll bar
        if same and widths == self.widths:
            for at, row in enumerate(self.rows):
                if row != before[at] or self.styles_of[at] != looked[at]:
                    self.draw(at)
            return
        self.widths = widths
        self.virtual_size = Size(self.total(widths), len(self.rows) + HEAD)
        self.refresh(layout=True)

    @staticmethod
    def total(widths: Sequence[int]) -> int:
        return sum(widths) + len(BETWEEN) * (len(widths) + 1)

    def shorten(self, widths: list[int], most: int) -> None:
        """Cut the last cell of each row to the room that the others leave, where that is some."""
        room = most - sum(widths[:-1]) - len(BETWEEN) * len(widths)
        if LEAST_COLUMNS <= room < widths[-1]:
            widths[-1] = room
            for row in self.rows:
                if cell_len(row[-1]) > room:
                    row[-1] = f"{set_cell_size(row[-1], room - 3).rstrip()}..."

    def draw(self, row: int) -> None:
        self.refresh(Region(0, row + HEAD - self.scroll_offset.y, self.size.width, 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.rows) + HEAD

    def render_line(self, y: int) -> Strip:
        at = y - HEAD + self.scroll_offset.y
        looks = [""] * len(self.headings)
        if y < HEAD:
            cells, kind = self.headings, "head"
        elif at < len(self.rows):
            chosen = at == self.cursor_row
            cells, kind = self.rows[at], "chosen" if chosen else ("even", "odd")[at % 2]
            looks = looks if chosen and self.has_focus else self.styles_of[at]
        else:
            return Strip.blank(self.size.width, self.rich_style)
        style = self.get_component_rich_style(f"rows--{kind}")
        segments = [Segment(BETWEEN, style)]
        for cell, width, look in zip(cells, self.widths, looks, strict=True):
            own = style + Style.parse(look) if look else style
            segments += [Segment(set_cell_size(cell, width), own), Segment(BETWEEN, style)]
        left = self.scroll_offset.x
        return Strip(segments).crop_extend(left, left + self.size.width, style)

    # -- the row that is chosen --------------------------------------------------------------

    def action_choose(self, row: int) -> None:
        """Choose a row; those below 0 are counted from the end."""
        if not self.rows:
            return
        before = self.cursor_row
        self.cursor_row = row % len(self.rows)
        self.draw(before)
        self.draw(self.cursor_row)
        top, shown = self.scroll_offset.y, max(1, self.size.height - HEAD)
        wanted = min(max(top, self.cursor_row - shown + 1), self.cursor_row)
        if wanted != top:
            self.scroll_to(y=wanted, animate=False)

    def action_move(self, rows: int) -> None:
        self.action_choose(max(0, min(self.cursor_row + rows, len(self.rows) - 1)))

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - HEAD))

    def on_click(self, event: events.Click) -> None:
        at = event.y - HEAD + self.scroll_offset.y
        if event.y >= HEAD and at < len(self.rows):
            self.action_choose(at)
