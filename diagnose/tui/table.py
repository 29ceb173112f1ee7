"""A table to choose a row from: columns give way instead of being cut off, home and end go to first and last row."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rich.text import Text
from textual.binding import Binding
from textual.events import Resize
from textual.widgets import DataTable

WIDE = 100
"""Columns of the terminal from which a table shows all that it has."""


class RowTable(DataTable[Text]):
    """Rows by key; whoever shows them says everything each time, and only what differs is touched."""

    BINDINGS = [  # noqa: RUF012
        Binding("home", "scroll_top", "First row", tooltip="Go to the first row", show=False, id="row-first"),
        Binding("end", "scroll_bottom", "Last row", tooltip="Go to the last row", show=False, id="row-last"),
    ]

    def __init__(
        self,
        labels: Mapping[str, str],
        gives: Mapping[str, int] | None = None,
        wide_only: Collection[str] = (),
        *,
        id: str,  # noqa: A002  (Textual's own name)
        classes: str = "",
    ) -> None:
        """Make the table.

        Args:
            labels: Column key → heading.
            gives: Columns that are shortened where the room does not suffice, the first to give first, each with the
                width that it keeps.
            wide_only: Columns that a narrow terminal does not show.
            id: Its id.
            classes: Its classes.
        """
        super().__init__(id=id, classes=classes, cursor_type="row")
        self._labels, self._gives, self._wide_only = dict(labels), dict(gives or {}), set(wide_only)
        self._whole: dict[str, Mapping[str, Text]] = {}
        self._columns_shown: list[str] = []

    def put(self, rows: Mapping[str, Mapping[str, Text]]) -> None:
        """Show rows: key → column → text. The cursor stays on its line."""
        self._whole = dict(rows)
        narrow = self.app.size.width < WIDE
        columns = [key for key in self._labels if not (narrow and key in self._wide_only)]
        widths = self._widths(columns)
        if columns != self._columns_shown:
            self._columns_shown = columns
            cursor = self.cursor_row
            self.clear(columns=True)
            for key in columns:
                self.add_column(self._labels[key], key=key)
        else:
            cursor = self.cursor_row
        if [key.value for key in self.rows] != list(rows):
            self.clear()
            for column in self.ordered_columns:
                column.content_width = len(column.label)  # what other rows needed no longer counts
            for name, cells in rows.items():
                self.add_row(*(cut(cells[key], widths[key]) for key in columns), key=name)
            self.move_cursor(row=min(cursor, max(len(rows) - 1, 0)))
            return
        for name, cells in rows.items():
            for key in columns:
                cell = cut(cells[key], widths[key])
                if self.get_cell(name, key) != cell:
                    self.update_cell(name, key, cell, update_width=True)

    def on_resize(self, _: Resize) -> None:
        """Share out the new room."""
        self.put(self._whole)

    def _widths(self, columns: list[str]) -> dict[str, int]:
        """Return how wide each column may be."""
        widths = {
            key: max([len(self._labels[key]), *(cells[key].cell_len for cells in self._whole.values())])
            for key in columns
        }
        size = self.content_size
        bar = self.styles.scrollbar_size_vertical if len(self._whole) + 1 > size.height else 0
        excess = sum(widths.values()) + 2 * self.cell_padding * len(columns) - (size.width - bar)
        if size.width <= 0:  # not laid out yet
            return widths
        for key, least in self._gives.items():
            if key in widths and excess > 0:
                given = max(0, min(excess, widths[key] - max(least, len(self._labels[key]))))
                widths[key] -= given
                excess -= given
        return widths


def cut(text: Text, width: int) -> Text:
    """Return a text of at most `width` cells: a name loses its middle, a sentence its end."""
    if text.cell_len <= width:
        return text
    if " " in text.plain and "_" not in text.plain:
        short = text.copy()
        short.truncate(width, overflow="ellipsis")
        return short
    head = (width - 1) // 2
    tail = width - 1 - head
    short = Text.assemble(text[:head], "…", text[len(text) - tail :] if tail else "", style=text.style)
    short.truncate(width, overflow="ellipsis")  # wide characters take two cells
    return short
