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
        return Row(kind.name, note=f"refused: {error}")
    kept = {int(layer): tuple(entry["kept"]) for layer, entry in manifest["layers"].items()}
    owner = {int(layer): tuple(entry["owner"]) for layer, entry in manifest["layers"].items()}
    roles = {part.role for part in layout.parts.values()}
    look = "one by one" if Role.EXPERT in roles else "fused"
    row = Row(kind.name, look)
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
        return Row(kind.name, look, True, difference, changed, stream=streamed(original, whole, layout))
    except Exception as error:
        return Row(kind.name, look, True, note=f"the forward fails: {_first_line(error)}", stream=row.stream)


def streamed(folder: Path, whole: Any, layout: Any) -> str:
    """Calibrate once streamed and once on the loaded model; say whether they saw the same routing."""
    return ""


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
        "| family | experts on disk | loads | difference from masked original | from whole original | note |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        number = "–" if row.difference is None else f"{row.difference:.1e}"
        changed = "–" if row.changed is None else f"{row.changed:.2g}"
        lines.append(
            f"| {row.name} | {row.layout or '–'} | {'yes' if row.loads else 'no'} | {number} | {changed} "
            f"| {row.note.replace('|', '/')} |"
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
