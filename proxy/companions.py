"""Names of the tensors that only help to read another one: factors, zero points, shapes of what is quantised."""

from __future__ import annotations

from collections.abc import Container


def factors(name: str) -> tuple[str, ...]:
    """Return the names under which the factors of an FP8 or int8 tensor may be found."""
    bare = (f"{name.removesuffix('weight')}scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *bare)


def lacks(name: str, dtype: str, names: Container[str]) -> str:
    """Return the name of the tensor without which this one cannot be read, "" where there is none or it is there.

    Args:
        name: A tensor.
        dtype: Its safetensors dtype.
        names: Names of all tensors.
    """
    needed: tuple[str, ...] = ()
    if name.endswith(".weight_packed"):
        needed = (f"{name.removesuffix('_packed')}_scale",)
    elif name.endswith("_blocks") and dtype == "U8":
        needed = (f"{name.removesuffix('_blocks')}_scales",)
    elif dtype in ("F8_E4M3", "F8_E5M2", "I8") and not is_companion(name, names):
        needed = factors(name)
    return needed[0] if needed and not any(one in names for one in needed) else ""


def is_companion(name: str, names: Container[str]) -> bool:
    """Say whether a tensor only helps to read another one of these names."""
    if name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in names:
        return True
    return name.endswith(
        (
            "weight_scale_inv",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "_scales",
            "_scale_inv",
        )
    )
