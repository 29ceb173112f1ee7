"""A model that is never loaded: a skeleton without weights that is given one layer, then one expert, at a time.

The skeleton is transformers' own class on the meta device, so that attention, routers and experts compute what
they always do; tensors are read from the checkpoint, made float32 (`proxy.quantised`) and renamed by
transformers' own conversion table as they are needed. The ``experts`` module of each layer is shrunk to a
single expert, so the model's own code computes any expert alone.

Shape suffixes: T tokens, K top-k, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from proxy.checkpoint import Checkpoint, TensorInfo, check_finite
from proxy.companions import factors, is_companion
from proxy.errors import UNCALIBRATED, BuildError, CannotPredict
from proxy.families import Layout, Role, get_key
from proxy.quantised import block_size, to_float
from proxy.selection import Selection
from proxy.skeleton import LoadErrors, Skeleton, cannot_load

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "F8_E8M0": "float8_e8m0fnu",
}

HEAD_ROWS = 4096
ON_DEMAND_BYTES = 4 << 20
"""Linear weights of a layer (in float32) from this size on are read while they are used instead of being held."""


class Streamed:
    """A checkpoint as a model whose weights come and go.

    Attributes:
        text: The text model (embeddings, layers, norm), to be called with token ids.
        layers: Its decoder layers.
        read_bytes: Bytes of weights read so far.

    Args:
        checkpoint: The checkpoint.
        layout: Its layout.

    Raises:
        BuildError: transformers has no such model, or the checkpoint's tensors don't fit it.
    """

    def __init__(self, checkpoint: Checkpoint, layout: Layout) -> None:
        self.checkpoint = checkpoint
        self.layout = layout
        self.read_bytes = 0
        self._slots = 1  # LongCat's class can't do with a single one: then there is a second, of weight 0
        self._picked: Mapping[int, Selection] = {}
        self._masked_rows: dict[int, list[int]] = {}
        self.quantisation = get_key(checkpoint.config, "quantization_config") or get_key(
            checkpoint.config, "text_config.quantization_config"
        )
        self._skeleton = Skeleton(checkpoint)
        self._model, self._meta = self._skeleton.model, self._skeleton.meta
        target = self._target(layout.router(layout.moe_layers[0]))
        found = re.search(rf"^(.*?)([^.]+)\.{layout.moe_layers[0]}\.", target)
        if not found or target not in self._meta:
            raise BuildError(
                f"transformers has no place for {layout.router(layout.moe_layers[0])!r}", UNCALIBRATED
            )
        self.text = self._model.get_submodule(found[1].removesuffix("."))
        self._layers_name = found[1] + found[2]
        self.layers = self._model.get_submodule(self._layers_name)
        self.single = layout.family.tap == "experts"
        if self.single:
            for layer in layout.moe_layers:
                self._shrink(self.experts(layer))
            self._meta = self._skeleton.meta = self._model.state_dict()
        self._by_layer = self._names_by_layer()

    def experts(self, layer: int) -> Any:
        """Return the experts module of a layer."""
        for name, module in self.layers[layer].named_modules():
            if name.split(".")[-1] == "experts":
                return module
        raise BuildError(f"layer {layer}: transformers' model has no module named experts", UNCALIBRATED)

    def router(self, layer: int) -> Any:
        """Return the router module of a layer."""
        return self._model.get_submodule(self._target(self.layout.router(layer)).rpartition(".")[0])

    @contextmanager
    def ends(self, token_ids: Iterable[int]) -> Iterator[None]:
        """Give the model what lies before its layers; of the embeddings only the rows of these tokens.

        Raises:
            BuildError: A weight is missing.
        """
        import torch

        inside = set(self._model.state_dict()) - {
            f"{self._layers_name}.{name}" for name in self.layers.state_dict()
        }
        start = self._layers_name.rpartition(".")[0] + "."
        wanted = {name for name in inside if name.startswith(start)}
        sources = [
            name
            for name, part in self.layout.parts.items()
            if part.layer < 0 and part.role is Role.COPY and self._target(name) in wanted
        ]
        embedding = self.text.get_input_embeddings()
        table = next((name for name, module in self.text.named_modules() if module is embedding), "")
        table_name = f"{start}{table}.weight" if table else ""
        big = [name for name in sources if self._target(name) == table_name]
        self._put(self._convert([name for name in sources if name not in big]))
        unique = sorted(set(token_ids))
        if big:
            embedding.weight = torch.nn.Parameter(self._rows(big[0], unique), requires_grad=False)
            # It would have to be one of the rows, and matters for gradients only.
            embedding.padding_idx = None
            where = {token: row for row, token in enumerate(unique)}
            look_up = torch.tensor([where.get(token, 0) for token in range(max(unique) + 1)])
            handle = embedding.register_forward_pre_hook(lambda _, args: (look_up[args[0]], *args[1:]))
        try:
            yield
        finally:
            if big:
                handle.remove()

    @contextmanager
    def layer(self, layer: int, whole: bool = False) -> Iterator[Any]:
        """Give a layer its weights (without those of its experts, unless `whole`), and take them away again.

        Raises:
            BuildError: A weight is missing or of another shape.
        """
        from proxy.on_demand import borrowed

        skip = {Role.EXPERT, Role.FUSED} if not whole else set()
        names = [name for name in self._by_layer[layer] if self.layout.parts[name].role not in skip]
        module = self.layers[layer]
        before = {name: tensor for name, tensor in _own(module)}
        large = self._large(layer, names)
        apart = {name for weight in large for name in (weight, *self._companions(weight))}
        self._put(self._convert([name for name in names if name not in apart]))
        experts = self.experts(layer) if self.single and layer in self.layout.moe_layers else None
        ignored = {id(tensor) for _, tensor in _own(experts)} if experts is not None else set()
        ignored |= {id(linear._parameters["weight"]) for linear in large.values()}
        left = [name for name, tensor in _own(module) if tensor.is_meta and id(tensor) not in ignored]
        if left:
            place = f"{self._layers_name}.{layer}.{left[0]}"
            raise BuildError(
                f"transformers finds no weights for {len(left)} tensors, the first being {place!r}",
                UNCALIBRATED,
            )
        self._mask(layer)
        try:
            with borrowed({linear: self._reader(name) for name, linear in large.items()}):
                yield module
        finally:
            self._masked_rows.clear()  # the next tensor may lie where this layer's router lay
            for name, tensor in before.items():
                _set(module, name, tensor)

    def _large(self, layer: int, names: Iterable[str]) -> dict[str, Any]:
        """Return the large linear modules of a layer that are one tensor of rows on disk, by its name."""
        import torch

        found: dict[str, Any] = {}
        sources: dict[str, int] = {}
        for name in names:
            target, pattern = self._skeleton.renamed(name)
            if (
                is_companion(name, self.checkpoint.tensors)
                or target not in self._meta
                or not target.endswith(".weight")
            ):
                continue
            sources[target] = sources.get(target, 0) + 1
            info, meta = self.checkpoint.tensors[name], self._meta[target]
            module = self._model.get_submodule(target.removesuffix(".weight"))
            if (
                type(module) is torch.nn.Linear
                and self.layout.parts[name].role is Role.COPY
                and pattern is None
                and info.shape == tuple(meta.shape)
                and info.dtype in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")
                and 4 * info.numel >= ON_DEMAND_BYTES
            ):
                found[name] = module
        return {name: module for name, module in found.items() if sources[self._target(name)] == 1}

    def _companions(self, name: str) -> list[str]:
        """Return the tensors that help to read a weight."""
        around = (*factors(name), f"{name.removesuffix('.weight')}.input_scale")
        return [companion for companion in around if companion in self.checkpoint.tensors]

    def _reader(self, name: str) -> Callable[[int, int], torch.Tensor]:
        """Return what reads rows of a weight; NaN is looked for when they are read the first time."""
        checked: set[tuple[int, int]] = set()
        rows = self.checkpoint.tensors[name].shape[0]

        def read(start: int, stop: int) -> torch.Tensor:
            new = (start, stop) not in checked
            raw = {name: self._some_rows(name, start, stop, new)}
            for companion in self._companions(name):
                info = self.checkpoint.tensors[companion]
                if info.numel == 1 or not info.shape:
                    raw[companion] = self._read(companion)
                    continue
                block = block_size(rows, info.shape[0])
                raw[companion] = self._some_rows(companion, start // block, -(-stop // block), new)
            checked.add((start, stop))
            return to_float(raw, self.quantisation or {})[name]

        return read

    def _some_rows(self, name: str, start: int, stop: int, check: bool) -> torch.Tensor:
        """Return the rows of a tensor from one number up to another, as on disk."""
        import torch

        info = self.checkpoint.tensors[name]
        size = info.nbytes // info.shape[0]
        raw = self._fill(info, info.start + start * size, (stop - start) * size, check)
        return raw.view(getattr(torch, _dtype(info))).reshape(stop - start, *info.shape[1:])

    @contextmanager
    def masked(self, picked: Mapping[int, Selection]) -> Iterator[None]:
        """Take all experts but the picked ones out of the routers' choice, for as long as the context lasts.

        Routers call `torch.nn.functional.linear` with their rows, whatever their class, so its result is where
        the mask goes; selection biases become -inf, and ids of hash tables those of the representatives.
        """
        from torch.nn import functional

        plain = functional.linear

        def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
            result = plain(input, weight, bias)
            if id(weight) in self._masked_rows:
                result = result.clone()
                result[..., self._masked_rows[id(weight)]] = float("-inf")
            return result

        self._picked = picked
        functional.linear = linear
        try:
            yield
        finally:
            functional.linear = plain
            self._picked = {}
            self._masked_rows.clear()

    def _mask(self, layer: int) -> None:
        """Mask a layer that has its weights."""
        import torch

        if layer not in self._picked:
            return
        picked = self._picked[layer]
        dropped = sorted(set(range(self.layout.experts)) - set(picked.kept))
        router = self._target(self.layout.router(layer))
        for name in self._by_layer[layer]:
            part, target = self.layout.parts[name], self._target(name)
            if part.role not in (Role.ROWS, Role.IDS) or target not in self._meta:
                continue
            path, _, last = target.rpartition(".")
            tensor = getattr(self._model.get_submodule(path), last)
            if target == router:
                self._masked_rows[id(tensor)] = dropped
            elif part.role is Role.IDS:
                _set(self._model, target, torch.tensor(picked.owner)[tensor.long()])
            elif "bias" in last and last != "bias":
                tensor[..., dropped] = float("-inf")

    def next_tokens(self, hidden_TH: torch.Tensor) -> list[int]:
        """Return the most likely next tokens after final hidden states; the head is read in pieces.

        Raises:
            CannotPredict: The checkpoint has no head, or a quantised one.
        """
        import torch

        heads = (self._model.get_output_embeddings(), self.text.get_input_embeddings())
        names = [
            f"{name}.weight"
            for head in heads
            for name, module in self._model.named_modules()
            if module is head
        ]
        on_disk = {self._target(name): name for name, part in self.layout.parts.items() if part.layer < 0}
        name = next((on_disk[target] for target in names if target in on_disk), None)
        if name is None or self.checkpoint.tensors[name].dtype not in ("BF16", "F16", "F32"):
            raise CannotPredict("the checkpoint has no plain output head to predict tokens with")
        count = self.checkpoint.tensors[name].shape[0]
        best_T = torch.full((len(hidden_TH),), float("-inf"))
        token_T = torch.zeros(len(hidden_TH), dtype=torch.long)
        for start in range(0, count, HEAD_ROWS):
            rows = self._rows(name, list(range(start, min(start + HEAD_ROWS, count))))
            high_T, at_T = (hidden_TH.float() @ rows.T).max(dim=1)
            token_T = torch.where(high_T > best_T, at_T + start, token_T)
            best_T = torch.maximum(best_T, high_T)
        return [int(token) for token in token_T]

    def expert_order(self, layer: int) -> list[int]:
        """Return a layer's experts in the order of their bytes."""
        members = self.layout.members.get(layer)
        if not members:
            return list(range(self.layout.experts))
        place = {name: number for number, name in enumerate(self.checkpoint.tensors)}
        first = {expert: min(place[name] for name in names.values()) for expert, names in members.items()}
        return sorted((expert for expert in first if expert < self.layout.experts), key=first.__getitem__)

    def load_expert(self, layer: int, expert: int) -> None:
        """Give the layer's experts module the weights of one expert, in place of the last one's, gone by then."""
        self.drop_expert(layer)
        members = self.layout.members.get(layer)
        if members:
            parts = self.layout.parts
            names = {name: parts[name].renamed(0) for name in members[expert].values()}
            self._put(self._convert(names, names))
            return
        names = {name: name for name in self._by_layer[layer] if self.layout.parts[name].role is Role.FUSED}
        self._put(self._convert(names, names, record=expert))

    def drop_expert(self, layer: int) -> None:
        """Take the weights of the layer's experts module away."""
        import torch

        module = self.experts(layer)
        for name, tensor in _own(module):
            _set(module, name, torch.nn.Parameter(tensor.to("meta"), requires_grad=False))

    def compute(self, layer: int, hidden_TH: torch.Tensor, weight_T: torch.Tensor) -> torch.Tensor:
        """Return the loaded expert's output times the routing weights, [T, H]."""
        import torch

        module = self.experts(layer)
        try:
            index_TK = torch.zeros(len(hidden_TH), self._slots, dtype=torch.long)
            weights_TK = torch.nn.functional.pad(weight_T[:, None], (0, self._slots - 1))
            out: torch.Tensor = type(module).forward(module, hidden_TH, index_TK, weights_TK)
        except ValueError:
            if self._slots > 1:
                raise
            self._slots = 2
            return self.compute(layer, hidden_TH, weight_T)
        return out.reshape(hidden_TH.shape)

    def _names_by_layer(self) -> dict[int, list[str]]:
        """Return the checkpoint's tensors by the layer that they become part of, in byte order."""
        found: dict[int, list[str]] = {}
        place = re.compile(re.escape(self._layers_name) + r"\.(\d+)\.")
        for name, part in self.layout.parts.items():
            if part.role in (Role.EXPERT, Role.FUSED):
                layer = part.layer
            else:
                target = place.match(self._target(name))
                layer = int(target[1]) if target else part.layer
            if layer >= 0 and part.role is not Role.DROP:
                found.setdefault(layer, []).append(name)
        return found

    def _shrink(self, module: Any) -> None:
        """Make an experts module one of a single expert, still without weights."""
        import torch

        counts = {self.layout.experts, self.layout.experts + self.layout.extra_rows}
        for name, value in vars(module).items():
            if isinstance(value, int) and value in counts and "expert" in name:
                setattr(module, name, 1)
        for name, tensor in [*module.named_parameters()]:
            lead = next((count for count in sorted(counts) if tensor.shape[0] % count == 0), 0)
            if lead and "score_correction" not in name:
                shape = (tensor.shape[0] // lead, *tensor.shape[1:])
                _set(module, name, torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

    def _target(self, name: str) -> str:
        """Return the (first) name in the model of a tensor on disk."""
        return self._skeleton.renamed(name)[0]

    def _convert(
        self, names: Iterable[str], renamed: dict[str, str] | None = None, record: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Read tensors and return them as the model has them, by the model's names.

        Args:
            names: Names on disk.
            renamed: Names to pretend that they have.
            record: Read only this record of each (an expert's, of fused tensors).

        Raises:
            BuildError: transformers' conversion fails.
        """
        from transformers.core_model_loading import WeightRenaming, dot_natural_key

        names = list(names)
        raw = {(renamed or {}).get(name, name): self._read(name, record) for name in names}
        try:
            sources = to_float(raw, self.quantisation or {})
        except BuildError:
            raise
        except LoadErrors as error:
            raise BuildError(
                f"{names[0]!r} and what belongs to it do not fit together: {error}", UNCALIBRATED
            ) from error
        by_pattern = self._skeleton.converters
        pending: dict[str, Any] = {}
        for name in sorted(sources, key=dot_natural_key):
            target, pattern = self._skeleton.renamed(name)
            if target not in self._meta:
                continue  # what transformers leaves out when it loads, it leaves out here
            entry = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
            pending.setdefault(target, entry).add_tensor(target, name, pattern or name, sources.pop(name))
        result: dict[str, Any] = {}
        try:
            for target, entry in pending.items():
                for name, value in entry.convert(
                    target, model=self._model, config=self._model.config
                ).items():
                    result[name] = value[0] if isinstance(value, list) else value
        except LoadErrors as error:
            raise cannot_load(self.checkpoint, error) from error
        return result

    def _read(self, name: str, record: int | None = None) -> torch.Tensor:
        """Return a tensor as on disk, or one record of it with its leading axis."""
        import torch

        info = self.checkpoint.tensors[name]
        of = self.layout.parts[name].records if record is not None else 1
        shape = (info.shape[0] // of, *info.shape[1:]) if of > 1 else info.shape
        start = info.start + (record or 0) * (info.nbytes // of)
        return self._fill(info, start, info.nbytes // of).view(getattr(torch, _dtype(info))).reshape(shape)

    def _rows(self, name: str, rows: list[int]) -> torch.Tensor:
        """Return some rows of a two-axis tensor as float32."""
        import torch

        info = self.checkpoint.tensors[name]
        if max(rows) >= info.shape[0]:
            raise BuildError(
                f"token id {max(rows)} is outside of {name!r}, which has {info.shape[0]} rows",
                "calibrate on texts tokenised for this checkpoint",
            )
        size = info.nbytes // info.shape[0]
        parts = [self._fill(info, info.start + row * size, size) for row in rows]
        return torch.stack(parts).view(getattr(torch, _dtype(info))).float()

    def _fill(self, info: TensorInfo, start: int, size: int, check: bool = True) -> torch.Tensor:
        """Return bytes of a tensor's file, refusing NaN and infinity unless they were checked before."""
        import torch

        buffer = torch.empty(size, dtype=torch.uint8)
        with self.checkpoint.open(info.file) as file:
            file.seek(start)
            view = memoryview(buffer.numpy().data)
            if file.readinto(view) != size:  # type: ignore[attr-defined]
                raise BuildError(f"{info.file} ends inside tensor {info.name!r}", "complete the download")
        if check:
            check_finite(view, info)
        self.read_bytes += size
        return buffer

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put tensors into the model."""
        for name, tensor in tensors.items():
            if tensor.shape != self._meta[name].shape:
                raise BuildError(
                    f"transformers expects {name!r} of shape {tuple(self._meta[name].shape)}, "
                    f"and the checkpoint has {tuple(tensor.shape)}",
                    UNCALIBRATED,
                )
            _set(self._model, name, tensor)


def _dtype(info: TensorInfo) -> str:
    """Return torch's name of a tensor's dtype."""
    if info.dtype not in _DTYPES:
        raise BuildError(f"tensor {info.name!r} is {info.dtype}, which calibration cannot read", UNCALIBRATED)
    return _DTYPES[info.dtype]


def _own(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and persistent buffers."""
    kept = module.state_dict(keep_vars=True)
    return [*kept.items()]


def _set(module: Any, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer."""
    import torch

    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path) if path else module
    if last in owner._buffers:
        owner._buffers[last] = tensor
    else:
        plain = isinstance(tensor, torch.nn.Parameter)
        owner._parameters[last] = tensor if plain else torch.nn.Parameter(tensor, requires_grad=False)
