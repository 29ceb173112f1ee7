"""What the original does with its experts on calibration tokens: counts, pairs, routed context.

One pre-hook on each ``experts`` submodule sees the router's input, the experts it chose and the weights
the model applies, after selection bias and groups, so this is the model's true routing in every family.
Rows of equal length are run together and nothing is padded. Sums are float64.

Shape suffixes: R rows of equal length, S tokens of a row, T tokens, E experts, H hidden size, K top-k.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.checkpoint import Checkpoint, open_checkpoint
from proxy.errors import BuildError
from proxy.families import Layout, understand
from proxy.layer_stats import LayerStats

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
Rows = list[list[int]]
Progress = Callable[[str], None]

BATCH_TOKENS = 4096
MAX_LINE_BYTES = 16 << 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def uncalibrated(checkpoint: Checkpoint, layout: Layout) -> list[LayerStats]:
    """Return statistics without a single token, for strategies that need the router rows only.

    Raises:
        CheckpointError: A router row holds NaN or infinity.
    """
    stats = []
    for layer in layout.moe_layers:
        router_EH = checkpoint.array(layout.router(layer)).astype(np.float64)[: layout.experts]
        experts, hidden = router_EH.shape
        stats.append(
            LayerStats(
                layer=layer,
                tokens=0,
                counts_E=np.zeros(experts),
                coactivation_EE=np.zeros((experts, experts)),
                weighted_hidden_EH=np.zeros((experts, hidden)),
                router_EH=router_EH,
            )
        )
    return stats


def collect(
    model_folder: str | Path,
    token_rows: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Progress | None = None,
) -> list[LayerStats]:
    """Run the checkpoint over calibration rows and return the statistics of each MoE layer, in layer order.

    Args:
        model_folder: Checkpoint folder; it is loaded whole, in float32, on the CPU.
        token_rows: Token ids, one list a text.
        max_tokens: Tokens used at most; the last row is cut to fit.
        progress: Called with sentences for humans.

    Raises:
        CheckpointError: The checkpoint cannot be read or is not understood.
        BuildError: There are no tokens, or the model does not load, or computes NaN or infinity.
    """
    checkpoint = open_checkpoint(model_folder)
    layout = understand(checkpoint)
    empty = uncalibrated(checkpoint, layout)
    rows = cut_rows(token_rows, max_tokens, checkpoint.config)
    total = sum(map(len, rows))
    model = _load(checkpoint.folder)
    if progress:
        progress(f"calibrating on {total} tokens of {len(rows)} rows")
    tallies = [_tally(model, layout, rows[half::2]) for half in (0, 1)]
    stats = []
    for base in empty:
        halves = [_as_stats(base, tally[base.layer]) for tally in tallies]
        stats.append(_sum(halves[0], halves[1], with_halves=len(rows) > 1))
    return stats


def calibration_rows(source: str, folder: str | Path, max_tokens: int, seed: int = 0) -> Rows:
    """Return the token rows that a build spec names.

    Args:
        source: "embedded" (prompts and responses of the embedded task) or the path of a JSONL file whose
            lines are ``{"input_ids": [...]}`` or ``{"text": "..."}``.
        folder: Checkpoint folder, whose ``tokenizer.json`` turns texts into tokens.
        max_tokens: Reading stops when there are as many.
        seed: Seed of the embedded task's responses.

    Raises:
        BuildError: The file cannot be read, or a line is none of the two.
    """
    if source == "embedded":
        from proxy.embedded.rollouts import calibration_rows as sampled

        return sampled(Path(folder), max_tokens, seed)
    path = Path(source).expanduser()
    rows: Rows = []
    tokens = 0
    encode: Callable[[str], list[int]] | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if tokens >= max_tokens:
                    break
                if not line.strip():
                    continue
                ids, text = _parse_line(line, f"{path}:{number}")
                if text is not None:
                    encode = encode or _tokenizer(Path(folder))
                    ids = encode(text)
                rows.append(ids)
                tokens += len(ids)
    except OSError as error:
        raise BuildError(f"calibration file {path} cannot be read: {error.strerror}") from error
    return rows


def cut_rows(token_rows: Sequence[Sequence[int]], max_tokens: int, config: dict[str, Any]) -> Rows:
    """Return the leading rows that fit the token budget, each cut to the context length, empty ones left out.

    Raises:
        BuildError: Nothing is left, or a token id is outside the vocabulary.
    """
    longest = config.get("max_position_embeddings") or max_tokens
    vocabulary = config.get("vocab_size") or 0
    rows: Rows = []
    left = max_tokens
    for row in token_rows:
        if left <= 0:
            break
        ids = [int(token) for token in row[: min(longest, left)]]
        if ids and (min(ids) < 0 or (vocabulary and max(ids) >= vocabulary)):
            raise BuildError(
                f"a calibration token id is {min(ids) if min(ids) < 0 else max(ids)}, "
                f"outside the checkpoint's vocabulary of {vocabulary}",
                "calibrate on texts tokenised for this checkpoint",
            )
        if ids:
            rows.append(ids)
            left -= len(ids)
    if not rows:
        raise BuildError("there are no calibration tokens", "name a calibration file with at least one text")
    return rows


@dataclass
class _Tally:
    """Running sums of one layer."""

    tokens: int
    coactivation_EE: torch.Tensor
    weighted_hidden_EH: torch.Tensor


def _tally(model: Any, layout: Layout, rows: Rows) -> dict[int, _Tally]:
    """Run rows through the model; return the sums of each MoE layer (without a token for no rows)."""
    import torch

    tallies: dict[int, _Tally] = {}

    def hook(layer: int) -> Callable[..., None]:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            names = ("hidden_states", "top_k_index", "top_k_weights")
            given = dict(zip(names, args, strict=False)) | kwargs
            hidden, index, weights = (given[name] for name in names)
            hidden_TH = hidden.reshape(-1, hidden.shape[-1]).double()
            index_TK = index.reshape(-1, index.shape[-1]).long()
            weights_TK = weights.reshape(index_TK.shape).double()
            zeros_TE = torch.zeros(len(index_TK), layout.experts, dtype=torch.float64)
            chosen_TE = zeros_TE.scatter(1, index_TK, 1.0)
            applied_TE = zeros_TE.scatter(1, index_TK, weights_TK)
            tally = tallies.get(layer)
            if tally is None:
                shape = (layout.experts, hidden_TH.shape[1])
                tally = _Tally(
                    0,
                    torch.zeros(layout.experts, layout.experts, dtype=torch.float64),
                    torch.zeros(shape, dtype=torch.float64),
                )
                tallies[layer] = tally
            tally.tokens += len(index_TK)
            tally.coactivation_EE += chosen_TE.T @ chosen_TE
            tally.weighted_hidden_EH += applied_TE.T @ hidden_TH

        return before

    handles = []
    for name, module in model.named_modules():
        found = _LAYER.search(name + ".")
        if name.endswith(".experts") and found:
            handles.append(module.register_forward_pre_hook(hook(int(found[1])), with_kwargs=True))
    try:
        with torch.inference_mode():
            for batch_RS in _batches(rows):
                model.base_model(input_ids=torch.tensor(batch_RS), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for layer in layout.moe_layers:
        if rows and layer not in tallies:
            raise BuildError(f"layer {layer}: the experts were never called, so their routing cannot be seen")
        if rows and not bool(tallies[layer].weighted_hidden_EH.isfinite().all()):
            raise BuildError(
                f"layer {layer}: the router's input holds NaN or infinity on calibration tokens",
                "use a checkpoint from before the divergence",
            )
    return tallies if rows else dict.fromkeys(layout.moe_layers, _Tally(0, torch.empty(0), torch.empty(0)))


def _batches(rows: Rows) -> Iterator[Rows]:
    """Yield batches of rows of equal length, up to `BATCH_TOKENS` tokens each, so that nothing is padded."""
    by_length: dict[int, Rows] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    for length, alike in sorted(by_length.items()):
        size = max(1, BATCH_TOKENS // length)
        for first in range(0, len(alike), size):
            yield alike[first : first + size]


def _load(folder: Path) -> Any:
    """Load a checkpoint with plain transformers, refusing weights that would be made up."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BuildError(f"transformers cannot load {folder}: {lines[0]}") from error
    model, info = loaded
    odd = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in sorted(map(str, info[kind]))]
    if odd:
        raise BuildError(f"transformers finds no weights for {len(odd)} tensors, the first being {odd[0]!r}")
    return model.eval()


def _as_stats(base: LayerStats, tally: _Tally) -> LayerStats:
    """Return one half's sums as statistics."""
    if not tally.tokens:
        return base
    coactivation_EE = tally.coactivation_EE.numpy()
    return LayerStats(
        layer=base.layer,
        tokens=tally.tokens,
        counts_E=coactivation_EE.diagonal().copy(),
        coactivation_EE=coactivation_EE,
        weighted_hidden_EH=tally.weighted_hidden_EH.numpy(),
        router_EH=base.router_EH,
    )


def _sum(first: LayerStats, second: LayerStats, with_halves: bool) -> LayerStats:
    """Return the statistics over both halves."""
    return LayerStats(
        layer=first.layer,
        tokens=first.tokens + second.tokens,
        counts_E=first.counts_E + second.counts_E,
        coactivation_EE=first.coactivation_EE + second.coactivation_EE,
        weighted_hidden_EH=first.weighted_hidden_EH + second.weighted_hidden_EH,
        router_EH=first.router_EH,
        halves=(first, second) if with_halves else None,
    )


def _parse_line(line: bytes, where: str) -> tuple[list[int], str | None]:
    """Return token ids or a text of one calibration line."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not JSON: {error}") from error
    ids, text = (raw.get("input_ids"), raw.get("text")) if isinstance(raw, dict) else (None, None)
    if isinstance(text, str):
        return [], text
    if isinstance(ids, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        return ids, None
    raise BuildError(f'{where}: expected {{"input_ids": [...]}} or {{"text": "..."}}')


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Return the encoder of the checkpoint's tokenizer."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BuildError(
            f"{folder} has no tokenizer.json to read texts with", 'give {"input_ids": [...]} lines'
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise BuildError(f"{path} is not a tokenizer: {error}") from error
    return lambda text: list(tokenizer.encode(text).ids)
