"""Is a built proxy still what its manifest says? A copy that was cut short, or a file that was edited, is not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

HASHED_BYTES = 2 << 30
"""Up to this many bytes in all, content is compared too; above, sizes alone: a hash takes seconds a gigabyte."""


def damage(folder: Path, manifest: Any) -> str:
    """Return in a few words what is wrong with a proxy's files, "" where nothing is or the manifest lists none."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        return ""
    known = {str(name): entry for name, entry in files.items() if isinstance(entry, dict)}
    for name, entry in known.items():
        path = folder / Path(name).name
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != entry.get("bytes"):
            return f"{path.name} has {path.stat().st_size} bytes, and was written with {entry.get('bytes')}"
    if sum(entry["bytes"] for entry in known.values()) > HASHED_BYTES:
        return ""
    for name, entry in known.items():
        with (folder / Path(name).name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.get("sha256"):
                return f"{Path(name).name} is not what was written"
    return ""
