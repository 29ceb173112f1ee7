"""`diagnose proxy cost`: the paper's Table 2 for one model, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diagnose.console import Terminal
from diagnose.errors import DiagnoseError
from proxy.cost import ACCELERATORS, BYTES, GIB, Batch, Cost, cost
from proxy.embedded import PREFIX, resolve
from proxy.errors import CheckpointError
from proxy.sizes import shape_at

MOST = 10_000_000
"""Accelerators, or seconds of a step."""


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Attributes:
        model: A folder, a config.json, or ``embedded:NAME``.
        experts: Budgets of proxies.
        accelerator: Name in `proxy.cost.ACCELERATORS`.
        tokens: Tokens of a micro batch.
        batch: One training step.
        counts: Accelerators of each row, the original's first; the least where there is none.
        seconds: Measured seconds a step of each row, likewise; an estimate where there are none.
    """

    model: str
    experts: tuple[int, ...] = ()
    accelerator: str = "ascend-910c"
    tokens: int = 4096
    batch: Batch = field(default_factory=Batch)
    counts: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()


def costs(order: Order) -> list[Cost]:
    """Return the rows of the table: the original, then a proxy for every budget.

    Raises:
        DiagnoseError: The model cannot be counted, an option names nothing, or there are more numbers than rows.
    """
    if order.accelerator not in ACCELERATORS:
        raise DiagnoseError(f"--accelerator takes {', '.join(ACCELERATORS)}, not {order.accelerator!r}")
    rows = 1 + len(order.experts)
    for option, given in (("--accelerators", order.counts), ("--seconds", order.seconds)):
        if len(given) > rows:
            raise DiagnoseError(f"{option} has {len(given)} numbers for {rows} rows (original, proxies)")
        if not all(0 < value <= MOST for value in given):  # nan too is none
            raise DiagnoseError(f"{option} takes positive numbers up to {MOST:,}")
    path = resolve(order.model) if order.model.startswith(PREFIX) else Path(order.model).expanduser()
    try:
        whole = shape_at(path)
        shapes = [whole, *(whole.with_experts(count) for count in order.experts)]
        return [
            cost(
                shape,
                "proxy" if place else "original",
                ACCELERATORS[order.accelerator],
                order.tokens,
                order.batch,
                int(_of(order.counts, place)),
                float(_of(order.seconds, place)),
            )
            for place, shape in enumerate(shapes)
        ]
    except CheckpointError as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise DiagnoseError(named, error.mend) from None


def _of(given: tuple[int, ...] | tuple[float, ...], place: int) -> float:
    return given[place] if place < len(given) else 0


def data_of(order: Order, rows: list[Cost]) -> dict[str, Any]:
    """Return the table as JSON data; bytes as whole numbers."""
    return {
        "schema": 1,
        "model": order.model,
        "accelerator": asdict(ACCELERATORS[order.accelerator]),
        "micro_batch_tokens": order.tokens,
        "step": asdict(order.batch),
        "rows": [asdict(row) for row in rows],
    }


def show(order: Order, rows: list[Cost], terminal: Terminal) -> None:
    """Print the table."""
    device = ACCELERATORS[order.accelerator]
    terminal.table(
        ("model", "experts", "parameters", "active", "accelerators", "s/step", "hours/step"),
        [
            (
                row.variant,
                str(row.experts),
                _billions(row.parameters),
                _billions(row.active),
                str(row.devices),
                f"{row.seconds:.4g}" if row.measured else f"~{row.seconds:.2g}",
                f"{row.hours:.4g}" if row.measured else f"~{row.hours:.2g}",
            )
            for row in rows
        ],
        numbers=6,
    )
    terminal.data("")
    terminal.table(
        ("GiB in all", *BYTES, "sum", "per device"),
        [
            (
                f"{row.variant} {row.experts}",
                *(f"{row.memory[state] / GIB:.4g}" for state in BYTES),
                f"{sum(row.memory.values()) / GIB:.4g}",
                f"{(sum(row.memory.values()) / row.devices + row.activations) / GIB:.3g} of {device.memory:g}",
            )
            for row in rows
        ],
        numbers=7,
    )
    terminal.data("")
    if len(rows) > 1:
        first = rows[0]
        for row in rows[1:]:
            share = first.hours / row.hours
            terminal.data(
                f"{row.experts} experts: {first.parameters / row.parameters:.3g}× fewer parameters, "
                f"{first.devices / row.devices:.3g}× fewer accelerators, {share:.3g}× cheaper a step"
            )
    if not all(row.measured for row in rows):
        terminal.data(
            "~ is an estimate from data sheets (docs/cost.md); give measured seconds with --seconds"
        )


def _billions(count: int) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e8 else f"{count / 1e6:.4g} M"
