"""Secrets out of what is kept or shown: playbooks and contexts may carry tokens of loggers and hubs."""

from __future__ import annotations

import re

HIDDEN = "‹redacted›"

_KEY = r"[\w.-]*(?:token(?!i[sz]|s\b)|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential)[\w.-]*"
_ASSIGNED = re.compile(
    rf"(?im)(?P<head>[\"']?\b{_KEY}[\"']?\s*[:=]\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,}}#\]]+)"
)
_SHAPED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_COUNTS = re.compile(r"^[\"']?(?:\d+(?:\.\d+)?|true|false|null|~)[\"']?$", re.IGNORECASE)


def redact(text: str) -> str:
    """Return text with the values of secret-looking keys and everything shaped like a token replaced.

    Numbers and switches stay: ``max_tokens: 65536`` is no secret.
    """

    def assigned(match: re.Match[str]) -> str:
        return match[0] if _COUNTS.match(match["value"]) else match["head"] + HIDDEN

    return _SHAPED.sub(HIDDEN, _ASSIGNED.sub(assigned, text))
