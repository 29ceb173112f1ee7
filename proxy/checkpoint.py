"""Read a Hugging Face checkpoint folder without loading it: config, shard index, where a tensor's bytes lie.

The builder copies bytes, so that every dtype (FP8 and packed ones too) passes through unchanged and memory
does not grow with the checkpoint. The `safetensors` library validates each header (it comes from other
people); only the byte offsets, which it does not hand out, are read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from proxy.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20
CHECK_BYTES = 1 << 19
MAX_DEPTH = 64
PLAIN_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that arithmetic is done on as they are."""
FP8 = ("F8_E4M3", "F8_E5M2")

# Whole numbers of the same width, and the bits of the smallest that is not finite (of NaN in F8_E4M3): among
# positive numbers, read with a sign, and among negative ones, read without. F8_E8M0 has no sign, and one NaN.
_NONFINITE_BITS = {
    "F64": ("<i8", 0x7FF0_0000_0000_0000, 0xFFF0_0000_0000_0000),
    "F32": ("<i4", 0x7F80_0000, 0xFF80_0000),
    "F16": ("<i2", 0x7C00, 0xFC00),
    "BF16": ("<i2", 0x7F80, 0xFF80),
    "F8_E5M2": ("<i1", 0x7C, 0xFC),
    "F8_E4M3": ("<i1", 0x7F, 0xFF),
    "F8_E8M0": ("<i1", 0x80, 0xFF),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        name: Tensor name.
        file: Name of the safetensors file inside the folder.
        dtype: safetensors dtype ("BF16", "F32", …).
        shape: Shape on disk.
        start: First byte, counted from the start of the file.
        nbytes: Length in bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that was opened but not loaded.

    Attributes:
        folder: The folder.
        config: `config.json` as it stands.
        tensors: By name, in file and byte order.
        metadata: The `__metadata__` of each safetensors file, by file name, in index order.
        sharded: Whether the folder has a shard index.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    sharded: bool = False

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(info.numel for info in self.tensors.values())

    def open(self, file: str) -> BinaryIO:
        """Open one of the folder's safetensors files for reading."""
        return (self.folder / file).open("rb")

    def array(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32, in its own shape.

        Raises:
            CheckpointError: If its dtype is no plain float, or it holds NaN or infinity.
        """
        info = self.tensors[name]
        return to_float32(self.raw(name), info).reshape(info.shape)

    def raw(self, name: str, record: int | None = None, of: int = 1) -> bytes:
        """Return a tensor's bytes, or those of one of the equal leading records it consists of."""
        info = self.tensors[name]
        with self.open(info.file) as file:
            chunks = read_chunks(file, info, None if record is None else (record,), of)
            return b"".join(map(bytes, chunks))


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a checkpoint folder: its config, its index and the header of every shard; no tensor is read.

    Raises:
        CheckpointError: There is no such folder, or a file is missing, broken, oversized or outside it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", "name a checkpoint folder in Hugging Face layout")
    config = _read_json(folder, CONFIG, MAX_CONFIG_BYTES)
    sharded = not (folder / SINGLE).exists() and (folder / INDEX).exists()
    weight_map = _weight_map(folder) if sharded else {}
    files = list(dict.fromkeys(weight_map.values())) if sharded else [SINGLE]
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in files:
        if not os.path.lexists(folder / file):
            if sharded:
                raise CheckpointError(
                    f"{folder}: shard {file!r} named by {INDEX} is missing", "complete the download"
                )
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}", "convert the weights to safetensors first"
            )
        metadata[file], infos = _read_header(inside(folder, file))
        for info in infos:
            if info.name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {info.name!r} is in two shards", "download index and shards anew"
                )
            tensors[info.name] = info
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(
                f"{folder}: {INDEX} puts tensor {name!r} in {file!r}, which does not hold it",
                "download index and shards anew",
            )
    if sharded and (extra := next((name for name in tensors if name not in weight_map), None)):
        raise CheckpointError(
            f"{folder}: {tensors[extra].file} holds tensor {extra!r}, which {INDEX} does not name",
            "download index and shards anew",
        )
    return Checkpoint(folder, config, tensors, metadata, sharded)


def inside(folder: Path, name: str) -> Path:
    """Return ``folder / name`` if that stays inside the folder, links resolved.

    The hub's cache keeps a snapshot as links into the ``blobs`` folder of its repository; those are allowed.

    Raises:
        CheckpointError: If `name` is no plain file name or is a link that leaves the folder.
    """
    if not name or name in (".", "..") or any(mark in name for mark in ("/", "\\", "\0")):
        raise CheckpointError(
            f"{folder}: file name {name!r} leads out of the folder",
            "ask for it where the checkpoint comes from: no sound one has such a name",
        )
    path = folder / name
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: {name!r} is a link that leads nowhere", "download it anew"
        ) from error
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{folder}: {name!r} is a link that leaves the folder", "name the folder that the links point to"
        )
    return path


def read_chunks(
    file: BinaryIO, info: TensorInfo, records: tuple[int, ...] | None, of: int = 1
) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks, or those of some of its equal leading records.

    A chunk is good until the next one is asked for: they share a buffer that fits the processor's cache.

    Args:
        file: The tensor's file, open for reading.
        info: The tensor.
        records: Which records to read, in this order; None for the whole tensor.
        of: Number of records the tensor consists of (its length along the expert axis).
    """
    size = info.nbytes // of
    spans = [(0, info.nbytes)] if records is None else [(record * size, size) for record in records]
    buffer = memoryview(bytearray(min(size or 1, CHUNK_BYTES)))
    for offset, length in spans:
        file.seek(info.start + offset)
        while length:
            count = file.readinto(buffer[: min(length, CHUNK_BYTES)])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"{info.file} ends inside tensor {info.name!r}", "complete the download"
                )
            length -= count
            yield buffer[:count]


def check_finite(chunk: bytes | memoryview, info: TensorInfo) -> None:
    """Refuse NaN and infinity in a chunk of a float tensor (other dtypes pass).

    Raises:
        CheckpointError: If there is one; the message names tensor and file.
    """
    # MXFP4 keeps its exponents as plain bytes.
    dtype = "F8_E8M0" if info.dtype == "U8" and info.name.endswith("_scales") else info.dtype
    if dtype not in _NONFINITE_BITS:
        return
    signed, bits, lowest = _NONFINITE_BITS[dtype]
    values = np.frombuffer(chunk, signed)
    step = CHECK_BYTES // values.itemsize
    negative = values.view(f"u{values.itemsize}")
    for start in range(0, len(values), step):
        # Non-finite values have the largest bit patterns there are, among positive and among negative numbers.
        here = slice(start, start + step)
        if values[here].max() >= bits or negative[here].max() >= lowest:
            raise CheckpointError(
                f"tensor {info.name!r} in {info.file} holds NaN or infinity",
                "use a checkpoint from before the divergence",
            )


def to_float32(raw: bytes, info: TensorInfo) -> NDArray[np.float32]:
    """Return bytes of a tensor as a flat float32 array.

    Raises:
        CheckpointError: If its dtype is no plain float, or it holds NaN or infinity.
    """
    check_finite(raw, info)
    if info.dtype == "BF16":
        array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif info.dtype in ("F16", "F32", "F64"):
        array = np.frombuffer(raw, f"<f{int(info.dtype[1:]) // 8}").astype(np.float32)
    else:
        raise CheckpointError(
            f"tensor {info.name!r} is {info.dtype}; arithmetic on it needs {', '.join(PLAIN_FLOATS)}",
            "use a BF16 copy of the checkpoint",
        )
    return array


def from_float32(array: NDArray[np.float32], dtype: str) -> bytes:
    """Return the bytes of a float32 array in a plain float dtype, rounded to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    assert dtype in ("F16", "F32", "F64"), dtype
    return array.astype(f"<f{int(dtype[1:]) // 8}").tobytes()


def _read_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    """Read a JSON object of limited size from the folder."""
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder} has no {name}", "name a checkpoint folder in Hugging Face layout")
    return read_object(inside(folder, name), limit)


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file that other people made.

    Args:
        path: The file.
        limit: Bytes that it may have.

    Raises:
        CheckpointError: It is no plain file, too large, no JSON object, or nested without end.
    """
    mend = "download it anew"
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file", "name a checkpoint folder, or its config.json")
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} is larger than {limit >> 20} MiB", mend)
        data = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "make it readable") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", mend) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object", mend)
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
    if level:
        raise CheckpointError(f"{path} is nested more than {MAX_DEPTH} deep", mend)
    return data


def _weight_map(folder: Path) -> dict[str, str]:
    """Return tensor name → shard file of a shard index, every file name checked."""
    weight_map = _read_json(folder, INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map", "download it anew")
    for file in dict.fromkeys(map(str, weight_map.values())):
        inside(folder, file)
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder}: shard {file!r} is not a safetensors file",
                "convert the weights to safetensors first",
            )
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_header(path: Path) -> tuple[dict[str, str], list[TensorInfo]]:
    """Return metadata and tensors, in byte order, of one safetensors file."""
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a plain file", "complete the download")
    try:
        with safe_open(
            path, framework="np"
        ):  # validates sizes, offsets, dtypes and shapes of the whole header
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a sound safetensors file: {error}", "complete the download"
        ) from error
    metadata = header.pop("__metadata__", None) or {}
    infos = [
        TensorInfo(
            name=name,
            file=path.name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=8 + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]
    return metadata, sorted(infos, key=lambda info: info.start)
