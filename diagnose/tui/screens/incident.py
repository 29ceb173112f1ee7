"""Two windows on the way from a bare log to a plan: what there is beside the log, and a pasted piece of one."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Input, Label, Static, TextArea

from diagnose.report.text import literal
from diagnose.tui.keybar import KeyBar
from diagnose.tui.plan import Incident

_CANCEL = Binding("escape", "dismiss", "Cancel", key_display="esc", tooltip="Back, nothing done", id="cancel")


class IncidentScreen(ModalScreen[Incident | None]):
    """Two optional paths beside a log: a healthy twin and the model's checkpoint. Enter in a field goes on."""

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+s", "take", "Go on", tooltip="Go on with what is filled in", id="take"),
        _CANCEL,
    ]

    def __init__(self, log: Path, suggester: Suggester) -> None:
        """Make the window of a log; `suggester` completes its paths."""
        super().__init__()
        self._log, self._suggester = log, suggester

    def compose(self) -> ComposeResult:
        """Lay out the fields, each with what leaving it empty means."""
        with VerticalScroll(classes="dialog") as box:
            box.border_title = Text(literal(f"Log {self._log.name}", 70))
            yield Label("Log of a healthy run of the same job")
            yield Input(
                placeholder="empty: the log's own past is the baseline",
                id="twin",
                compact=True,
                suggester=self._suggester,
            )
            yield Label("Checkpoint of the model (a folder in Hugging Face layout)")
            yield Input(
                placeholder="empty: the embedded model stands in, evidence is weaker",
                id="model",
                compact=True,
                suggester=self._suggester,
            )
            yield Static(Text("\nenter goes to the next field, then on; esc cancels.", "dim"))
        yield KeyBar()

    def on_mount(self) -> None:
        """Start in the first field."""
        self.query_one("#twin").focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """From the first field to the second, from the second on."""
        event.stop()
        if event.input.id == "twin":
            self.query_one("#model").focus()
        else:
            self.action_take()

    def action_take(self) -> None:
        """Close with what is filled in."""
        twin, model = (self.query_one(f"#{name}", Input).value.strip() for name in ("twin", "model"))
        self.dismiss(Incident(self._log, Path(twin).expanduser() if twin else None, model))


class PasteScreen(ModalScreen[str | None]):
    """Room for a pasted piece of a log."""

    BINDINGS = [  # noqa: RUF012
        Binding("ctrl+s", "take", "Go on", tooltip="Read the pasted text", id="take"),
        _CANCEL,
    ]

    def compose(self) -> ComposeResult:
        """Lay out the text area."""
        with Vertical(classes="dialog tall") as box:
            box.border_title = "Paste lines of a log"
            yield TextArea(id="pasted", soft_wrap=False, tab_behavior="focus")
            yield Static(Text("Paste with the terminal's own key; ctrl+s reads it, esc cancels.", "dim"))
        yield KeyBar()

    def on_mount(self) -> None:
        """Start in the text."""
        self.query_one(TextArea).focus()

    def action_take(self) -> None:
        """Close with the text."""
        self.dismiss(self.query_one(TextArea).text)
