"""First screen: open a log, a playbook or a past run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.suggester import Suggester
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from diagnose.report.text import literal
from diagnose.store import RunFolder
from diagnose.tui.keybar import KeyBar
from diagnose.tui.plan import Incident, Launched, PastRun, Plan, PlaybookEntry
from diagnose.tui.screens.base import BaseScreen
from diagnose.tui.widgets import Crumbs, Message
from taxonomy.symptoms import SYMPTOM_BY_ID

PLAYBOOK_SUFFIXES = (".yaml", ".yml")


class PathSuggester(Suggester):
    """Completes a path to the only or the first entry of its folder that begins like it."""

    def __init__(self) -> None:
        """Make the suggester; folders change, so nothing is cached."""
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """Return the completed text, None where nothing begins like it."""
        typed = os.path.expanduser(value)  # noqa: PTH111  (a trailing slash must stay)
        folder, _, start = typed.rpartition("/")
        if not value:
            return None
        try:
            names = sorted(
                entry.name + ("/" if entry.is_dir() else "")
                for entry in os.scandir(folder + "/" if "/" in typed else ".")
                if entry.name.startswith(start) and (start or not entry.name.startswith("."))
            )
        except OSError:
            return None
        return value + names[0][len(start) :] if names and len(names[0]) > len(start) else None


@dataclass(frozen=True)
class Sources:
    """What there is to start from."""

    playbooks: tuple[PlaybookEntry, ...]
    logs: tuple[Path, ...]
    runs: tuple[PastRun, ...]


class HomeScreen(BaseScreen):
    """One field for a path, and lists of what there is: playbooks, logs opened lately, past runs."""

    BINDINGS = [  # noqa: RUF012
        Binding(
            "o", "open_path", "Open", tooltip="Type the path of a log, playbook or run folder", id="open"
        ),
        Binding("v", "paste", "Paste", tooltip="Paste a piece of a log", id="paste"),
        Binding(
            "escape",
            "list",
            "List",
            key_display="esc",
            tooltip="From the path field back to the list",
            id="list",
        ),
        Binding("f5", "reload", "Reload", tooltip="Look for playbooks, logs and runs again", id="reload"),
    ]

    def __init__(self) -> None:
        """Make the screen."""
        super().__init__()
        self._found: Sources | None = None

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Crumbs(0)
        with Vertical(id="sources-box", classes="panel") as box:
            box.border_title = "Start from"
            yield Input(
                placeholder="path of a log, a playbook or a run folder: → completes, enter opens",
                id="path",
                compact=True,
                suggester=PathSuggester(),
            )
            yield OptionList(id="sources", markup=False)
        yield Message(id="detail", classes="panel")
        yield KeyBar()

    def on_mount(self) -> None:
        """Start looking for what can be opened."""
        self.query_one("#sources").focus()
        self._welcome()
        self._load()

    def on_screen_resume(self) -> None:
        """Look again when the user comes back."""
        self._load()

    def action_reload(self) -> None:
        """Look for playbooks, logs and runs again."""
        self._load()

    def action_open_path(self) -> None:
        """Go to the path field."""
        self.query_one("#path").focus()

    def action_list(self) -> None:
        """Go to the list."""
        self.query_one("#sources").focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the way back to the list only from the path field."""
        return action != "list" or bool(self.query("#path:focus"))

    def action_paste(self) -> None:
        """Take a piece of a log from the clipboard."""
        from diagnose.tui.screens.incident import PasteScreen

        self.app.push_screen(PasteScreen(), self._pasted)

    def _pasted(self, text: str | None) -> None:
        if text:
            backend = self.diagnose.backend
            self.ask("paste", lambda: backend.keep_pasted(text), self.ask_incident, self._unread)

    def _load(self) -> None:
        backend = self.diagnose.backend
        self.ask(
            "sources",
            lambda: Sources(backend.playbooks(), backend.recent_logs(), backend.past_runs()),
            self._fill,
            self.say_error,
        )

    def _fill(self, found: Sources) -> None:
        if found == self._found:
            return
        self._found = found
        sources = self.query_one("#sources", OptionList)
        sources.clear_options()
        sources.add_option(Option(Text("Playbooks", "bold"), disabled=True))
        for index, entry in enumerate(found.playbooks):
            symptom = SYMPTOM_BY_ID.get(entry.symptom)
            note = (
                symptom.title
                if symptom
                else "the log says which"
                if entry.symptom == "auto"
                else entry.symptom
            )
            sources.add_option(Option(_entry(entry.name, note), id=f"playbook-{index}"))
        if found.logs:
            sources.add_option(Option(Text("Logs opened lately", "bold"), disabled=True))
        for index, log in enumerate(found.logs):
            sources.add_option(Option(_entry(log.name, str(log.parent)), id=f"log-{index}"))
        sources.add_option(Option(Text("Past runs" if found.runs else "No past runs", "bold"), disabled=True))
        for index, past in enumerate(found.runs):
            sources.add_option(Option(_entry(past.path.name, past.state), id=f"run-{index}"))
        sources.highlighted = 1 if found.playbooks or found.logs or found.runs else None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open the picked playbook, log or run."""
        found = self._found
        assert found is not None
        kind, _, index = (event.option.id or "").partition("-")
        if kind == "playbook":
            self._read(found.playbooks[int(index)].path)
        elif kind == "log":
            self.ask_incident(found.logs[int(index)])
        elif kind == "run":
            self.diagnose.show_run(Launched(RunFolder(found.runs[int(index)].path)))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Open what was typed: a run folder by its session, a playbook by its suffix, everything else as a log."""
        text = event.value.strip()
        if not text:
            return
        path = Path(text).expanduser()
        if (path / "session.json").is_file():
            self.diagnose.show_run(Launched(RunFolder(path.resolve())))
        elif path.suffix in PLAYBOOK_SUFFIXES or not path.exists():
            self._read(path)
        else:
            self.ask_incident(path)

    def ask_incident(self, log: Path) -> None:
        """Ask what there is beside a log, then go on with it."""
        from diagnose.tui.screens.incident import IncidentScreen

        self.app.push_screen(IncidentScreen(log, PathSuggester()), self._incident)

    def _incident(self, incident: Incident | None) -> None:
        if incident is not None:
            self._read(incident.faulty, incident)

    def _read(self, path: Path, incident: Incident | None = None) -> None:
        """Read a playbook, or make one for a log and read that."""
        backend = self.diagnose.backend
        self.query_one(Message).say(f"Reading {path} …")
        self.ask(
            "plan",
            lambda: backend.plan(path if incident is None else backend.playbook_for(incident)),
            self._show,
            self._unread,
        )

    def _unread(self, error: Exception) -> None:
        """Show why something cannot be opened, with the keys working again: the path stays as it was typed."""
        self.say_error(error)
        self.query_one("#sources").focus()

    def _show(self, plan: Plan) -> None:
        from diagnose.tui.screens.symptom import SymptomScreen

        self._welcome()
        self.query_one("#sources").focus()
        self.app.push_screen(SymptomScreen(plan))

    def _welcome(self) -> None:
        self.query_one(Message).say(
            "Start from the log of the run that went wrong, from a playbook, or look at a past run.",
            "head",
            "enter opens what is under the cursor, o types a path, v pastes, ? shows all keys.",
        )


def _entry(name: str, note: str) -> Text:
    return Text.assemble(f" {literal(name, 60)}", (f"  {literal(note, 80)}", "dim"))
