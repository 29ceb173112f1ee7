"""What the TUI remembers from one day to the next: logs opened lately, pasted pieces of logs, playbooks it wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path

from diagnose.store import default_parent, read_json, write_json, write_text
from diagnose.tui.plan import Incident

KEPT = 12
"""Logs remembered."""


def home() -> Path:
    """Return the folder for all of it, beside the run folders."""
    return default_parent().parent / "opened"


def recent_logs() -> tuple[Path, ...]:
    """Return the logs opened lately that are still there, newest first."""
    found = read_json(home() / "recent.json")
    paths = [Path(item) for item in found if isinstance(item, str)] if isinstance(found, list) else []
    return tuple(path for path in paths if path.exists())


def remember(log: Path) -> None:
    """Put a log at the head of the list. A state folder that can't be written is no reason to fail."""
    log = log.absolute()
    paths = [log, *(path for path in recent_logs() if path != log)][:KEPT]
    try:
        home().mkdir(parents=True, exist_ok=True)
        write_json(home() / "recent.json", [str(path) for path in paths])
    except OSError:
        return


def keep_pasted(text: str) -> Path:
    """Write a pasted text under a name made of its content, so that pasting it again is no second file.

    Raises:
        OSError: The disk is full or broken.
    """
    home().mkdir(parents=True, exist_ok=True)
    path = home() / f"pasted-{hashlib.sha256(text.encode()).hexdigest()[:8]}.log"
    write_text(path, text)
    return path


def write_playbook(incident: Incident) -> Path:
    """Write the playbook of a log that has none: the symptom is left to the log, the candidates to the symptom.

    Raises:
        OSError: The disk is full or broken.
        ProxyError: There is a checkpoint and it is none that a proxy can be cut from.
    """
    import yaml

    from diagnose.triage.playbook import playbook_name

    original = {"faulty": str(incident.faulty.absolute())}
    if incident.healthy is not None:
        original["healthy"] = str(incident.healthy.absolute())
    content = {
        "version": 1,
        "name": playbook_name(incident.faulty.stem),
        "symptom": "auto",
        "original": original,
        "proxy": _proxy(incident.checkpoint),
        "budget": {"seconds": 120},
    }
    remember(incident.faulty)
    home().mkdir(parents=True, exist_ok=True)
    path = home() / f"{content['name']}.yaml"
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    return path


def _proxy(checkpoint: str) -> dict[str, object]:
    """Return where the proxy comes from: half of the checkpoint's experts, or the embedded model as a stand-in."""
    from proxy.checkpoint import open_checkpoint
    from proxy.embedded import resolve
    from proxy.families import understand

    if not checkpoint:
        return {"from": "embedded", "experts": 12}
    layout = understand(open_checkpoint(resolve(checkpoint)))
    kept = max(layout.experts // 2, layout.top_k)
    return {"from": "checkpoint", "checkpoint": checkpoint, "experts": kept}
