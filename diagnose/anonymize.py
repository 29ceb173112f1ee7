"""What leaves the machine under ``--anonymize``: paths, hosts, addresses, users, projects and keys replaced.

The same thing gets the same placeholder wherever it occurs, so that a report still reads. Metric values, metric names,
fault ids, and the public sources that cards cite stay.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diagnose.redact import redact
from taxonomy.metrics import METRIC_BY_NAME
from taxonomy.observations import DIRECTIONS, ONSETS, PATTERNS

PUBLIC_HOSTS = (
    "github.com",
    "huggingface.co",
    "arxiv.org",
    "raw.githubusercontent.com",
    "docs.vllm.ai",
    "docs.nvidia.com",
)
"""Hosts of the sources that cards cite."""
PUBLIC_WORDS = {
    "root",
    "user",
    "localhost",
    "home",
    "test",
    "run",
    "main",
    "diagnose",
    "model",
    "models",
    "verl",
}
"""Names that say nothing about anybody, or that the program itself uses everywhere."""

_URL = re.compile(r"\b(?P<scheme>[a-z][a-z0-9+.-]{1,9})://(?P<host>[^/\s\"'<>)\]]+)(?P<rest>[^\s\"'<>)\]]*)")
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_USER_AT_HOST = re.compile(r"\b[A-Za-z_][\w.-]*@[A-Za-z][\w-]*(?=[:\s]|$)")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\w.])")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:){3,7}:?[0-9A-Fa-f]{0,4}(?![\w:])|(?<![\w:])[0-9A-Fa-f]{1,4}::[0-9A-Fa-f:]+"
)
_WINDOWS = re.compile(r"\b[A-Za-z]:\\[^\s\"'<>|:*?]+")
_ABSOLUTE = re.compile(r"(?<![\w/.:‹])(?:~[\w.-]*)?/(?:[\w.@+=,%-]+/?)+")
_HOST = re.compile(
    r"\b(?=[a-z0-9-]*[a-z])[a-z0-9][a-z0-9-]*(?:\.[a-z0-9-]+)+\.(?:local|lan|internal|corp|intra|com|net|org|io|ai|cn|edu)\b"
)
_NAMED = re.compile(
    r"(?im)(?P<head>[\"']?\b[\w.-]*(?:project(?:_name)?|experiment(?:_name)?|run_name|exp_name|entity|user(?:name)?|hostname|team|group_name)"
    r"[\"']?\s*[:=]\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s,}}#\]\"']+)"
)


@dataclass
class Anonymizer:
    """Replaces what could say who, where and what for. One per answer: it remembers its placeholders.

    Attributes:
        known: Text that is to go whatever it looks like → kind of placeholder.
    """

    known: dict[str, str] = field(default_factory=dict)
    _given: dict[str, str] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_machine(cls, paths: Iterable[str | Path] = (), names: Iterable[str] = ()) -> Anonymizer:
        """Return one that knows this machine and user, and the given files and names.

        Args:
            paths: Files that the answer may name, as they were given and in full.
            names: Projects, experiments, runs.
        """
        known: dict[str, str] = {}
        for path in paths:
            if str(path) not in ("", "-"):
                known[str(path)] = known[str(Path(path).absolute())] = known[Path(path).name] = "path"
        with suppress(OSError, KeyError):
            known[socket.gethostname()] = "host"
        with suppress(OSError, KeyError, ImportError):
            known[getpass.getuser()] = "user"
        with suppress(RuntimeError):
            known[str(Path.home())] = "path"
        known[str(Path.cwd())] = "path"
        known |= {name: "name" for name in names}
        return cls(
            {text: kind for text, kind in known.items() if len(text) > 2 and text.lower() not in PUBLIC_WORDS}
        )

    def __call__(self, text: str) -> str:
        """Return text without anything that identifies; other text comes back as it was."""
        text = redact(text.replace("\x00", ""))
        text = _NAMED.sub(lambda m: m["head"] + self._value(m["value"]), text)
        for secret in sorted(self.known, key=len, reverse=True):
            if secret in text:
                kind = self.known[secret]
                text = re.sub(
                    rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])",
                    self._as(secret, kind).replace("\\", r"\\"),
                    text,
                )
        kept: list[str] = []
        text = _URL.sub(lambda m: self._url(m, kept), text)
        text = _EMAIL.sub(lambda m: self._as(m[0], "user"), text)
        text = _USER_AT_HOST.sub(lambda m: self._as(m[0], "host"), text)
        text = _IPV4.sub(lambda m: self._as(m[0], "address"), text)
        text = _IPV6.sub(lambda m: self._as(m[0], "address"), text)
        text = _WINDOWS.sub(lambda m: self._as(m[0], "path"), text)
        text = _HOST.sub(lambda m: m[0] if m[0] in PUBLIC_HOSTS else self._as(m[0], "host"), text)
        text = _ABSOLUTE.sub(lambda m: m[0] if len(m[0]) < 3 else self._as(m[0], "path"), text)
        return re.sub(r"\x00(\d+)\x00", lambda m: kept[int(m[1])], text)

    def _as(self, secret: str, kind: str) -> str:
        """Return the placeholder of a secret: the same for the same text."""
        if secret not in self._given:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._given[secret] = f"‹{kind} {self._counts[kind]}›"
        return self._given[secret]

    def _value(self, value: str) -> str:
        quote = value[0] if value[:1] in "\"'" and value[:1] else ""
        bare = value.strip("\"'")
        if (
            not bare
            or bare.startswith("‹")
            or bare.lower() in ("null", "none", "true", "false", "~")
            or bare.lower() in PUBLIC_WORDS
        ):
            return value
        return f"{quote}{self._as(bare, 'name')}{quote}"

    def _url(self, match: re.Match[str], kept: list[str]) -> str:
        """Put public sources aside, out of the way of later patterns; of any other address keep the scheme."""
        if match["host"].lower() in PUBLIC_HOSTS:
            kept.append(match[0])
            return f"\x00{len(kept) - 1}\x00"
        return f"{match['scheme']}:{self._as(match['host'] + match['rest'], 'host')}"


_FILE = re.compile(r"\.[A-Za-z]\w*$")
_QUOTED = re.compile(r"(?<!\w)'(?:[^'\\\n]|\\.)*'(?!\w)|(?<!\w)\"(?:[^\"\\\n]|\\.)*\"(?!\w)")


def without_quotes(text: str) -> str:
    """Return text without what it quotes of others; apostrophes stay."""
    return _QUOTED.sub("‹text›", text)


def of_command_line(arguments: Sequence[str], names: Iterable[str] = ()) -> Callable[[str], str]:
    """Return what an error passes through before anything else is known than the command line.

    Args:
        arguments: The words typed. Those that are a file or look like a path go, and the values of facts and
            observations.
        names: Foreign words that the error names.
    """
    values = [
        arguments[at + 1] for at, word in enumerate(arguments[:-1]) if word in ("--context", "--observed")
    ]
    words = [word.partition("=")[2] or word for word in arguments if word not in values]
    hide = Anonymizer.of_machine(
        [word for word in words if "/" in word or "\\" in word or _FILE.search(word) or _is_there(word)],
        [*names, *(part for value in values for part in value.split("=") if not _is_public(part))],
    )
    return lambda text: hide(without_quotes(text))


def _is_there(path: str) -> bool:
    try:
        return os.path.lexists(path)
    except (OSError, ValueError):
        return False


def _is_public(word: str) -> bool:
    """Whether a word of a fact or an observation is one of ours."""
    return word in METRIC_BY_NAME or all(part in DIRECTIONS | ONSETS | PATTERNS for part in word.split(":"))


def names_in(context: Mapping[str, object]) -> list[str]:
    """Return the names of projects, experiments and the like that a context states."""
    wanted = re.compile(r"(?i)project|experiment|run_name|exp_name|entity|team|user|host")
    return [
        str(value)
        for key, value in context.items()
        if wanted.search(key) and value not in (None, "", True, False)
    ]
