"""What can be known before the long part of a build is said before it: calibration of a large model takes hours."""

from __future__ import annotations

from proxy.checkpoint import PLAIN_FLOATS, Checkpoint, check_finite, read_chunks, read_object
from proxy.complete import check_complete
from proxy.errors import UNCALIBRATED, BuildError
from proxy.families import Layout, Role
from proxy.quantisation_config import BESIDE, check_names
from proxy.skeleton import Skeleton
from proxy.specs import BuildSpec
from proxy.strategies import Strategy


def check_possible(chosen: Strategy, checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse what this strategy cannot do with this checkpoint, before any work is done.

    Raises:
        BuildError: It averages experts that are quantised, or needs the outputs of experts that only run together.
        CheckpointError: The quantisation config singles out experts in a way that cannot be renumbered.
    """
    beside = checkpoint.folder / BESIDE
    check_names(checkpoint.config, layout, read_object(beside) if beside.is_file() else None)
    experts = (name for name, part in layout.parts.items() if part.role in (Role.EXPERT, Role.FUSED))
    packed = next((name for name in experts if checkpoint.tensors[name].dtype not in PLAIN_FLOATS), None)
    if chosen.merges and packed:
        raise BuildError(
            f"strategy {chosen.name} averages experts, and tensor {packed!r} is {checkpoint.tensors[packed].dtype}",
            "use multi_view, frequency, reap, random or first_k, or a BF16 copy of the checkpoint",
        )
    if chosen.outputs and layout.family.tap != "experts":
        raise BuildError(
            f"strategy {chosen.name} needs the outputs of single experts, and those of {layout.family.model_type} "
            "only run all together",
            "use multi_view or frequency",
        )


def ignored(chosen: Strategy, spec: BuildSpec) -> list[str]:
    """Return which options of a build say nothing to its strategy."""
    found = []
    if not chosen.views and spec.alpha != BuildSpec.alpha:
        found.append(f"strategy {chosen.name} has no views, so --alpha changes nothing")
    if not chosen.calibrated and spec.calibration != BuildSpec.calibration:
        found.append(f"strategy {chosen.name} needs no calibration, so {spec.calibration} is not read")
    return found


def check_whole(checkpoint: Checkpoint, layout: Layout, needed: bool) -> tuple[str, ...]:
    """Refuse a checkpoint that lacks tensors of its model, as far as transformers knows the model.

    Args:
        checkpoint: The checkpoint.
        layout: Its layout.
        needed: Whether transformers has to know it, because it computes with it.

    Returns:
        Plain sentences on what could not be checked.

    Raises:
        CheckpointError: Something is missing.
        BuildError: transformers doesn't know the model, and that is needed.
    """
    try:
        skeleton = Skeleton(checkpoint)
    except BuildError as error:
        if needed:
            raise
        return (f"{error}: whether every tensor of the model is there was not checked",)
    homeless = check_complete(checkpoint, layout, skeleton)
    if homeless and needed:
        raise BuildError(
            f"transformers keeps the experts of a {layout.family.model_type} in another way than this checkpoint: "
            f"it has no place for {homeless!r}",
            UNCALIBRATED,
        )
    return (f"transformers has no place for {homeless!r}: the experts were not checked",) if homeless else ()


def check_ends(checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse NaN in what calibration doesn't read: it takes hours, and the copy would find it afterwards.

    Raises:
        CheckpointError: There is one in the embeddings, the head, or from the last calibrated layer on.
    """
    last = layout.moe_layers[-1]
    for name, part in layout.parts.items():
        if part.role is Role.DROP or 0 <= part.layer < last:
            continue
        info = checkpoint.tensors[name]
        with checkpoint.open(info.file) as file:
            for chunk in read_chunks(file, info, None):
                check_finite(chunk, info)
