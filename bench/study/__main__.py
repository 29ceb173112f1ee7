"""`make study`: every bar of the scoring, on simulated curves and on recorded incidents; writes `docs/study.md`.

Runs are kept in the bank and found again; `--plan` says how many are missing. The incidents are those of
`diagnose selftest` that were recorded under the replays' own recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bench.study import incidents, simulations
from diagnose.bank import Bank
from diagnose.console import Terminal
from diagnose.jobs import cores
from diagnose.provenance import scoring_key
from diagnose.selftest.arena import FULL, QUICK, Arena, open_arena
from diagnose.selftest.fill import fill, plan
from diagnose.selftest.report import Section, markdown, show
from diagnose.store import read_json, write_json, write_text
from taxonomy.registry import library

PARTS: Mapping[str, Callable[[incidents.Study], list[Section]]] = {
    "simulations": simulations.sections,
    "healthy": incidents.healthy,
    "open": incidents.open_set,
    "spine": incidents.spine,
    "controls": incidents.controls,
}
COMMAND = "make study"


def main() -> None:
    """Carry the study out; exit 1 where a bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.study", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("build/bank"), help="where runs are kept")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="one part; repeatable")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a few short runs, few repeats")
    parser.add_argument("--plan", action="store_true", help="print how many runs it takes, run nothing")
    parser.add_argument("--limit", type=float, default=0.0, metavar="SECONDS", help="start no run after that")
    parser.add_argument("--workers", type=int, default=None, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("docs/study.md"), help="page to write")
    arguments = parser.parse_args()
    terminal = Terminal()
    scale = QUICK if arguments.quick else replace(FULL, changed=False)
    bank = Bank(arguments.runs / "quick" if arguments.quick else arguments.runs, arguments.workers)
    chosen = list(arguments.only or PARTS)
    arena = None
    if set(chosen) != {"simulations"}:
        arena = open_arena(bank, library(), scale)
        parts = {name: runs for name, runs in arena.parts().items() if _needed(name, chosen, arena)}
        planned = plan(bank, arena, parts, arguments.workers)
        show([planned], terminal)
        if arguments.plan:
            return
        fill(bank, arena, parts, arguments.limit, terminal)
    study = incidents.Study(bank, arena, arguments.workers or cores(), quick=arguments.quick)
    kept = arguments.runs / "study.json"
    found = {} if arguments.quick else read_json(kept) or {}
    if found.pop("scoring", None) != scoring_key():
        found = {}  # parts that another scoring made don't belong on this page
    for name in chosen:
        sections = PARTS[name](study)
        show(sections, terminal)
        found[name] = [item.to_json() for item in sections]
        if not arguments.quick:
            arguments.runs.mkdir(parents=True, exist_ok=True)
            write_json(kept, found | {"scoring": scoring_key()})  # parts of earlier calls stay in the page
    if not arguments.quick:
        every = [Section.from_json(item) for name in PARTS for item in found.get(name, ())]
        write_text(arguments.out, markdown("The study of the scoring", COMMAND, every))
        terminal.say(f"wrote {arguments.out}")
    sys.exit(
        any(
            "not hold" in cell
            for item in found.values()
            for part in item
            for row in part["rows"]
            for cell in row
        )
    )


def _needed(part: str, chosen: list[str], arena: Arena) -> bool:
    """Whether a part of the bank is needed for the chosen parts of the study."""
    wanted = {
        "healthy": {"healthy"},
        "open": {"single", "double"},
        "spine": {"single"},
        "controls": {"single", *arena.scale.controls},
    }
    return part in ("replays", "twins") or any(part in wanted.get(name, ()) for name in chosen)


if __name__ == "__main__":
    main()
