"""Write the proxy file to file: raw bytes copied, the raw config edited, the folder renamed into place.

Nothing goes through a model class: saving from one renames tensors and config keys in several families.

Shape suffixes: none; arrays keep the tensor's own shape.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from proxy.checkpoint import (
    INDEX,
    Checkpoint,
    TensorInfo,
    from_float32,
    read_object,
    to_float32,
)
from proxy.copying import checks, copy_span, spans, write_all
from proxy.errors import CheckpointError
from proxy.families import Layout, Part, Role, get_key, set_key
from proxy.manifest import side_files
from proxy.quantisation_config import BESIDE, renumber, renumbered
from proxy.selection import Selection

Mixture = tuple[tuple[int, float], ...]
"""Experts that are averaged into one, with weights that add up to 1."""


class Share(NamedTuple):
    """One record of a tensor and its weight in an average."""

    source: TensorInfo
    record: int
    of: int
    weight: float


@dataclass(frozen=True)
class Output:
    """One tensor of the proxy.

    Attributes:
        name: Its name.
        source: The tensor it is copied from.
        shape: Its shape.
        records: Leading records that are kept; None for all.
        of: Number of leading records of the source.
        mixture: What is averaged instead, one entry a kept record (one in all for an expert's own tensor):
            tensors and records of them, with weights; empty for a copy.
        ids: New id of each expert, for a tensor whose values are expert ids; empty for others.
    """

    name: str
    source: TensorInfo
    shape: tuple[int, ...]
    records: tuple[int, ...] | None = None
    of: int = 1
    mixture: tuple[tuple[Share, ...], ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def copied(self) -> bool:
        """Whether its bytes are those of its source."""
        return not self.mixture and not self.ids

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
        output = Output(name, info, info.shape)
        if part.role is Role.DROP:
            continue
        mixed = mixtures.get(part.layer, {}) if mixtures else {}
        if part.role is Role.EXPERT:
            new = _new_number(layout, position[part.layer], part.expert)
            if new is None:
                continue
            names = layout.members[part.layer]
            members = tuple(
                Share(checkpoint.tensors[names[expert][part.rest]], 0, 1, weight)
                for expert, weight in mixed.get(part.expert, ())
            )
            output = Output(
                part.renamed(new), info, info.shape, mixture=(members,) if len(members) > 1 else ()
            )
        elif part.role in (Role.ROWS, Role.FUSED):
            mixed = mixed if part.role is Role.FUSED else {}
            output = _sliced(output, part, layout, selections[part.layer].kept, mixed)
        elif part.role is Role.IDS:
            owner = selections[part.layer].owner
            output = Output(name, info, info.shape, ids=tuple(position[part.layer][head] for head in owner))
        files.setdefault(info.file, []).append(output)
    return files


def kept_records(layout: Layout, part: Part, kept: tuple[int, ...]) -> tuple[int, ...]:
    """Return which records of a sliced tensor stay: those of the kept experts, and those behind all experts."""
    return (*kept, *range(layout.experts, part.records))


def _new_number(layout: Layout, position: Mapping[int, int], expert: int) -> int | None:
    """Return the new number of an expert, None where it goes; what lies behind the experts moves up."""
    return expert - layout.experts + len(position) if expert >= layout.experts else position.get(expert)


def _sliced(
    output: Output, part: Part, layout: Layout, kept: tuple[int, ...], mixed: Mapping[int, Mixture]
) -> Output:
    """Return the slice of a tensor with one record an expert."""
    records = kept_records(layout, part, kept)
    axis = 1 if output.shape[0] == 1 != part.records else 0
    shape = list(output.shape)
    shape[axis] = shape[axis] // part.records * len(records)
    mixture = tuple(
        tuple(Share(output.source, expert, part.records, weight) for expert, weight in mixed[head])
        for head in kept
        if mixed
    )
    if all(len(members) == 1 for members in mixture):
        mixture = ()
    return Output(output.name, output.source, tuple(shape), records, part.records, mixture)


def edited_config(
    config: Mapping[str, Any], layout: Layout, experts: int, selections: Mapping[int, Selection]
) -> dict[str, Any]:
    """Return the config with the expert count changed, MTP layers counted out, and expert ids renumbered.

    Args:
        config: The raw config.
        layout: The checkpoint's layout.
        experts: Experts that each layer has now.
        selections: Experts kept, by layer.
    """
    edited: dict[str, Any] = copy.deepcopy(dict(config))
    for key in map(layout.key, layout.family.counts):
        if (old := get_key(edited, key)) is not None:
            set_key(edited, key, [experts] * len(old) if isinstance(old, list) else experts)
    mtp_counts = [layout.key(key) for key in layout.family.mtp_counts]
    present = [key for key in mtp_counts if get_key(edited, key) is not None]
    dropped = any(part.role is Role.DROP for part in layout.parts.values())
    if not layout.mtp_layers:
        # Without the key transformers assumes the family's default count, which may not be 0.
        for key in present or (mtp_counts[:1] if dropped else ()):
            set_key(edited, key, 0)
    renumber(edited, layout, selections)
    return edited


def write_weights(
    folder: Path,
    checkpoint: Checkpoint,
    files: Mapping[str, list[Output]],
    progress: Callable[[str], None] | None = None,
) -> None:
    """Write the proxy's safetensors files, named as the checkpoint's, and their index where it has one.

    A file appears under its name when it is whole; one that is there already, of the right size, is kept.

    Args:
        folder: Where to write.
        checkpoint: The checkpoint that is copied from.
        files: See `outputs`.
        progress: Called with sentences for humans.

    Raises:
        CheckpointError: A tensor that is copied holds NaN or infinity, or is cut short.
    """
    weight_map: dict[str, str] = {}
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    done, began = 0, time.monotonic()
    for number, (file, tensors) in enumerate(files.items(), start=1):
        if progress:
            rate = done / max(time.monotonic() - began, 1e-9)
            left = f", about {(total - done) / rate:.0f} s left" if done else ""
            more = f", {done / 1e9:.2f} of {total / 1e9:.2f} GB{left}" if len(files) > 1 else ""
            progress(f"writing {file} ({number} of {len(files)}{more})")
        _write_file(folder / file, checkpoint, tensors, checkpoint.metadata[file])
        weight_map |= {tensor.name: file for tensor in tensors}
        done += sum(tensor.nbytes for tensor in tensors)
    if checkpoint.sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


def copy_side_files(
    folder: Path, checkpoint: Checkpoint, layout: Layout, selections: Mapping[int, Selection]
) -> None:
    """Copy what lies beside the weights (tokenizer, generation config, licence …), experts in ModelOpt's renumbered.

    Raises:
        CheckpointError: One of them is a link that leaves the checkpoint's folder.
    """
    for path in side_files(checkpoint):
        if path.name == BESIDE:
            write_json(folder / BESIDE, renumbered(read_object(path), layout, selections))
        else:
            shutil.copyfile(path, folder / path.name)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file the way checkpoints have them; text that UTF-8 has no bytes for stays escaped."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2).encode()
    path.write_bytes(text + b"\n")


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
    if path.exists() and path.stat().st_size == 8 + len(text) + offset:
        return
    draft, file = path.with_name(f"{path.name}.part"), tensors[0].source.file
    plain = [(tensor.source, tensor.records, tensor.of) for tensor in tensors if tensor.copied]
    with (
        checks(checkpoint) as checking,
        draft.open("wb", buffering=0) as target,
        (checkpoint.folder / file).open("rb", buffering=0) as source,
    ):
        checking.add(file, plain)
        write_all(target, struct.pack("<Q", len(text)) + text)
        for copied, run in groupby(tensors, key=lambda tensor: tensor.copied):
            if copied:
                for start, length in spans((tensor.source, tensor.records, tensor.of) for tensor in run):
                    copy_span(source, target, start, length, lambda: not checking.failed.is_set())
                continue
            for tensor in run:
                for members in tensor.mixture:
                    write_all(target, _average(checkpoint, members))
                if tensor.ids:
                    write_all(target, _mapped(checkpoint, tensor))
        checking.finish()
    draft.replace(path)


def _average(checkpoint: Checkpoint, shares: tuple[Share, ...]) -> bytes:
    """Return the weighted average of records, taken in float32, in their own dtype."""
    total: Any = np.float32(0.0)
    for share in shares:
        record = to_float32(checkpoint.raw(share.source.name, share.record, share.of), share.source)
        total = total + np.float32(share.weight) * record
    return from_float32(total, shares[0].source.dtype)


def _mapped(checkpoint: Checkpoint, tensor: Output) -> bytes:
    """Return a tensor of expert ids with each id replaced by its new one.

    Raises:
        CheckpointError: The values are no ids of experts.
    """
    info = tensor.source
    if info.dtype not in ("I64", "I32", "U8"):
        raise CheckpointError(
            f"tensor {info.name!r} is {info.dtype}; expert ids are expected to be whole numbers",
            "download it anew",
        )
    kind = {"I64": "<i8", "I32": "<i4", "U8": "u1"}[info.dtype]
    old = np.frombuffer(checkpoint.raw(info.name), kind)
    if old.size and (old.min() < 0 or old.max() >= len(tensor.ids)):
        raise CheckpointError(
            f"tensor {info.name!r} names expert {old.max()}, and there are {len(tensor.ids)}",
            "complete the download",
        )
    return bytes(np.asarray(tensor.ids, kind)[old].tobytes())
