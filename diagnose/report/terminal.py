"""The final table for a terminal: rich renderables for 80 columns, in words and signs before colours."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from diagnose.report.text import literal, number, percent, seconds
from diagnose.report.words import (
    VERDICT_STYLE,
    VERDICT_SYMBOL,
    VERDICT_TITLE,
    VERDICT_WORD,
    agreement_word,
    best,
    headline,
    key_metrics,
    metric_title,
    movement,
    onset_word,
    order_note,
    probes_found,
    remedies_found,
    replay_name,
    strengths_found,
    together,
    what_to_do,
    why,
    witness_word,
)
from diagnose.result import AnomalyType, Candidate, Direction, Result, Verdict

_DIRECTION_STYLE = {Direction.UP: "cyan", Direction.DOWN: "blue"}
_AGREEMENT_STYLE = {"agrees": "green", "opposite": "red", "silent": "red", "extra": "yellow"}


def result_view(result: Result) -> RenderableType:
    """Return the whole answer: headline, ranking, metrics of the first candidate, reasons, what to do."""
    parts: list[RenderableType] = [headline_view(result), Text()]
    if result.score.ranking:
        note = order_note(result)
        parts += [ranking_view(result), *([Text(note, "dim")] if note else []), Text()]
    first = best(result)
    if first and first.metrics:
        parts += [Text(f"What {literal(first.title, 80)} did", "bold"), metrics_view(first), Text()]
    parts += [reasons_view(result)]
    return Group(*parts)


def render(result: Result, width: int = 80) -> str:
    """Return the whole answer as plain text without any control sequence, `width` columns wide."""
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    console.print(result_view(result))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def verdict_text(verdict: Verdict, word: str | None = None) -> Text:
    """Return a verdict with its sign, coloured where there are colours."""
    return Text(f"{VERDICT_SYMBOL[verdict]} {word or VERDICT_WORD[verdict]}", VERDICT_STYLE[verdict])


def headline_view(result: Result) -> RenderableType:
    """Return verdict and headline."""
    verdict = result.score.verdict
    title = verdict_text(verdict, VERDICT_TITLE[verdict])
    title.stylize("bold")
    return Group(title, Text(headline(result)))


def ranking_view(result: Result) -> Table:
    """Return the ranking, one candidate a row, the nearest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("fault", overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    table.add_column("distance", justify="right", no_wrap=True)
    table.add_column("agrees", justify="right", no_wrap=True)
    table.add_column("injection", no_wrap=True)
    for rank, candidate in enumerate(result.score.ranking, 1):
        table.add_row(
            str(rank),
            Text(literal(replay_name(candidate.fault, candidate.severity), 80)),
            verdict_text(candidate.verdict),
            number(candidate.distance),
            percent(candidate.agreement),
            Text(witness_word(candidate), "" if candidate.witness_ok else "magenta"),
        )
    return table


def metrics_view(candidate: Candidate, limit: int = 12) -> Table:
    """Return what one candidate did to each metric, against what the original did."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    more = len(candidate.metrics) - limit
    table.caption = Text(
        (f"and {more} more metrics in the JSON and HTML reports · " if more > 0 else "")
        + "trend: likeness of the two effect curves, −1 to 1 · onset: updates since the start, original/proxy",
        "dim",
    )
    table.caption_justify = "left"
    table.add_column("metric", overflow="fold", ratio=1)
    table.add_column("original", no_wrap=True)
    table.add_column("proxy", no_wrap=True)
    table.add_column("match", no_wrap=True)
    table.add_column("trend", justify="right", no_wrap=True)
    table.add_column("onset o/p", no_wrap=True)
    for name in key_metrics(candidate, limit):
        metric = candidate.metrics[name]
        agreement = agreement_word(metric)
        table.add_row(
            Text(metric_title(name), "bold" if metric.weight > 1 else ""),
            _movement(metric.original, metric.type_original),
            _movement(metric.proxy, metric.type_proxy),
            Text(agreement, _AGREEMENT_STYLE.get(agreement, "")),
            "–" if metric.trend is None else number(metric.trend, 2),
            f"{onset_word(metric.onset_original)}/{onset_word(metric.onset_proxy)}",
        )
    return table


def reasons_view(result: Result) -> RenderableType:
    """Return reasons, what to do, what was not tried or failed, and where everything is."""
    parts: list[RenderableType] = []
    asked_for = {  # what somebody waited for stands where it is read first
        "Would it help?": remedies_found(result),
        **({"To tell them apart": probes_found(result)} if result.probes else {}),
    }
    sections = asked_for | {
        "Why": why(result),
        "Strength that fits best": strengths_found(result),
        "What to do": what_to_do(result),
        **({} if result.probes else {"To tell them apart": probes_found(result)}),
        "Failed runs": tuple(f"{literal(run)}: {literal(why)}" for run, why in result.failures.items()),
        "Not replayed": tuple(map(literal, together(result.not_tried))),
        "Stopped early": tuple(map(literal, together(result.stopped_early))),
    }
    for title, items in sections.items():
        if items:
            parts += [Text(title, "bold"), *(_bullet(item) for item in items)]
    if rates := result.score.error_rates:
        words = ", ".join(f"{literal(name)} {number(value, 2)}" for name, value in rates.items())
        parts.append(Text(f"Error rates of the margins in force: {words}", "dim"))
    where = f", in {literal(result.run_dir)}" if result.run_dir else ""
    parts.append(Text(f"Took {seconds(result.wall_s)}{where}", "dim"))
    return Group(*parts)


def _movement(direction: Direction, kind: AnomalyType) -> Text:
    return Text(movement(direction, kind), _DIRECTION_STYLE.get(direction, ""))


def _bullet(text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")  # a path that is longer than the line is to be typed whole
    grid.add_row(Text("•"), Text(text))
    return Padding(grid, (0, 0, 0, 1))
