"""Reads the user's own verl command: what of it is Hydra's, what is environment, and whether it is verl's at all.

Accepted is what people have in their scripts: ``VAR=value`` before it, ``ray job submit … --`` around it, any
interpreter in front, backslashes at the ends of lines, Hydra's options, and overrides in any of Hydra's forms.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULE = "verl.trainer.main_ppo"
OPTIONS = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd")
"""Hydra's options that choose a configuration; each takes a value."""
MEND = f"name it as you start it: python3 -m {MODULE} data.train_batch_size=… …"

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_OVERRIDE = re.compile(r"(?:~|\+{0,2})[\w./@:-]+(?:=.*)?", re.DOTALL)
_INTERPRETER = re.compile(r"(?:pypy|python)[\d.]*")
_UNFILLED = re.compile(r"\$\{?[A-Za-z_@*#?0-9]")
_SHELL = (";", "&&", "||", "|", "&", ">", ">>", "<", "2>&1", "(", ")")


class NotVerl(ValueError):
    """The command is none of verl's PPO trainer."""

    mend = MEND


@dataclass(frozen=True)
class Command:
    """A verl command, taken apart.

    Attributes:
        interpreter: Its first word.
        flags: ``-m verl.trainer.main_ppo`` and Hydra's options, without the overrides.
        overrides: Hydra overrides as they stand there.
        environment: Variables set in front of it.
        address: Where ``ray job submit`` around it sends it, "" for nowhere.
    """

    interpreter: str
    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    address: str = ""

    def config(self) -> dict[str, str]:
        """Return Hydra's options: "path", "name", "dir"."""
        long = {"-cp": "path", "-cn": "name", "-cd": "dir"}
        found = {}
        for flag, value in zip(self.flags, (*self.flags[1:], ""), strict=True):
            name, given, text = flag.partition("=")
            if name in OPTIONS:
                found[long.get(name) or name.removeprefix("--config-")] = text if given else value
        return found


def split(text: str) -> tuple[str, ...]:
    """Split a command as a shell does, the backslashes at the ends of its lines left out.

    Raises:
        NotVerl: A quotation does not end.
    """
    try:
        return tuple(shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True))
    except ValueError as error:
        raise NotVerl(f"the command cannot be split into words: {error}") from error


def parse(words: Sequence[str]) -> Command:
    """Take a command apart.

    Raises:
        NotVerl: It does not start verl's PPO trainer, or a shell would have to read it first.
    """
    rest = list(words)
    environment = []
    address = ""
    while rest:
        if rest[0] == "env" or _ASSIGNMENT.match(rest[0]):
            word = rest.pop(0)
            if word != "env":
                name, _, value = word.partition("=")
                environment.append((name, value))
        elif rest[:3] == ["ray", "job", "submit"] and "--" in rest:
            end = rest.index("--")
            address, rest = _address(rest[3:end]), rest[end + 1 :]
        else:
            break
    if not rest:
        raise NotVerl("the command is empty")
    if shell := next((word for word in rest if word in _SHELL), None):
        raise NotVerl(f"the command holds {shell!r}, which is for a shell: none reads it")
    interpreter, rest = rest[0], rest[1:]
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest = rest[1:]
    if not _INTERPRETER.fullmatch(Path(interpreter).name) or rest[:2] != ["-m", MODULE]:
        shown = shlex.join(list(words)[:6]) + (" …" if len(words) > 6 else "")
        raise NotVerl(f"this is no command of verl's PPO trainer: {shown}")
    flags, overrides = _hydra(rest[2:])
    if variable := next((word for word in (*flags, *overrides) if _unfilled(word)), None):
        raise NotVerl(
            f"{variable!r} holds a variable of a shell: none reads the command; put its value there"
        )
    return Command(interpreter, ("-m", MODULE, *flags), overrides, tuple(environment), address)


def _unfilled(word: str) -> bool:
    """Whether a shell's variable stands in a word. ``${a.b}`` and ``${oc.env:X}`` are Hydra's own."""
    return any(
        not word[found.start() :].startswith("${") or re.match(r"\$\{[A-Za-z_]\w*\}", word[found.start() :])
        for found in _UNFILLED.finditer(word)
    )


def _address(options: Sequence[str]) -> str:
    """Return the address among the options of ``ray job submit``."""
    for option, value in zip(options, (*options[1:], ""), strict=True):
        if option.startswith("--address="):
            return option.partition("=")[2]
        if option == "--address":
            return value
    return ""


def _hydra(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (options, overrides) of Hydra."""
    flags: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in OPTIONS and rest:
            flags += [word, rest.pop(0)]
        elif word.partition("=")[0] in OPTIONS:
            flags.append(word)
        elif word.startswith("-"):
            raise NotVerl(f"{word} is an option that a replay has no use for: leave it out")
        elif _OVERRIDE.fullmatch(word):
            overrides.append(word)
        else:
            raise NotVerl(f"{word!r} is no Hydra override (name=value)")
    return tuple(flags), tuple(overrides)


def key(override: str) -> str:
    """Return the name that an override is about."""
    return override.lstrip("+~").partition("=")[0]


def joined(overrides: Sequence[str], ours: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with ours in force: those of the same name are left out, so that each name stands once."""
    names = {key(override) for override in ours}
    return (*(override for override in overrides if key(override) not in names), *ours)
