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
StrategyName = Annotated[
    str,
    typer.Option(
        "--strategy", help="multi_view, frequency, reap, random, first_k, merge, or views joined by +."
    ),
]
CheckpointArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A folder, or embedded:NAME.")]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="A folder, or embedded:NAME.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change the recipe.")]


def anonymous(terminal: Terminal, anonymize: bool, *files: object) -> Terminal:
    """Return the terminal, with nothing leaving it that says where it comes from, if that is asked for.

    Args:
        terminal: The terminal.
        anonymize: Whether it is.
        files: Files and folders that the answer may name; None for one that is not there.
    """
    if not anonymize:
        return terminal
    from dataclasses import replace

    from diagnose.anonymize import Anonymizer

    return replace(
        terminal, anonymizer=Anonymizer.of_machine([str(file) for file in files if file is not None])
    )


def terminal_for(json: bool = False, quiet: bool = False, verbose: bool = False) -> Terminal:
    """Return the terminal that the common options ask for."""
    return Terminal(verbosity=-1 if quiet else int(verbose), json_only=json)
