"""The result as one self-contained HTML file: verdict, ranking, curves, numbers, and how they were made.

No script and no external resource; a content-security policy inside the file forbids both, so that a string
that slipped through the escaping could still not load or run anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from diagnose.report.evidence import Evidence, line
from diagnose.report.svg import Series, chart
from diagnose.report.text import literal, number, percent, seconds
from diagnose.report.words import (
    VERDICT_SYMBOL,
    VERDICT_TITLE,
    VERDICT_WORD,
    agreement_word,
    best,
    describe,
    headline,
    key_metrics,
    metric_title,
    movement,
    onset_word,
    probes_found,
    remedies_found,
    strength_word,
    strengths_found,
    what_to_do,
    why,
    witness_word,
)
from diagnose.result import Candidate, Result, Verdict
from taxonomy.categories import CATEGORY_BY_ID
from taxonomy.metrics import METRIC_BY_NAME

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
CHARTED = 6
"""Metrics with a chart; all metrics are in the table of numbers."""


def to_html(result: Result, evidence: Evidence) -> str:
    """Return the whole report as one HTML document.

    Args:
        result: The result.
        evidence: Curves for the charts; what is missing is left out of them, and said.
    """
    css = files("diagnose.report").joinpath("report.css").read_text(encoding="utf-8")
    verdict = result.score.verdict
    title = f"{result.name}: {VERDICT_TITLE[verdict]}"
    body = [
        f"<h1>{VERDICT_SYMBOL[verdict]} {VERDICT_TITLE[verdict]}</h1>",
        f'<p class="dim">{_e(result.name)} · symptom {_e(result.symptom)} · {_e(result.status)}</p>',
        f'<p class="headline">{_e(headline(result))}</p>',
        _section("Why", _list(why(result))),
        _section("Strength that fits best", _list(strengths_found(result))),
        _section("What to do", _list(what_to_do(result))),
        _section("To tell them apart", _list(probes_found(result))),
        _section("Would it help?", _list(remedies_found(result))),
        _section("Ranking", _ranking(result)),
        *(_candidate(candidate, evidence) for candidate in _shown(result)),
        _section("How it was made", _provenance(result)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(title)}</title><style>{css}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _e(value: object) -> str:
    return html.escape(literal(value), quote=True)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_e(title)}</h2>\n{content}</section>" if content else ""


def _list(items: Iterable[str]) -> str:
    rows = "".join(f"<li>{_e(item)}</li>" for item in items)
    return f"<ul>{rows}</ul>" if rows else ""


def _table(header: list[tuple[str, bool]], rows: list[list[str]]) -> str:
    """Return a table; `header` is (text, is numeric) a column, cells are plain text."""
    css = ['<td class="n">' if numeric else "<td>" for _, numeric in header]
    head = "".join(
        f'<th scope="col"{" class=n" if numeric else ""}>{_e(text)}</th>' for text, numeric in header
    )
    lines = (
        "<tr>" + "".join(f"{c}{_e(cell)}</td>" for c, cell in zip(css, row, strict=True)) + "</tr>"
        for row in rows
    )
    body = "".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _shown(result: Result) -> list[Candidate]:
    """Return the candidates whose curves are drawn: the best and what is not told from it."""
    first = best(result)
    if first is None:
        return []
    rivals = [c for c in result.score.ranking if c.fault in first.rivals and c.fault != first.fault]
    return [first, *rivals][: 3 if result.score.verdict == Verdict.REPRODUCED_NOT_SPECIFIC else 1]


def _ranking(result: Result) -> str:
    header = [
        ("#", True), ("fault", False), ("category", False), ("verdict", False), ("evidence", False),
        ("distance", True), ("lead over nearest rival", True), ("agreement", True), ("coverage", True),
        ("strength", True), ("not told from", False), ("injection", False),
    ]  # fmt: skip
    rows = []
    for rank, c in enumerate(result.score.ranking, 1):
        lead = "–"
        if c.specificity is not None:
            gap, low, high = c.specificity
            lead = f"{number(gap, 2)} ({number(low, 2)} to {number(high, 2)})"
        category = CATEGORY_BY_ID[c.category].title if c.category in CATEGORY_BY_ID else c.category
        rows.append(
            [
                str(rank), f"{c.title} ({c.fault})", category,
                f"{VERDICT_SYMBOL[c.verdict]} {VERDICT_WORD[c.verdict]}", c.evidence,
                number(c.distance), lead, percent(c.agreement), percent(c.coverage),
                strength_word(c), ", ".join(c.rivals) or "–",
                witness_word(c),
            ]
        )  # fmt: skip
    return _table(header, rows) if rows else ""


def _candidate(candidate: Candidate, evidence: Evidence) -> str:
    figures = [_figure(candidate, name, evidence) for name in key_metrics(candidate, CHARTED)]
    legend = (
        '<p class="dim"><span class="key healthy"></span>healthy, dashed, hollow marks '
        '<span class="key faulty"></span>faulty, solid, filled marks '
        '<span class="key onset"></span>onset interval. Lines are medians over seeds, '
        "bands their extremes.</p>"
    )
    measured = ", ".join(f"{name} = {number(value)}" for name, value in candidate.witness.items())
    content = [
        _list(candidate.reasons),
        f'<p class="dim">Proof of the injection ({witness_word(candidate)}): {_e(measured)}</p>'
        if measured
        else "",
        _numbers(candidate),
        legend if any(figures) else '<p class="dim">No curves were at hand for charts.</p>',
        *figures,
    ]
    return _section(f"{candidate.title}: what it did", "".join(content))


def _figure(candidate: Candidate, name: str, evidence: Evidence) -> str:
    metric, card = candidate.metrics[name], METRIC_BY_NAME.get(name)
    log = card.epsilon if card is not None and card.transform == "log10" else None
    sides = (
        ("original", evidence.original_healthy, evidence.original_faulty, metric.onset_original),
        (
            "proxy",
            evidence.proxy_healthy,
            evidence.replays(candidate.fault, candidate.severity),
            metric.onset_proxy,
        ),
    )
    charts = []
    for side, healthy, faulty, onset in sides:
        fault_name = "incident" if side == "original" else f"with {candidate.fault}"
        lines = [("healthy", "healthy", line(healthy, name)), (fault_name, "faulty", line(faulty, name))]
        series = [Series(label, style, curve) for label, style, curve in lines if curve is not None]
        if series:
            title = f"{metric_title(name)}, {side}"
            unit = card.unit if card is not None else ""
            charts.append(chart(series, title=title, y_label=unit, onset=onset, log_epsilon=log))
    if not charts:
        return ""
    pair = f'<div class="pair">{"".join(charts)}</div>'
    return f"<figure>{pair}<figcaption>{_e(describe(name, metric))}</figcaption></figure>"


def _numbers(candidate: Candidate) -> str:
    header = [
        ("metric", False), ("original", False), ("proxy", False), ("direction", False), ("trend", True),
        ("onset original", True), ("onset proxy", True), ("effect (margin), original", True),
        ("effect (margin), proxy", True), ("z original", True), ("z proxy", True), ("weight", True),
    ]  # fmt: skip
    rows = [
        [
            f"{metric_title(name)} ({name})",
            movement(m.original, m.type_original),
            movement(m.proxy, m.type_proxy),
            agreement_word(m),
            "–" if m.trend is None else number(m.trend, 2),
            onset_word(m.onset_original),
            onset_word(m.onset_proxy),
            f"{number(m.effect_original)} ({number(m.margin_original)})",
            f"{number(m.effect_proxy)} ({number(m.margin_proxy)})",
            number(m.z_original, 2),
            number(m.z_proxy, 2),
            str(m.weight),
        ]
        for name in key_metrics(candidate, len(candidate.metrics))
        for m in [candidate.metrics[name]]
    ]
    if not rows:
        return ""
    note = (
        '<p class="dim">Effects and margins are in transformed units (log10 for KL and gradient '
        "norm), onsets in updates since the start, z in noise units.</p>"
    )
    return _table(header, rows) + note


def _provenance(result: Result) -> str:
    score = result.score
    facts: dict[str, Any] = {
        "engine": result.engine,
        "proxy": result.proxy,
        "recipe": result.recipe,
        "seeds": ", ".join(map(str, result.seeds)),
        "healthy proxy against healthy original": score.healthy_gate,
        "error rates of the margins": {name: number(value, 2) for name, value in score.error_rates.items()},
        "symptoms seen": ", ".join(score.symptoms),
        "failed runs": result.failures,
        "not replayed": result.not_tried,
        "stopped early": result.stopped_early,
        "took": seconds(result.wall_s),
        "run folder": result.run_dir,
    }
    rows = "".join(
        f'<tr><th scope="row">{_e(name)}</th><td>{_value(value)}</td></tr>'
        for name, value in facts.items()
        if value
    )
    return f'<div class="wide"><table>{rows}</table></div>'


def _value(value: Any) -> str:
    """Return one provenance value: mappings as lines of key and value, everything else as text."""
    if isinstance(value, Mapping):
        return "<br>".join(f"{_e(key)}: {_value(item)}" for key, item in value.items())
    if isinstance(value, float):
        return _e(number(value, 4))
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    return _e(value.name if isinstance(value, Path) else value)
