"""Expert ids in a checkpoint's ``quantization_config``: lists of modules left alone, settings by module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from proxy.errors import CheckpointError
from proxy.families import Layout, get_key, set_key
from proxy.selection import Selection

SECTION = "quantization_config"
BESIDE = "hf_quant_config.json"
"""The file in which ModelOpt keeps such a config."""
_ANY_NUMBER = re.compile(r"(\\d|\[0-9\])([+*]|\{[0-9,]+\})?")
_SOME_EXPERT = re.compile(r"experts[^a-zA-Z]*[0-9]")
_GONE = object()


def renumber(config: dict[str, Any], layout: Layout, selections: Mapping[int, Selection]) -> None:
    """Give experts in module names their new numbers, in place; entries of dropped experts go.

    Args:
        config: A config, which is changed.
        layout: The checkpoint's layout.
        selections: Experts kept, by layer.
    """
    for key in _sections(config, layout):
        set_key(config, key, renumbered(get_key(config, key), layout, selections))


def renumbered(value: Any, layout: Layout, selections: Mapping[int, Selection]) -> Any:
    """Return part of a quantisation config with the experts in module names renumbered, dropped ones left out."""
    module = _module(layout)

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            pairs = ((changed(key), changed(item)) for key, item in value.items())
            return {key: item for key, item in pairs if key is not _GONE and item is not _GONE}
        if isinstance(value, list):
            return [item for item in map(changed, value) if item is not _GONE]
        found = module.match(value) if isinstance(value, str) else None
        if not found or int(found[1]) not in selections:
            return value
        kept = selections[int(found[1])].kept
        if int(found[2]) not in kept:
            return _GONE
        return value[: found.start(2)] + str(kept.index(int(found[2]))) + value[found.end(2) :]

    return changed(value)


def check_names(config: Mapping[str, Any], layout: Layout, beside: Any = None) -> None:
    """Refuse a quantisation config that singles out experts otherwise than by a module's name.

    A regular expression is not tried out: it is other people's, and may take for ever.

    Args:
        config: The checkpoint's config.
        layout: Its layout.
        beside: What `BESIDE` holds.

    Raises:
        CheckpointError: It does; the message quotes the text.
    """
    module = _module(layout)
    sections = [get_key(config, key) for key in _sections(config, layout)]
    for text in _texts([*sections, beside]):
        dropped = text.startswith(layout.family.mtp) and not layout.mtp_layers
        if not dropped and not module.match(text) and _SOME_EXPERT.search(_ANY_NUMBER.sub("", text)):
            raise CheckpointError(
                f"{SECTION} names single experts by {text[:80]!r}, whose numbers change in a proxy",
                f"write the modules' names out in a copy of config.json ({layout.block(layout.moe_layers[0])}…)",
            )


def _sections(config: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return the keys of the quantisation configs that there are."""
    roots = sorted({"", f"{layout.root}." if layout.root else "", "text_config."})
    keys = [f"{root}{name}" for root in roots for name in (SECTION, "compression_config")]
    return [key for key in keys if isinstance(get_key(config, key), dict)]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(item)


def _module(layout: Layout) -> re.Pattern[str]:
    """Return a pattern for names of experts' modules and of what is in them: layer, expert."""
    pattern = re.escape(layout.prefix + layout.family.block + layout.family.experts)
    for hole in ("{L}", "{E}"):
        pattern = pattern.replace(re.escape(hole), r"(\d+)")
    return re.compile(pattern.removesuffix(r"\.") + r"(?=\.|$)")
