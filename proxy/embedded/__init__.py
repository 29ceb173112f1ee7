"""The embedded originals: two tiny trained Mixture-of-Experts checkpoints in Hugging Face layout.

They are ordinary checkpoints: the builder, the engines and the scoring treat them like any other folder.
"""

from pathlib import Path

from proxy import verl_checkpoint

NAMES = ("qwen3_moe", "deepseek_v3")
PREFIX = "embedded:"


class UnknownCheckpoint(ValueError):
    """An ``embedded:`` name that is not shipped, or a folder without a checkpoint; `mend` says what to do."""

    def __init__(self, message: str, mend: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.mend = mend


def resolve(name: str) -> Path:
    """Return the folder of a checkpoint given as a path or as ``embedded:NAME``.

    Raises:
        UnknownCheckpoint: The name is not shipped, the folder holds no ``config.json``, or it is a checkpoint of
            verl's whose shards have to be merged first.
    """
    if name.startswith(PREFIX):
        short = name.removeprefix(PREFIX)
        if short not in NAMES:
            raise UnknownCheckpoint(f"unknown embedded checkpoint {short!r}; there are: {', '.join(NAMES)}")
        return Path(__file__).parent / short
    folder = Path(name).expanduser()
    found = verl_checkpoint.recognised(folder)
    if found is not None and found.merged != folder:
        if found.merged is not None:
            raise UnknownCheckpoint(
                f"{folder} is a checkpoint of verl's, which holds its weights in Hugging Face layout as well",
                f"name {found.merged}",
            )
        raise UnknownCheckpoint(
            f"{folder} is a checkpoint of verl's: {found.backend} shards, no weights in Hugging Face layout",
            f"merge them in verl's environment: {found.command()}, then name {found.target}",
        )
    if not (folder / "config.json").is_file():
        raise UnknownCheckpoint(f"{folder} holds no config.json: name a folder in Hugging Face layout")
    return folder
