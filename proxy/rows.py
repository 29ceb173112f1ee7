"""Calibration rows: token ids from the embedded task, or from a JSONL file of ids or texts, cut to a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from proxy.errors import BuildError
from proxy.families import text_size

Rows = list[list[int]]

BATCH_TOKENS = 4096
BATCH_VALUES = 1 << 19
LEAST_TOKENS = 256
MAX_LINE_BYTES = 16 << 20
_LINES = 'give one JSON object a line: {"input_ids": [...]} or {"text": "..."}'


def calibration_rows(source: str, folder: str | Path, max_tokens: int, seed: int = 0) -> Rows:
    """Return the token rows that a build spec names.

    Args:
        source: "embedded" (prompts and responses of the embedded task) or the path of a JSONL file whose
            lines are ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        folder: Checkpoint folder, whose ``tokenizer.json`` turns texts into tokens.
        max_tokens: Reading stops when there are as many.
        seed: Seed of the embedded task's responses.

    Raises:
        BuildError: The file cannot be read, or a line is none of the two.
    """
    if source == "embedded":
        if not (Path(folder) / "tokenizer.json").is_file():
            raise BuildError(
                f"{folder} has no tokenizer.json, which prompts of the embedded task need",
                'name a file with {"input_ids": [...]} lines: --calibration FILE',
            )
        from proxy.embedded.rollouts import calibration_rows as sampled

        return sampled(Path(folder), max_tokens, seed)
    return file_rows(source, folder, max_tokens)


def file_rows(
    source: str, folder: str | Path, max_tokens: int | None = None, what: str = "calibration"
) -> Rows:
    """Return the token rows of a JSONL file.

    Args:
        source: Path of the file, whose lines are ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        folder: Checkpoint folder, whose ``tokenizer.json`` turns texts into tokens.
        max_tokens: Reading stops when there are as many; None for all.
        what: What the file is for, for the messages.

    Raises:
        BuildError: The file cannot be read, or a line is none of the two.
    """
    path = Path(source).expanduser()
    mend = "name a JSONL file with a text or token ids a line"
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise BuildError(f"{what} file {path} is not a plain file", mend)
    rows: Rows = []
    tokens = 0
    encode: Callable[[str], list[int]] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if max_tokens is not None and tokens >= max_tokens:
                    break
                if not line.strip():
                    continue
                ids, text = _parse_line(line, f"{path}:{number}")
                if text is not None:
                    encode = encode or _tokenizer(Path(folder))
                    try:
                        ids = encode(text)
                    except Exception as error:  # the library raises bare Exception
                        raise BuildError(
                            f"{path}:{number}: the tokenizer refuses it: {error}", _LINES
                        ) from error
                rows.append(ids)
                tokens += len(ids)
    except OSError as error:
        raise BuildError(f"{what} file {path} cannot be read: {error.strerror}", mend) from error
    return rows


def cut_rows(token_rows: Sequence[Sequence[int]], max_tokens: int, config: dict[str, Any]) -> Rows:
    """Return the leading rows that fit the token budget, each cut to the context length, empty ones left out.

    Raises:
        BuildError: Nothing is left, or a token id is outside the vocabulary.
        CheckpointError: The config's context length or vocabulary is no positive whole number.
    """
    longest = context(config) or max_tokens
    vocabulary = text_size(config, "vocab_size")
    rows: Rows = []
    left = max_tokens
    for number, row in enumerate(token_rows, start=1):
        if left <= 0:
            break
        ids = [int(token) for token in row[: min(longest, left)]]
        if ids and (min(ids) < 0 or (vocabulary and max(ids) >= vocabulary)):
            raise BuildError(
                f"a token id of calibration row {number} is {min(ids) if min(ids) < 0 else max(ids)}, "
                f"outside the checkpoint's vocabulary of {vocabulary}",
                "calibrate on texts tokenised for this checkpoint",
            )
        if ids:
            rows.append(ids)
            left -= len(ids)
    if not rows:
        raise BuildError("there are no calibration tokens", "name a calibration file with at least one text")
    return rows


def context(config: dict[str, Any]) -> int:
    """Return how long a row may be, 0 where the config doesn't say."""
    return text_size(config, "max_position_embeddings")


def batch_tokens(hidden: int) -> int:
    """Return how many tokens run together in a model of this hidden size: fewer in a wide one, to save memory."""
    return max(LEAST_TOKENS, min(BATCH_TOKENS, BATCH_VALUES // max(hidden, 1)))


def batches(rows: Rows, most: int = BATCH_TOKENS) -> Iterator[Rows]:
    """Yield batches of rows of equal length, up to `most` tokens each, so that nothing is padded."""
    by_length: dict[int, Rows] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    for length, alike in sorted(by_length.items()):
        size = max(1, most // length)
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


def _parse_line(line: bytes, where: str) -> tuple[list[int], str | None]:
    """Return token ids or a text of one calibration line."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = (
            f"{error.msg} at column {error.pos + 1}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise BuildError(f"{where}: not JSON: {what}", _LINES) from error
    ids, text = (raw.get("input_ids"), raw.get("text")) if isinstance(raw, dict) else (None, None)
    if isinstance(text, str):
        return [], text
    if isinstance(ids, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        return ids, None
    raise BuildError(f"{where}: neither token ids nor a text", _LINES)


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Return the encoder of the checkpoint's tokenizer."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BuildError(
            f"{folder} has no tokenizer.json to read texts with", 'give {"input_ids": [...]} lines'
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BuildError(
            f"{path} is not a tokenizer: {error}", 'download it anew, or give {"input_ids": [...]} lines'
        ) from error
    return lambda text: list(tokenizer.encode(text).ids)
