"""Write the proxy file to file: raw bytes copied, the raw config edited, the folder renamed into place.

Nothing goes through a model class: saving from one renames tensors and config keys in several families.

Shape suffixes: none; arrays keep the tensor's own shape.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np

from proxy.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
    TensorInfo,
    check_finite,
    from_float32,
    inside,
    read_chunks,
)
from proxy.errors import BuildError, CheckpointError
from proxy.families import Layout, Role, get_key, set_key
from proxy.manifest import MANIFEST
from proxy.selection import Selection

MAX_SIDE_FILE_BYTES = 256 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")

Mixture = tuple[tuple[int, float], ...]
"""Experts that are averaged into one, with weights that add up to 1."""


@dataclass(frozen=True)
class Output:
    """One tensor of the proxy.

    Attributes:
        name: Its name.
        source: The tensor it is copied from.
        shape: Its shape.
        records: Leading records that are kept; None for all.
        of: Number of leading records of the source.
        mixture: Tensors that are averaged instead, with weights; empty for a copy.
    """

    name: str
    source: TensorInfo
    shape: tuple[int, ...]
    records: tuple[int, ...] | None = None
    of: int = 1
    mixture: tuple[tuple[TensorInfo, float], ...] = ()

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return (
            self.source.nbytes if self.records is None else self.source.nbytes // self.of * len(self.records)
        )


def outputs(
    checkpoint: Checkpoint,
    layout: Layout,
    selections: Mapping[int, Selection],
    mixtures: Mapping[int, Mapping[int, Mixture]] | None = None,
) -> dict[str, list[Output]]:
    """Return the proxy's tensors by file, in the order of the checkpoint's bytes.

    Args:
        checkpoint: The checkpoint.
        layout: Its layout.
        selections: Experts kept, by layer; kept experts are numbered anew in ascending order.
        mixtures: By layer and kept expert, what its tensors are averaged from; None copies them.
    """
    files: dict[str, list[Output]] = {}
    position = {
        layer: {expert: new for new, expert in enumerate(chosen.kept)} for layer, chosen in selections.items()
    }
    for name, info in checkpoint.tensors.items():
        part = layout.parts[name]
        if part.role is Role.DROP:
            continue
        output = Output(name, info, info.shape)
        if part.role is Role.ROWS:
            kept = selections[part.layer].kept
            output = Output(name, info, (len(kept), *info.shape[1:]), kept, layout.experts)
        elif part.role is Role.EXPERT:
            if part.expert not in position[part.layer]:
                continue
            new_name = layout.expert(part.layer, position[part.layer][part.expert], part.rest)
            mixture = mixtures[part.layer][part.expert] if mixtures else ()
            members = tuple(
                (checkpoint.tensors[layout.expert(part.layer, expert, part.rest)], weight)
                for expert, weight in mixture
            )
            output = Output(new_name, info, info.shape, mixture=members if len(members) > 1 else ())
        files.setdefault(info.file, []).append(output)
    return files


def edited_config(config: Mapping[str, Any], layout: Layout, experts: int) -> dict[str, Any]:
    """Return the config with the expert count changed, and the count of MTP layers set to 0; no other key.

    Args:
        config: The raw config.
        layout: The checkpoint's layout.
        experts: Experts that each layer has now.
    """
    edited = copy.deepcopy(dict(config))
    for key in layout.family.counts:
        if get_key(edited, key) is not None:
            set_key(edited, key, experts)
    present = [key for key in layout.family.mtp_counts if get_key(edited, key) is not None]
    dropped = any(part.role is Role.DROP for part in layout.parts.values())
    # Without the key transformers assumes the family's default count, which may not be 0.
    for key in present or (layout.family.mtp_counts[:1] if dropped else ()):
        set_key(edited, key, 0)
    return edited


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `out` at the end; on any error nothing is left behind.

    Raises:
        BuildError: `out` exists and is not an empty folder, or cannot be made.
    """
    out = Path(out)
    check_free(out)
    out = out.absolute()
    partial = out.parent / f".{out.name}.{uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise BuildError(f"cannot write to {out.parent}: {error.strerror}") from error
    try:
        yield partial
        if out.exists():
            out.rmdir()  # still empty, or this fails
        partial.rename(out)
    except OSError as error:
        raise BuildError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(out: str | Path) -> None:
    """Refuse an output folder that holds something.

    Raises:
        BuildError: `out` exists and is not an empty folder.
    """
    out = Path(out)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise BuildError(f"output folder {out} is not empty", "choose another --out, or remove it")


def write_weights(
    folder: Path,
    checkpoint: Checkpoint,
    files: Mapping[str, list[Output]],
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write the proxy's safetensors files, named as the checkpoint's, and their index where it has one.

    Args:
        folder: Where to write.
        checkpoint: The checkpoint that is copied from.
        files: See `outputs`.
        progress: Called with sentences for humans.

    Raises:
        CheckpointError: A tensor that is copied holds NaN or infinity, or is cut short.
    """
    weight_map: dict[str, str] = {}
    size = 0
    for number, (file, tensors) in enumerate(files.items(), start=1):
        if progress:
            progress(f"writing {file} ({number} of {len(files)})")
        _write_file(folder / file, checkpoint, tensors, checkpoint.metadata[file])
        weight_map |= {tensor.name: file for tensor in tensors}
        size += sum(tensor.nbytes for tensor in tensors)
    if checkpoint.sharded:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


def copy_side_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Copy what lies beside the weights (tokenizer, generation config, licence …): plain files, no weights.

    Raises:
        CheckpointError: One of them is a link that leaves the checkpoint's folder.
    """
    for path in sorted(checkpoint.folder.iterdir()):
        made_here = path.name in (CONFIG, INDEX, MANIFEST) or path.name.startswith(".")
        if made_here or not path.is_file() or path.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            continue
        if path.stat().st_size <= MAX_SIDE_FILE_BYTES:
            shutil.copyfile(inside(checkpoint.folder, path.name), folder / path.name)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file the way checkpoints have them."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_file(path: Path, checkpoint: Checkpoint, tensors: list[Output], metadata: dict[str, str]) -> None:
    """Stream one safetensors file: header length, JSON header padded to 8 bytes, the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        header[tensor.name] = {
            "dtype": tensor.source.dtype,
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target, checkpoint.open(tensors[0].source.file) as source:
        target.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            if tensor.mixture:
                target.write(_average(checkpoint, tensor))
            else:
                _copy(source, target, tensor)


def _copy(source: BinaryIO, target: BinaryIO, tensor: Output) -> None:
    """Copy the bytes of one tensor, refusing NaN and infinity on the way."""
    for chunk in read_chunks(source, tensor.source, tensor.records, tensor.of):
        check_finite(chunk, tensor.source)
        target.write(chunk)


def _average(checkpoint: Checkpoint, tensor: Output) -> bytes:
    """Return the weighted average of tensors, taken in float32, in their own dtype."""
    total = np.zeros(tensor.shape, np.float32)
    for info, weight in tensor.mixture:
        total += np.float32(weight) * checkpoint.array(info.name)
    raw = from_float32(total, tensor.source.dtype)
    if len(raw) != tensor.nbytes:
        raise CheckpointError(f"tensor {tensor.name!r}: the average has another size than its parts")
    return raw
