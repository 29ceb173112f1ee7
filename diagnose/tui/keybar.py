"""The line of keys at the foot of a screen, as one widget.

Textual's own footer makes a widget of every key, anew at each change of focus: most of the time between a key and
what it does went into that.
"""

from __future__ import annotations

from itertools import groupby

from rich.style import Style
from rich.text import Text
from textual.binding import ActiveBinding
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Static

GAP = "  "


class KeyBar(Static):
    """Keys of the screen and of whatever has the focus; a click on one does what the key does."""

    DEFAULT_CSS = """
    KeyBar { dock: bottom; height: auto; max-height: 2; padding: 0 1; background: $footer-background; }
    """

    def on_mount(self) -> None:
        """Follow the bindings in force."""
        self.screen.bindings_updated_signal.subscribe(self, self._changed)
        self._show()

    def on_resize(self, _: Resize) -> None:
        """Break the lines anew."""
        self._show()

    def _changed(self, screen: Screen[object]) -> None:
        if self.is_attached and screen is self.screen:
            self._show()

    def _show(self) -> None:
        items = self._items()
        if items:
            self.update(lay_out(items, max(self.size.width, 20)))

    def _items(self) -> list[Text]:
        """Return one text a key, keys of a group that stand together as one."""
        shown: dict[str, ActiveBinding] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.show and active.binding.description:
                shown.setdefault(active.binding.action, active)
        items = []
        for group, members in groupby(shown.values(), lambda active: active.binding.group):
            together = list(members)
            if group is None:
                items += [self._item([one], one.binding.description, dim=not one.enabled) for one in together]
            else:
                items.append(self._item(together, group.description, dim=False))
        return items

    def _item(self, actives: list[ActiveBinding], label: str, *, dim: bool) -> Text:
        text = Text()
        for active in actives:
            click = Style.from_meta({"@click": f"app.simulate_key({active.binding.key.split(',')[0]!r})"})
            key = self.app.get_key_display(active.binding)
            text.append(key, click + Style(bold=not dim, dim=dim))
        text.append(f" {label}", Style(dim=dim))
        return text


def lay_out(items: list[Text], width: int) -> Text:
    """Return items side by side, broken between items where the line is full."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + len(GAP) + item.cell_len <= width:
            lines[-1].append(GAP).append_text(item)
        else:
            lines.append(item.copy())
    return Text("\n").join(lines)
