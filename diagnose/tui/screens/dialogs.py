"""Small windows over a screen: help, a fault card, a question, a list to pick from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from diagnose.report.text import literal, number
from diagnose.report.words import metric_title
from diagnose.tui.keybar import KeyBar
from taxonomy.categories import CATEGORY_BY_ID
from taxonomy.registry import FaultCard
from taxonomy.symptoms import SYMPTOM_BY_ID

_CLOSE = Binding("escape,q", "dismiss", "Close", key_display="esc", tooltip="Back to the screen", id="close")


class HelpScreen(ModalScreen[None]):
    """All keys of the screen beneath, in words."""

    BINDINGS = [_CLOSE]  # noqa: RUF012

    def __init__(self, rows: list[tuple[str, str, str]], signs: Mapping[str, str] | None = None) -> None:
        """Make the window.

        Args:
            rows: (key, what it does, more about it).
            signs: Signs on the screen → what they mean.
        """
        super().__init__()
        self._rows, self._signs = rows, signs or {}

    def compose(self) -> ComposeResult:
        """Lay out the keys as a table."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        table.add_column("key", no_wrap=True)
        table.add_column("does", no_wrap=True)
        table.add_column("")
        for key, description, tooltip in self._rows:
            table.add_row(Text(key, "bold"), Text(description), Text(tooltip, "dim"))
        extra = Text(
            "\ntab and shift+tab move between the parts of a screen, ctrl+p lists every command.", "dim"
        )
        with VerticalScroll(classes="dialog") as box:
            box.border_title = "Keys"
            yield Static(table)
            if self._signs:
                signs = Table.grid(padding=(0, 2, 0, 0))
                for sign, meaning in self._signs.items():
                    signs.add_row(Text(sign, "bold"), Text(meaning))
                yield Static(Text("\nSigns and words", "bold"))
                yield Static(signs)
            yield Static(extra)
        yield KeyBar()


class CardScreen(ModalScreen[None]):
    """One fault card, whole."""

    BINDINGS = [_CLOSE]  # noqa: RUF012

    def __init__(self, card: FaultCard) -> None:
        """Make the window of a card."""
        super().__init__()
        self._card = card

    def compose(self) -> ComposeResult:
        """Lay out the card as titled paragraphs."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Text(literal(self._card.title, 70))
            yield Static(card_view(self._card))
        yield KeyBar()


class TextScreen(ModalScreen[None]):
    """Something to read: a text or a table, from the top or from its end."""

    BINDINGS = [_CLOSE]  # noqa: RUF012

    def __init__(self, title: str, content: RenderableType, *, end: bool = False) -> None:
        """Make the window; `content` holds literal texts alone. With `end` it starts at the last line."""
        super().__init__()
        self._title, self._content, self._end = title, content, end

    def compose(self) -> ComposeResult:
        """Lay out the text."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Text(literal(self._title, 70))
            yield Static(self._content)
        yield KeyBar()

    def on_mount(self) -> None:
        """Go where reading starts."""
        if self._end:
            self.query_one(VerticalScroll).scroll_end(animate=False)


class ConfirmScreen(ModalScreen[bool]):
    """A question with the consequences spelt out; anything but `y` means no."""

    BINDINGS = [  # noqa: RUF012
        Binding("y", "answer(True)", "Yes", tooltip="Do it", id="yes"),
        Binding(
            "n,escape", "answer(False)", "No", key_display="n", tooltip="Leave everything as it is", id="no"
        ),
    ]

    def __init__(self, question: str, details: tuple[str, ...] = ()) -> None:
        """Make the window; both texts are shown literally."""
        super().__init__()
        self._question, self._details = question, details

    def compose(self) -> ComposeResult:
        """Lay out question and details."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = "Sure?"
            yield Static(Text(literal(self._question), "bold"))
            yield Static(Text("\n".join(literal(detail) for detail in self._details)))
            yield Static(Text("\ny: yes   n: no", "dim"))
        yield KeyBar()

    def action_answer(self, yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(yes)


class AskScreen(ModalScreen[str | None]):
    """One value; enter takes it, and a value that makes no sense is said instead of taken."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "dismiss", "Cancel", key_display="esc", tooltip="Leave it as it is", id="cancel"),
    ]

    def __init__(self, title: str, value: str, hint: str, check: Callable[[str], str]) -> None:
        """Make the window.

        Args:
            title: What is asked.
            value: What is in force now.
            hint: What may be typed.
            check: Value → what is wrong with it, "" when nothing is.
        """
        super().__init__()
        self._title, self._value, self._hint, self._check = title, value, hint, check

    def compose(self) -> ComposeResult:
        """Lay out the field."""
        with Vertical(classes="dialog") as box:
            box.border_title = Text(literal(self._title, 70))
            yield Input(self._value, id="answer", compact=True)
            yield Static(Text(literal(self._hint)), id="hint")
            yield Static(Text("enter takes it, esc leaves it as it is", "dim"))
        yield KeyBar()

    def on_mount(self) -> None:
        """Start in the field."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the value, or say what is wrong with it."""
        event.stop()
        value = event.value.strip()
        if problem := self._check(value):
            self.query_one("#hint", Static).update(Text(literal(problem), "bold red"))
        else:
            self.dismiss(value)


class FilterScreen(ModalScreen[str | None]):
    """One of a long list: typing leaves the entries that have every word, enter picks the one under the cursor."""

    BINDINGS = [  # noqa: RUF012
        Binding("escape", "dismiss", "Close", key_display="esc", tooltip="Back to the screen", id="close"),
        Binding("down", "move(1)", "Down", tooltip="Next entry", show=False, id="pick-down"),
        Binding("up", "move(-1)", "Up", tooltip="Last entry", show=False, id="pick-up"),
        Binding("pagedown", "move(10)", "Down", tooltip="Ten further", show=False, id="pick-page-down"),
        Binding("pageup", "move(-10)", "Up", tooltip="Ten back", show=False, id="pick-page-up"),
    ]

    def __init__(self, title: str, entries: Mapping[str, str], current: str = "") -> None:
        """Make the window.

        Args:
            title: What is picked.
            entries: Value → what is shown, literally.
            current: The value that the cursor starts on.
        """
        super().__init__()
        self._title, self._entries, self._current = title, dict(entries), current
        self._listed: list[str] = []

    def compose(self) -> ComposeResult:
        """Lay out field and list."""
        with Vertical(classes="dialog") as box:
            box.border_title = self._title
            box.border_subtitle = "type to search, ↑ ↓ choose, enter takes it"
            yield Input(placeholder="words of a name or its title", id="search", compact=True)
            picks = OptionList(id="picks")
            picks.can_focus = False  # the field keeps the focus, and hands the arrows on
            yield picks
        yield KeyBar()

    def on_mount(self) -> None:
        """List all."""
        self.query_one("#search").focus()
        self._list("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Leave what has every word."""
        event.stop()
        self._list(event.value)

    def _list(self, typed: str) -> None:
        words = typed.lower().split()
        self._listed = [
            value
            for value, text in self._entries.items()
            if all(word in f"{value} {text}".lower() for word in words)
        ]
        picks = self.query_one("#picks", OptionList)
        picks.clear_options()
        nothing = Option(Text(f"nothing has {literal(typed, 40)!r}", "dim"), disabled=True)
        options = [Option(Text(self._entries[value])) for value in self._listed]
        picks.add_options(options or [nothing])
        if self._listed:
            current = self._current if self._current in self._listed else self._listed[0]
            picks.highlighted = self._listed.index(current)
            picks.call_after_refresh(picks.scroll_to_highlight)

    def action_move(self, by: int) -> None:
        """Move the cursor, as far as there are entries."""
        picks = self.query_one("#picks", OptionList)
        if self._listed:
            picks.highlighted = min(max((picks.highlighted or 0) + by, 0), len(self._listed) - 1)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the entry under the cursor."""
        event.stop()
        at = self.query_one("#picks", OptionList).highlighted
        if self._listed and at is not None:
            self.dismiss(self._listed[at])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take the entry that was clicked."""
        event.stop()
        if self._listed:
            self.dismiss(self._listed[event.option_index])


class PickScreen(ModalScreen[str | None]):
    """One of a short list; enter or the entry's first letter picks it."""

    BINDINGS = [_CLOSE]  # noqa: RUF012

    def __init__(self, title: str, entries: dict[str, str], current: str = "", letters: bool = False) -> None:
        """Make the window.

        Args:
            title: What is picked.
            entries: Value → what is shown, literally.
            current: The value that the cursor starts on.
            letters: Whether a letter picks an entry, as "(h) …" in front of it says.
        """
        super().__init__()
        self._title, self._entries, self._current = title, entries, current
        self._letters = _letters(tuple(entries)) if letters else {}

    def compose(self) -> ComposeResult:
        """Lay out the list."""
        by_value = {value: letter for letter, value in self._letters.items()}
        options = [
            Option(Text(f"({by_value[value]}) {text}" if value in by_value else text), id=f"pick-{index}")
            for index, (value, text) in enumerate(self._entries.items())
        ]
        with Vertical(classes="dialog") as box:
            box.border_title = self._title
            yield OptionList(*options, id="picks")
        yield KeyBar()

    def on_mount(self) -> None:
        """Start on the current entry."""
        picks = self.query_one(OptionList)
        values = list(self._entries)
        picks.highlighted = values.index(self._current) if self._current in values else 0
        picks.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close with the picked value."""
        self.dismiss(list(self._entries)[event.option_index])

    def on_key(self, event: Key) -> None:
        """Pick by letter; the screen beneath must not see it too."""
        if event.key in self._letters:
            event.stop()
            event.prevent_default()
            self.dismiss(self._letters[event.key])


def _letters(values: tuple[str, ...]) -> dict[str, str]:
    """Return a letter for each value: its first one that no other value has taken."""
    taken: dict[str, str] = {}
    for value in values:
        letter = next((char for char in value.lower() if char.isalpha() and char not in {*taken, "q"}), "")
        if letter:
            taken[letter] = value
    return taken


def card_view(card: FaultCard) -> Table:
    """Return a fault card as a two-column table of what is known."""
    category = CATEGORY_BY_ID.get(card.category)
    facts: dict[str, list[str]] = {
        "fault": [card.id],
        "category": [category.title if category else card.category],
        "symptoms": [SYMPTOM_BY_ID[s].title if s in SYMPTOM_BY_ID else s for s in card.symptoms],
        "mechanism": [card.mechanism],
        "injected at": [f"{card.stage.value}, as {card.form.value}"],
        "parameters": [
            f"{p.name} = {number(p.default)} {p.unit}".strip() + f": {p.meaning} ({p.source})"
            for p in card.parameters
        ],
        "expected": [
            f"{metric_title(e.metric)}: {e.direction}, {e.onset}" + (" (primary)" if e.weight > 1 else "")
            for e in card.signature
        ],
        "look-alikes": [f"{r.fault}: told apart by {metric_title(r.metric)}. {r.why}" for r in card.rivals],
        "proved by": [f"{card.witness.name} > {number(card.witness.above)}: {card.witness.meaning}"],
        "fix": [card.fix],
        "check by hand": [card.check_by_hand] if card.check_by_hand else [],
        "sources": list(card.sources),
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, lines in facts.items():
        for index, text in enumerate(lines):
            table.add_row(Text(name if index == 0 else ""), Text(literal(text)))
    return table


def number_between(value: str, low: float, high: float) -> str:
    """Say what is wrong with a text that should be a number above `low` and up to `high`, "" for nothing."""
    try:
        fits = low < float(value) <= high
    except ValueError:
        fits = False
    return "" if fits else f"a number above {number(low)} and up to {number(high)} is wanted, not {value!r}"
