"""The result as Markdown, for an issue, a merge request or an incident channel."""

from __future__ import annotations

import re

from diagnose.report.text import literal, number, percent, seconds
from diagnose.report.words import (
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
    probes_found,
    remedies_found,
    strengths_found,
    together,
    what_to_do,
    why,
    witness_word,
)
from diagnose.result import Candidate, Result


def escape(text: object) -> str:
    """Return foreign text so that Markdown, and the HTML and links inside it, show it literally."""
    plain = re.sub(r"([\\`*\[\]{}#|~])|(?<![^\W_])_|_(?![^\W_])", lambda m: "\\" + m[0], literal(text))
    plain = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return plain.replace("@", "&#64;").replace("://", "&#58;//").replace("www.", "www&#46;")


def to_markdown(result: Result) -> str:
    """Return the result as a GitHub-flavoured Markdown document."""
    score = result.score
    lines = [
        f"# {escape(result.name)}: {VERDICT_SYMBOL[score.verdict]} {VERDICT_TITLE[score.verdict]}",
        "",
        f"**{escape(headline(result))}**",
        "",
        *_bullets("Why", why(result)),
        *_bullets("Strength that fits best", strengths_found(result)),
        *_bullets("What to do", what_to_do(result)),
        *_bullets("To tell them apart", probes_found(result)),
        *_bullets("Would it help?", remedies_found(result)),
        *_ranking(result),
    ]
    first = best(result)
    if first and first.metrics:
        lines += _metrics(first)
    lines += _bullets("Not replayed", [f"{fault}: {reason}" for fault, reason in result.not_tried.items()])
    lines += _bullets("Stopped early", together(result.stopped_early))
    lines += _bullets("Failed runs", [f"{run}: {reason}" for run, reason in result.failures.items()])
    lines += _provenance(result)
    return "\n".join(lines).rstrip() + "\n"


def _bullets(title: str, items: tuple[str, ...] | list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {escape(item)}" for item in items), ""] if items else []


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _ranking(result: Result) -> list[str]:
    rows = [
        [
            str(rank),
            escape(c.title),
            escape(c.category),
            f"{VERDICT_SYMBOL[c.verdict]} {VERDICT_WORD[c.verdict]}",
            number(c.distance),
            percent(c.agreement),
            escape(", ".join(c.rivals)) or "–",
            witness_word(c),
        ]
        for rank, c in enumerate(result.score.ranking, 1)
    ]
    if not rows:
        return []
    header = ["#", "fault", "category", "verdict", "distance", "agreement", "not told from", "injection"]
    return ["## Ranking", "", *_table(header, rows)]


def _metrics(candidate: Candidate) -> list[str]:
    rows = [
        [
            escape(metric_title(name)),
            movement(metric.original, metric.type_original),
            movement(metric.proxy, metric.type_proxy),
            agreement_word(metric),
            "–" if metric.trend is None else number(metric.trend, 2),
            f"{onset_word(metric.onset_original)} / {onset_word(metric.onset_proxy)}",
        ]
        for name in key_metrics(candidate, limit=len(candidate.metrics))
        for metric in [candidate.metrics[name]]
    ]
    header = ["metric", "original", "proxy", "", "trend", "onset (updates) original / proxy"]
    return [f"## What {escape(candidate.title)} did", "", *_table(header, rows)]


def _provenance(result: Result) -> list[str]:
    facts = {
        "symptom": result.symptom,
        "engine": result.engine,
        "proxy": ", ".join(f"{key} {value}" for key, value in result.proxy.items()),
        "seeds": ", ".join(map(str, result.seeds)),
        "recipe": ", ".join(f"{key} {value}" for key, value in result.recipe.items()),
        "healthy gate": result.score.healthy_gate,
        "error rates": ", ".join(
            f"{key} {number(value, 2)}" for key, value in result.score.error_rates.items()
        ),
        "took": seconds(result.wall_s),
        "run folder": result.run_dir,
    }
    return [
        "## How it was made",
        "",
        *(f"- {key}: {escape(value)}" for key, value in facts.items() if value),
        "",
    ]
