"""Hidden states of the calibration tokens between layers: in memory, or in a file; and how far a pass has come.

Shape suffixes: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from proxy.tally import Tally

MEMORY_LIMIT = 2 << 30
"""Hidden states above this many bytes go to a file even where nothing is to be resumed."""


class HiddenStates:
    """One row of float32 a token.

    Attributes:
        shape: Shape of a row.
        values: The rows, [T, …].
        path: The file they are in; None for memory.

    Args:
        tokens: Number of rows.
        shape: Shape of a row.
        path: File to keep them in; None for memory, or a file without a name above `MEMORY_LIMIT`.
        fresh: Whether the file is made anew.
    """

    def __init__(self, tokens: int, shape: Any, path: Path | None = None, fresh: bool = True) -> None:
        import torch

        self.tokens, self.shape, self.path = tokens, tuple(shape), path
        count = tokens * prod(self.shape)
        self._unnamed = False
        if path is None and 4 * count > MEMORY_LIMIT:
            handle, name = tempfile.mkstemp(prefix="hidden-", suffix=".bin")
            os.close(handle)
            self.path, self._unnamed = Path(name), True
        if self.path is None:
            self.values = torch.empty((tokens, *self.shape))
            return
        if fresh:
            with self.path.open("wb") as file:
                _reserve(file.fileno(), 4 * count)
        flat = torch.from_file(str(self.path), shared=True, size=count, dtype=torch.float32)
        self.values = flat.reshape(tokens, *self.shape)
        if self._unnamed:
            self.path.unlink()  # gone with the process, whatever ends it

    @classmethod
    def of(cls, values: torch.Tensor) -> HiddenStates:
        """Return hidden states that are there already."""
        made = cls(0, values.shape[1:])
        made.tokens, made.values = len(values), values
        return made

    def like(self, path: Path | None) -> HiddenStates:
        """Return room for as many."""
        return HiddenStates(self.tokens, self.shape, path)

    def close(self) -> None:
        """Give the memory back; a file stays."""
        del self.values


def _reserve(file: int, size: int) -> None:
    """Make a file of a size, and fail now where the disk is full: a mapped page without room kills the process."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)


class Saved:
    """What a pass leaves behind after every layer, so that a killed one goes on with the next.

    A layer's hidden states go to one of two files by turns, and `state.json`, written last and in one move,
    says which of them counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, layer: int, halves: list[Tally] | None, hidden: HiddenStates) -> None:
        """Save a finished layer."""
        if halves:
            draft = self.folder / "draft.npz"
            arrays: dict[str, Any] = {}
            for half, tally in enumerate(halves):
                arrays[f"tokens_{half}"] = np.array(tally.tokens)
                arrays[f"coactivation_{half}"] = tally.coactivation_EE.numpy()
                arrays[f"weighted_{half}"] = tally.weighted_hidden_EH.numpy()
                arrays[f"saliency_{half}"] = tally.saliency_E.numpy()
            np.savez(draft, **arrays)
            draft.replace(self._file(layer))
        state = {"layer": layer, "tokens": hidden.tokens, "shape": list(hidden.shape)}
        if hidden.path:
            state["hidden"] = hidden.path.name
        draft = self.folder / "draft.json"
        draft.write_text(json.dumps(state))
        draft.replace(self.folder / "state.json")

    def load(self, tokens: int, shape: tuple[int, ...]) -> tuple[int, HiddenStates | None]:
        """Return the layer to go on with, and the hidden states it takes."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads((self.folder / "state.json").read_text())
            path = self.folder / state["hidden"]
            if state["tokens"] != tokens or tuple(state["shape"]) != shape:
                return 0, None
            if path.stat().st_size != 4 * tokens * prod(shape):
                return 0, None
            return state["layer"] + 1, HiddenStates(tokens, shape, path, fresh=False)
        return 0, None

    def forget(self, start: int) -> None:
        """Remove the sums of a layer and those after it, which are to be computed anew."""
        for layer in self.layers():
            if layer >= start:
                self._file(layer).unlink()

    def tally(self, layer: int) -> list[Tally]:
        """Return the sums of both halves of a saved layer."""
        import torch

        from proxy.tally import Tally

        with np.load(self._file(layer)) as arrays:
            return [
                Tally(
                    int(arrays[f"tokens_{half}"]),
                    torch.from_numpy(arrays[f"coactivation_{half}"]),
                    torch.from_numpy(arrays[f"weighted_{half}"]),
                    torch.from_numpy(arrays[f"saliency_{half}"]),
                )
                for half in (0, 1)
            ]

    def layers(self) -> set[int]:
        """Return the layers whose sums are saved."""
        return {int(path.stem.removeprefix("layer-")) for path in self.folder.glob("layer-*.npz")}

    def _file(self, layer: int) -> Path:
        """Return the place of a layer's sums."""
        return self.folder / f"layer-{layer}.npz"


class Tallies(Mapping[int, "list[Tally]"]):
    """The sums of both halves by layer, those of finished layers only on disk where there is a place for them."""

    def __init__(self, saved: Saved | None) -> None:
        self.saved = saved
        self.held: dict[int, list[Tally]] = {}

    def let_go(self, layer: int) -> None:
        """Forget the sums of a layer that was saved."""
        if self.saved:
            self.held.pop(layer, None)

    def __getitem__(self, layer: int) -> list[Tally]:
        if layer in self.held:
            return self.held[layer]
        if self.saved and layer in self.saved.layers():
            return self.saved.tally(layer)
        raise KeyError(layer)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.held.keys() | (self.saved.layers() if self.saved else set())))

    def __len__(self) -> int:
        return len(list(iter(self)))
