"""Strings from other people's logs and playbooks, made safe to print anywhere.

Every report passes foreign strings through `literal` first; HTML and Markdown escape on top of it.
"""

from __future__ import annotations

import math
import re
import unicodedata

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement, clear screen
    r"|(?:\x1b\]|\x9d).*?(?:\x07|\x1b\\|\x9c)"  # OSC: window title, hyperlinks, clipboard
    r"|\x1b[PX^_].*?(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|\x1b[@-Z\\^_c=>78]",
    re.DOTALL,
)
# Control, format (bidi overrides, zero-width), surrogate, unassigned and private-use characters.
_UNPRINTABLE = {"Cc", "Cf", "Cs", "Cn", "Co"}


def literal(text: object, limit: int = 2000) -> str:
    """Return `text` as one line of printable characters.

    Args:
        text: Anything; it is turned into a string first.
        limit: Longest result; what is cut off is marked by "…".

    Returns:
        The text without terminal control sequences, control and bidirectional characters; every kind of white
        space is a blank. Markup is left as it stands: escaping it is the business of each format.
    """
    plain = _ESCAPES.sub("", str(text))
    plain = re.sub(r"[\t\r\n\v\f]+|[^\S ]", " ", plain)
    plain = "".join(char for char in plain if unicodedata.category(char) not in _UNPRINTABLE)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for people: `digits` significant digits, "n/a" for None and NaN."""
    if value is None or math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits}g}"
    return text.replace("-", "−") if "e" not in text else text


def percent(value: float | None) -> str:
    """Return a share as a whole percentage, "n/a" for None and NaN."""
    if value is None or not math.isfinite(value):
        return "n/a"
    return f"{round(100 * value)} %".replace("-", "−")


def seconds(value: float) -> str:
    """Return a duration for people: "8 s", "1 min 32 s", "2 h 5 min"."""
    if not math.isfinite(value):
        return "n/a"
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
