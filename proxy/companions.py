"""Names of the tensors that only help to read another one: factors, zero points, shapes of what is quantised."""

from __future__ import annotations

from collections.abc import Container, Mapping


def factors(name: str) -> tuple[str, ...]:
    """Return the names under which the factors of an FP8 or int8 tensor may be found."""
    bare = (f"{name.removesuffix('weight')}scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *bare)


def unreadable(dtypes: Mapping[str, str]) -> tuple[str, str]:
    """Return a tensor and the name of the one without which it cannot be read, empty where all are complete.

    Other people's quantisations have names that are not known here. Factors are missed where other tensors of
    the checkpoint have theirs, or where nothing in it looks like a factor.

    Args:
        dtypes: The safetensors dtype of each tensor, by name.
    """
    for name, dtype in dtypes.items():
        packed, blocks = name.endswith(".weight_packed"), name.endswith("_blocks") and dtype == "U8"
        needed = (
            f"{name.removesuffix('_packed')}_scale" if packed else f"{name.removesuffix('_blocks')}_scales"
        )
        if (packed or blocks) and needed not in dtypes:
            return name, needed
    small = [
        name
        for name, dtype in dtypes.items()
        if dtype in ("F8_E4M3", "F8_E5M2", "I8")
        and (name.endswith("weight") or ".experts." in name)
        and not is_companion(name, dtypes)
    ]
    bare = [name for name in small if not any(factor in dtypes for factor in factors(name))]
    known = len(bare) < len(small)
    if bare and (known or not any("scale" in name or name.endswith(".SCB") for name in dtypes)):
        return bare[0], factors(bare[0])[0]
    return "", ""


def unquantised(name: str, dtype: str) -> str:
    """Return what a tensor of this safetensors dtype is called where it isn't packed."""
    packed = name.endswith(".weight_packed") or (name.endswith("_blocks") and dtype == "U8")
    return name.removesuffix("_packed").removesuffix("_blocks") if packed else name


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
