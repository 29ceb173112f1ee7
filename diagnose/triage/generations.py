"""Generated text on disk → observations: what sampled responses look like, and how that changed.

verl writes one ``<step>.jsonl`` a step (``trainer.rollout_data_dir``, ``validation_data_dir``) with `input` and
`output` in every line. A handful of steps from the beginning and the end are compared; no text leaves this module.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diagnose.errors import LogError
from diagnose.report.text import literal
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import Observation

MAX_RESPONSES = 256
"""Responses of a step that are looked at."""
MAX_CHARACTERS = 8000
"""Characters of a response that are looked at: its beginning and its end."""
MAX_LINE = 4 << 20
STEPS = 4
"""Steps from the beginning, and from the end."""
ALARM = 0.2
"""Share of responses that must be bad, more than in the beginning, before that is a symptom."""


@dataclass(frozen=True)
class Sample:
    """What the responses of one step look like: shares in [0, 1], and the median length in characters."""

    step: int
    count: int
    shares: dict[str, float]
    length: float


def read_generations(folder: Path) -> tuple[Observation, ...]:
    """Return what the responses in a folder show.

    Raises:
        LogError: The folder holds no readable generations.
    """
    if not folder.is_dir():
        raise LogError(
            f"{literal(str(folder))}: no such folder", "name verl's rollout_data_dir or validation_data_dir"
        )
    files = sorted(
        ((int(match[0]), file) for file in folder.glob("*.jsonl") if (match := re.search(r"\d+", file.stem))),
        key=lambda item: item[0],
    )
    chosen = files if len(files) <= 2 * STEPS else [*files[:STEPS], *files[-STEPS:]]
    samples = [sample for step, file in chosen if (sample := _sample(step, file)) is not None]
    if not samples:
        raise LogError(
            f"{literal(str(folder))}: no generations in it", 'expected <step>.jsonl with "input" and "output"'
        )
    half = max(len(samples) // 2, 1)
    return observations(samples[:half], samples[half:] or samples)


def observations(early: Sequence[Sample], late: Sequence[Sample]) -> tuple[Observation, ...]:
    """Compare the responses of late steps with those of early ones."""
    found = []
    for name in late[0].shares:
        before, after = (sum(s.shares[name] for s in group) / len(group) for group in (early, late))
        bad = after > ALARM and (after > before + ALARM or before > 2 * ALARM)
        at_start = early[0].shares[name] > ALARM
        metric = f"generations/{name}"
        first = next((s.step for s in (*early, *late) if s.shares[name] > ALARM), late[0].step)
        found.append(
            Observation(
                metric,
                "up" if bad else "none",
                ("start" if at_start else "delayed") if bad else "",
                interval=(early[0].step if at_start else early[-1].step, first) if bad else None,
                value=after,
                healthy=before,
                evidence=f"{METRIC_BY_NAME[metric].title}: {before:.0%} at steps {early[0].step}–{early[-1].step}, "
                f"{after:.0%} at {late[0].step}–{late[-1].step}",
                alarm=bad,
                rule="generations",
            )
        )
    return tuple(found)


def _sample(step: int, file: Path) -> Sample | None:
    """Read one step, None where nothing in it is readable."""
    outputs: list[str] = []
    inputs: list[str] = []
    for row in _rows(file):
        output, given = row.get("output"), row.get("input")
        if isinstance(output, str):
            outputs.append(output)
            inputs.append(given if isinstance(given, str) else "")
    if not outputs:
        return None
    cut = [_ends(text) for text in outputs]
    scripts = Counter(_script(text) for text in inputs)
    usual = scripts.most_common(1)[0][0] if scripts else ""
    shares = {
        "gibberish": sum(map(is_gibberish, cut)),
        "single_token": sum(map(is_single_token, cut)),
        "repetition": sum(map(is_repetitive, cut)),
        "foreign_script": sum(bool(usual) and bool(s := _script(text)) and s != usual for text in cut),
        "identical": Counter(outputs).most_common(1)[0][1] if len(outputs) > 3 else 0,
    }
    lengths = sorted(map(len, outputs))
    return Sample(
        step, len(outputs), {name: n / len(outputs) for name, n in shares.items()}, lengths[len(lengths) // 2]
    )


def _rows(file: Path) -> Iterator[dict[str, object]]:
    """Yield the readable rows of a file, at most `MAX_RESPONSES`."""
    try:
        with file.open("rb") as stream:
            for _ in range(MAX_RESPONSES):
                line = stream.readline(MAX_LINE)
                if not line:
                    return
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _ends(text: str) -> str:
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else text[:half] + text[-half:]


def is_single_token(text: str) -> bool:
    """Whether nine tenths of a response are one character ("!!!!" is token 0 of many vocabularies)."""
    solid = re.sub(r"\s", "", text)
    return len(solid) >= 16 and Counter(solid).most_common(1)[0][1] >= 0.9 * len(solid)


def is_repetitive(text: str) -> bool:
    """Whether a response says the same again and again: it shrinks to less than a tenth."""
    raw = text.encode("utf-8", "replace")
    return len(raw) >= 400 and len(zlib.compress(raw)) < 0.1 * len(raw)


def is_gibberish(text: str) -> bool:
    """Whether a response is no text: undecodable, words without end, or letters of many scripts mixed in one."""
    if len(text) < 32 or is_single_token(text):
        return False
    if text.count("\ufffd") > 0.05 * len(text):
        return True
    letters = sum(char.isalpha() for char in text)
    if letters < 0.2 * len(text) and sum(char.isdigit() for char in text) < 0.2 * len(text):
        return True
    words = text.split()
    ascii_words = [word for word in words if word.isascii()]
    long = sum(len(word) for word in ascii_words if len(word) > 40)
    if long > 0.5 * len(text):
        return True
    scripts = Counter(_script_of(char) for char in text[:2000] if char.isalpha())
    common = [name for name, n in scripts.items() if n >= 0.05 * max(sum(scripts.values()), 1)]
    return len(common) >= 4


def _script(text: str) -> str:
    """Return the script of most letters of a text, "" where it has hardly any."""
    scripts = Counter(_script_of(char) for char in text[:2000] if char.isalpha())
    return scripts.most_common(1)[0][0] if sum(scripts.values()) >= 20 else ""


def _script_of(char: str) -> str:
    """Return the script of a letter, by the first word of its Unicode name."""
    if char.isascii():
        return "LATIN"
    script = unicodedata.name(char, "?").partition(" ")[0]
    return "CJK" if script in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "FULLWIDTH") else script
