"""Composes the configuration of a verl command without importing verl: run by path in verl's environment.

``python verl_compose.py`` reads ``{"options": {"path", "name", "dir"}, "overrides": […]}`` from standard input and
prints ``{"verl": version, "config": {…}}``, or ``{"verl": version, "error": words}`` where Hydra refuses. Importing
verl would take ten seconds, composing takes one.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def plain(config: Any) -> Any:
    """Return a configuration as plain data; where one value can't be resolved here the others still are."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(config, DictConfig):
        found = {}
        for name in config:
            try:
                found[str(name)] = plain(config[name])
            except OmegaConfBaseException:
                found[str(name)] = None
        return found
    if isinstance(config, ListConfig):
        return OmegaConf.to_container(config, resolve=False)
    return config if isinstance(config, str | int | float | bool | None) else str(config)


def compose(home: Path, options: dict[str, str], overrides: list[str]) -> Any:
    """Return the configuration that ``verl.trainer.main_ppo`` would see."""
    from hydra import compose as composed
    from hydra import initialize_config_dir

    own = home / "trainer" / "config"
    chosen = options.get("path", "")
    # Hydra takes a relative --config-path from the file of the main function.
    folder = (home / "trainer" / chosen).resolve() if chosen else own
    extra = [f"hydra.searchpath=[{Path(options['dir']).absolute()}]"] if options.get("dir") else []
    name = options.get("name", "ppo_trainer").removesuffix(".yaml")
    with initialize_config_dir(str(folder), version_base=None):
        return composed(name, overrides=[*overrides, *extra])


def main() -> None:
    """Answer one question."""
    asked = json.loads(sys.stdin.read())
    sys.path = [
        place for place in sys.path if place != str(Path(__file__).parent)
    ]  # it holds a verl.py of ours
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        print(json.dumps({"verl": "", "error": "no verl"}))
        return
    home = Path(next(iter(spec.submodule_search_locations)))
    file = home / "version" / "version"
    version = file.read_text().strip() if file.is_file() else metadata.version("verl")
    answer: dict[str, Any] = {"verl": version}
    try:
        answer["config"] = plain(compose(home, asked["options"], asked["overrides"]))
    except Exception as error:  # Hydra's, OmegaConf's, or those of a YAML file: all the user's to read
        cause = error.__cause__ or error.__context__
        words = f"{error}" + (f": {cause}" if cause and str(cause) not in str(error) else "")
        answer["error"] = " ".join(words.split()) or type(error).__name__
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
