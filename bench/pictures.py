"""Take the pictures of the terminal interface in README and docs.

`python -m bench.pictures RUN_DIR` walks through the shipped incident with the keyboard, as a user would, and shows the
finished run folder RUN_DIR at its end. It writes `docs/tui/*.svg`, at the two sizes that are tested.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from textual.pilot import Pilot

from diagnose.tui.app import DiagnoseApp
from diagnose.tui.launch import SessionBackend
from diagnose.tui.plan import PastRun

OUT = Path("docs/tui")
SIZES = {"80x24": (80, 24), "200x50": (200, 50)}
PATIENCE = 30.0


class Tidy(SessionBackend):
    """The real program, without the runs and logs of whoever takes the pictures."""

    def past_runs(self) -> tuple[PastRun, ...]:
        """Return nothing."""
        return ()

    def recent_logs(self) -> tuple[Path, ...]:
        """Return nothing."""
        return ()


async def shown(pilot: Pilot[None], words: str) -> None:
    """Wait until some words are on the screen."""
    for _ in range(round(PATIENCE / 0.1)):
        await pilot.pause(0.1)
        strips = pilot.app.screen._compositor.render_strips()
        if words in "\n".join("".join(segment.text for segment in strip) for strip in strips):
            await pilot.pause(0.5)
            return
    raise TimeoutError(words)


def save(app: DiagnoseApp, name: str, size: str) -> None:
    """Write a picture; fonts come from the reader's machine, not from the network."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", app.export_screenshot(), flags=re.DOTALL)
    # A picture says nothing of the machine that it was taken on, nor of the one that the run was made on.
    svg = re.sub(r"/[\w./-]*/(?=proxy/embedded/)", "…/", svg.replace(f"{Path.cwd()}/", "…/"))
    (OUT / f"{name}-{size}.svg").write_text(svg)


async def walk(run_dir: Path, size: str) -> None:
    """Take one picture of every screen."""
    app = DiagnoseApp(Tidy())
    async with app.run_test(size=SIZES[size]) as pilot:
        await shown(pilot, "kl_spike")
        save(app, "home", size)
        await pilot.press("enter")
        await shown(pilot, "The log shows")
        save(app, "symptom", size)
        await pilot.press("enter")
        await shown(pilot, "marked")
        save(app, "candidates", size)
        await pilot.press("i")
        await shown(pilot, "mechanism")
        save(app, "card", size)
    app = DiagnoseApp(Tidy(), run_dir)
    async with app.run_test(size=SIZES[size]) as pilot:
        await shown(pilot, "Finished")
        save(app, "verdict", size)
        await pilot.press("2")
        await pilot.pause(1)
        save(app, "chart", size)
        await pilot.press("x")
        await shown(pilot, "experts a layer")
        save(app, "proxy", size)


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    OUT.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        asyncio.run(walk(run_dir, size))


if __name__ == "__main__":
    main()
