"""Take the pictures of the terminal interface in README and docs from a finished run folder.

`python -m bench.pictures RUN_DIR` writes `docs/symptom.svg` and `docs/verdict.svg`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from diagnose.tui.app import DiagnoseApp
from diagnose.tui.launch import SessionBackend


async def picture(run_dir: Path | None, size: tuple[int, int], out: Path) -> None:
    """Write one picture; fonts come from the reader's machine, not from the network."""
    app = DiagnoseApp(SessionBackend(), run_dir=run_dir)
    async with app.run_test(size=size) as pilot:
        await pilot.pause(3)
        svg = app.export_screenshot()
    out.write_text(re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL))


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    asyncio.run(picture(None, (100, 30), Path("docs/symptom.svg")))
    asyncio.run(picture(run_dir, (120, 38), Path("docs/verdict.svg")))


if __name__ == "__main__":
    main()
