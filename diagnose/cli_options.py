"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diagnose.console import Terminal

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Anonymize = Annotated[
    bool,
    typer.Option(
        "--anonymize", help="No paths, hosts, users, projects or keys in what is printed and written."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Details too.")]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes [cores].")]
Experts = Annotated[int | None, typer.Option("--experts", min=1, help="Experts kept a layer.")]
StrategyName = Annotated[str, typer.Option("--strategy", help="How the kept experts are chosen.")]
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder, or embedded:NAME.")]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="A folder, or embedded:NAME.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe.")]


def terminal_for(json: bool = False, quiet: bool = False, verbose: bool = False) -> Terminal:
    """Return the terminal that the common options ask for."""
    return Terminal(verbosity=-1 if quiet else int(verbose), json_only=json)
