"""The embedded originals: two tiny trained Mixture-of-Experts checkpoints in Hugging Face layout.

They are ordinary checkpoints: the builder, the engines and the scoring treat them like any other folder.
"""

from pathlib import Path

NAMES = ("qwen3_moe", "deepseek_v3")
PREFIX = "embedded:"


class UnknownCheckpoint(ValueError):
    """An ``embedded:`` name that is not shipped, or a folder without a checkpoint."""


def resolve(name: str) -> Path:
    """Return the folder of a checkpoint given as a path or as ``embedded:NAME``.

    Raises:
        UnknownCheckpoint: The name is not shipped, or the folder holds no ``config.json``.
    """
    if name.startswith(PREFIX):
        short = name.removeprefix(PREFIX)
        if short not in NAMES:
            raise UnknownCheckpoint(f"unknown embedded checkpoint {short!r}; there are: {', '.join(NAMES)}")
        return Path(__file__).parent / short
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise UnknownCheckpoint(f"{folder} holds no config.json: name a folder in Hugging Face layout")
    return folder
