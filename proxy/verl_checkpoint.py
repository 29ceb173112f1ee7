"""verl's own checkpoints: recognised, and refused with the command that makes a Hugging Face folder (torch-free).

verl saves ``<run>/global_step_N/actor`` with shards. FSDP's are ``model_world_size_W_rank_R.pt``, beside a folder
``huggingface`` with configuration and tokenizer but, unless ``checkpoint.save_contents`` names ``hf_model``, without
weights. Megatron's are in ``model/dist_ckpt``, with the same under ``model/huggingface``. The shards are pickles, which
are never loaded here: verl's own ``verl.model_merger`` does that.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Shards:
    """A checkpoint of verl's.

    Attributes:
        actor: Folder of the actor's shards.
        backend: "fsdp" or "megatron", as the merger calls them.
        merged: Folder with weights in Hugging Face layout that the checkpoint holds already, None for none.
    """

    actor: Path
    backend: str
    merged: Path | None = None

    @property
    def target(self) -> Path:
        """Where the merged folder would lie: beside the step."""
        step = next((part for part in (self.actor, *self.actor.parents) if _STEP.fullmatch(part.name)), None)
        home = step or self.actor
        return home.parent / f"{home.name}_hf"

    def command(self, python: str = "python") -> str:
        """Return the command that merges it; to be run in verl's environment."""
        words = [python, "-m", "verl.model_merger", "merge", "--backend", self.backend]
        return shlex.join([*words, "--local_dir", str(self.actor), "--target_dir", str(self.target)])


def recognised(folder: Path) -> Shards | None:
    """Return the verl checkpoint that a folder is or belongs to; None where it is none.

    Args:
        folder: A run's folder of checkpoints (its newest step counts), a step's, its actor's, or the one named
            ``huggingface`` in that.
    """
    for actor in _actors(folder):
        if any(actor.glob("model_world_size_*_rank_*.pt")):
            return Shards(actor, "fsdp", _weights(actor / "huggingface"))
        for home in (actor / "model", actor):  # the second is the layout of older versions
            if (home / "dist_ckpt").is_dir():
                return Shards(actor, "megatron", _weights(home / "huggingface"))
    return None


def _actors(folder: Path) -> list[Path]:
    """Return where the actor's shards may lie if a folder belongs to a checkpoint."""
    above = folder.parent.parent if folder.parent.name == "model" else folder.parent
    places = [folder, folder / "actor", *([above] if folder.name == "huggingface" else [])]
    steps = [child for child in folder.glob("global_step_*") if _STEP.fullmatch(child.name)]
    newest = max(steps, key=lambda step: int(step.name.rpartition("_")[2]), default=None)
    latest = folder / LATEST
    if latest.is_file() and (text := latest.read_text(errors="replace").strip()).isdigit():
        newest = folder / f"global_step_{text}"
    return [*places, *([newest / "actor"] if newest else [])]


def _weights(folder: Path) -> Path | None:
    return folder if any(folder.glob("*.safetensors")) else None
