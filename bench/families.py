"""The family matrix: does a proxy of every family load, and does it compute what the masked original computes?

``python -m bench.families`` makes a tiny random checkpoint of each family that the installed transformers can
build (`bench.zoo`), cuts it, loads the proxy back with transformers, and compares its logits with those of
the original whose dropped experts are masked out of the choice. It also calibrates once with the streamed
reader and once on the loaded model. The matrix goes to stdout, and to the file after ``--out``.

Shape suffixes: T tokens, E experts.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.zoo import KINDS, Kind, make, tokens

LIMIT = 1e-5
_ROUTER = re.compile(r"\.(gate|router|wg|classifier|layer|proj|out_proj)\.weight$")
KEEP = 6


@dataclass(frozen=True)
class Row:
    """One line of the matrix.

    Attributes:
        name: Family and variant.
        layout: How the experts lie on disk: "one by one" or "fused".
        loads: Whether the proxy loads without a missing, unexpected or mismatched tensor.
        difference: Largest difference of logits from the masked original; None where it wasn't taken.
        changed: Largest difference from the whole original: the mask must matter.
        stream: Whether streamed calibration saw the routing of the loaded model ("" where not tried).
        note: Why something is missing.
    """

    name: str
    layout: str = ""
    loads: bool = False
    difference: float | None = None
    changed: float | None = None
    stream: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the family is held to the oracle."""
        held = self.difference is not None and self.difference <= LIMIT
        return self.loads and held and (self.changed or 0.0) > 10 * LIMIT


def check(kind: Kind, scratch: Path) -> Row:
    """Make, cut, load back and compare one family."""
    from proxy.build import build
    from proxy.checkpoint import open_checkpoint
    from proxy.errors import ProxyError
    from proxy.families import Role, understand
    from proxy.specs import BuildSpec

    original, proxy = scratch / "original", scratch / "proxy"
    try:
        make(kind, original)
    except Exception as error:  # whatever it is, it is the answer
        return Row(kind.name, note=f"transformers cannot build a tiny one: {_first_line(error)}")
    try:
        checkpoint = open_checkpoint(original)
        layout = understand(checkpoint)
        manifest = build(BuildSpec(str(original), str(proxy), KEEP, strategy="random"))
    except ProxyError as error:
        return Row(kind.name, note=f"refused: {str(error).removeprefix(f'{original}: ')}")
    kept = {int(layer): tuple(entry["kept"]) for layer, entry in manifest["layers"].items()}
    owner = {int(layer): tuple(entry["owner"]) for layer, entry in manifest["layers"].items()}
    roles = {part.role for part in layout.parts.values()}
    look = "one by one" if Role.EXPERT in roles else "fused"
    try:
        model, problems = load(proxy)
    except Exception as error:
        return Row(kind.name, look, note=f"the proxy does not load: {_first_line(error)}")
    if problems:
        return Row(kind.name, look, note=f"the proxy loads with {problems[0]}")
    try:
        ours = logits(model)
        whole, _ = load(original)
        plain = logits(whole)
        with masked(whole, layout, kept, owner):
            oracle = logits(whole)
        difference = float((ours - oracle).abs().max())
        changed = float((ours - plain).abs().max())
        return Row(kind.name, look, True, difference, changed, streamed(original, whole, layout))
    except Exception as error:
        return Row(kind.name, look, True, note=f"the forward fails: {_first_line(error)}")


def streamed(folder: Path, whole: Any, layout: Any) -> str:
    """Calibrate streamed and on the loaded model; say how it was streamed and how far the sums differ.

    Counts must be the same; the difference is that of routed contexts, relative to the largest.
    """
    import numpy as np

    from proxy.checkpoint import open_checkpoint
    from proxy.walk import Pass

    rows = tokens().tolist()
    try:
        walk = Pass(open_checkpoint(folder), layout, rows, None, None)
        found = walk.run()
    except Exception as error:
        return f"no: {_first_line(error)}"
    expected = resident(whole, layout, rows)
    worst = 0.0
    for layer, halves in found.items():
        pairs = sum(half.coactivation_EE.numpy() for half in halves)
        context = sum(half.weighted_hidden_EH.numpy() for half in halves)
        if not np.array_equal(pairs, expected[layer][0]):
            return f"no: layer {layer} routes otherwise"
        worst = max(worst, float(np.abs(context - expected[layer][1]).max() / np.abs(context).max()))
    if set(found) != set(layout.moe_layers):
        return "no: layers are missing"
    way = "plain forward" if walk.plain else "by layer"
    return f"{way}, {worst:.0e}"


def resident(model: Any, layout: Any, rows: list[list[int]]) -> dict[int, tuple[Any, Any]]:
    """Return pair counts and routed contexts of a loaded model by layer, from hooks."""
    import numpy as np
    import torch

    sums: dict[int, tuple[Any, Any]] = {}

    def count(layer: int, hidden: Any, index: Any, weights: Any) -> None:
        hidden = hidden.reshape(-1, hidden.shape[-1]).double().numpy()
        index, weights = (
            index.reshape(len(hidden), -1).numpy(),
            weights.reshape(len(hidden), -1).double().numpy(),
        )
        pairs, context = sums.setdefault(
            layer, (np.zeros((layout.experts,) * 2), np.zeros((layout.experts, hidden.shape[1])))
        )
        for h, chosen, applied in zip(hidden, index, weights, strict=True):
            used = {int(e): p for e, p in zip(chosen, applied, strict=True) if p != 0 and e < layout.experts}
            for e in used:
                for other in used:
                    pairs[e, other] += 1
            for e, p in zip(chosen, applied, strict=True):
                if e < layout.experts:
                    context[e] += p * h

    def hook(layer: int) -> Any:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
            count(layer, named["hidden_states"], named["top_k_index"], named["top_k_weights"])

        return before

    def scores(layer: int) -> Any:
        def after(_: Any, args: Any, output: Any) -> None:
            weights, index = output[0].topk(layout.top_k)
            count(layer, args[0], index, weights)

        return after

    handles = []
    for name, module in model.named_modules():
        found = re.search(r"\.(?:layers|blocks)\.(\d+)\.", f".{name}")
        layer = int(found[1]) if found else -1
        if layer not in layout.moe_layers:
            continue
        if layout.family.tap == "scores" and name.endswith("router"):
            handles.append(module.register_forward_hook(scores(layer)))
        elif layout.family.tap == "experts" and name.endswith(".experts"):
            handles.append(module.register_forward_pre_hook(hook(layer), with_kwargs=True))
    with torch.inference_mode():
        model(input_ids=torch.tensor(rows), use_cache=False)
    for handle in handles:
        handle.remove()
    return sums


def load(folder: Path) -> tuple[Any, list[str]]:
    """Return a checkpoint as a model, and what was missing or left over."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    known: Any = AutoModelForCausalLM._model_mapping
    loader: Any = AutoModelForCausalLM if type(config) in known else AutoModelForImageTextToText
    model, info = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    problems = [f"{kind} {sorted(map(str, info[kind]))[0]}" for kind in kinds if info[kind]]
    return model.eval(), problems


def logits(model: Any) -> Any:
    """Return logits on fixed tokens."""
    import torch

    with torch.inference_mode():
        return model(input_ids=tokens(), use_cache=False).logits


@contextmanager
def masked(
    model: Any, layout: Any, kept: Mapping[int, Sequence[int]], owner: Mapping[int, Sequence[int]]
) -> Iterator[None]:
    """Take dropped experts out of a model's choice: router logits and selection biases of -inf.

    Routers call `torch.nn.functional.linear` with their rows, whatever class they are, so the mask is put on
    the result of that call. Ids in hash tables are replaced by those of the representatives.
    """
    import torch
    from torch.nn import functional

    dropped_of: dict[int, list[int]] = {}
    undo: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = re.search(r"\.(?:layers|blocks)\.(\d+)\.", f".{name}")
        layer = int(found[1]) if found else -1
        if layer not in kept:
            continue
        dropped = sorted(set(range(layout.experts)) - set(kept[layer]))
        last = name.rsplit(".", 1)[-1]
        rows = layout.experts + layout.extra_rows
        if tensor.ndim == 2 and len(tensor) == rows and last == "weight" and _ROUTER.search(name):
            dropped_of[id(tensor)] = dropped
        elif last in ("e_score_correction_bias", "expert_bias", "balancing_biases"):
            undo.append((tensor, tensor.detach().clone()))
            with torch.no_grad():
                tensor[..., dropped] = float("-inf")
        elif last == "tid2eid":
            undo.append((tensor, tensor.detach().clone()))
            tensor.copy_(torch.tensor(owner[layer])[tensor.long()])
    plain = functional.linear

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
        result = plain(input, weight, bias)
        if id(weight) in dropped_of:
            result = result.clone()
            result[..., dropped_of[id(weight)]] = float("-inf")
        return result

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = plain
        with torch.no_grad():
            for tensor, before in undo:
                tensor.copy_(before)


def _first_line(error: BaseException) -> str:
    """Return an error's type and the start of its text, without places of this machine."""
    if error.__cause__ is not None and "forward fails" in str(error):
        error = error.__cause__
    text = re.sub(r"/\S*/", "", " ".join(str(error).split()))[:150]
    return f"{type(error).__name__}: {text}"


def report(rows: Sequence[Row]) -> str:
    """Return the matrix as Markdown."""
    import transformers

    passed = [row for row in rows if row.passed]
    lines = [
        "# MoE families",
        "",
        "Written by `python -m bench.families --out docs/families.md` "
        f"(transformers {transformers.__version__}). For every family a tiny random checkpoint of "
        "12 experts a layer was made with transformers, cut to 6 by `diagnose proxy build`'s own code, loaded "
        "back with transformers and compared with the original whose dropped experts are masked out of the "
        "router's choice.",
        "",
        f"{len(passed)} of {len(rows)} checkpoints load clean and stay within {LIMIT:g} of the masked original.",
        "",
        "jetmoe is refused on purpose: its attention is a mixture of experts as well, with a router of its own and "
        "the same config key for the count, so a cut of the one would have to cut the other, and the method says "
        "nothing about attention heads.",
        "",
        "Calibration was streamed from the files and compared with hooks on the loaded model: the same counts of "
        "experts and pairs, and the largest relative difference of the routed contexts.",
        "",
        "| family | experts on disk | loads | difference from masked original | from whole original "
        "| calibration streamed | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        number = "–" if row.difference is None else f"{row.difference:.1e}"
        changed = "–" if row.changed is None else f"{row.changed:.2g}"
        lines.append(
            f"| {row.name} | {row.layout or '–'} | {'yes' if row.loads else 'no'} | {number} | {changed} "
            f"| {row.stream or '–'} | {row.note.replace('|', '/')} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the matrix; exit 1 where a family that was cut differs from its masked original."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("names", nargs="*", help="model types to try (all)")
    options = parser.parse_args(arguments)
    quiet()
    rows = []
    for kind in KINDS:
        if options.names and kind.model_type not in options.names:
            continue
        with TemporaryDirectory(prefix="families-") as scratch:
            row = check(kind, Path(scratch))
        rows.append(row)
        verdict = "ok" if row.passed else "–"
        print(
            f"{row.name}: {verdict} {row.difference} {row.changed} {row.stream} {row.note}",
            file=sys.stderr,
            flush=True,
        )
    text = report(rows)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0 if all(row.passed or row.difference is None for row in rows) else 1


def quiet() -> None:
    """Silence progress bars and warnings of libraries."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    sys.exit(main())
