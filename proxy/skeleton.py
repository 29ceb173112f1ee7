"""transformers' own class of a checkpoint on the meta device, and what each tensor on disk is called in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from proxy.checkpoint import Checkpoint
from proxy.errors import BuildError, CheckpointError
from proxy.families import COMPARE, MOST_LAYERS, short

if TYPE_CHECKING:
    import torch

LoadErrors = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    ImportError,
    AttributeError,
    TypeError,
    ArithmeticError,
)
"""What transformers' code raises on a config or a tensor that it did not expect."""


_LAYERS = re.compile(r"(layers?|depth|blocks|num_labels)$")


class Skeleton:
    """A model without weights. Buffers that no file holds are real.

    Attributes:
        model: The model.
        meta: Its tensors by name, on the meta device.

    Args:
        checkpoint: The checkpoint; only its config is read.

    Raises:
        BuildError: transformers has no such model, or makes none of this config.
        CheckpointError: The config counts more layers than any model has.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        _check_counts(checkpoint.config)
        try:
            self.model = _model(checkpoint)
            self._mapping = get_model_conversion_mapping(self.model)
        except Exception as error:  # whatever a model class makes of other people's config
            raise cannot_load(checkpoint, error) from error
        self.meta: dict[str, torch.Tensor] = self.model.state_dict()
        self._names: dict[str, tuple[str, str | None]] = {}

    @cached_property
    def converters(self) -> dict[str, Any]:
        """Conversions of transformers that change values, by each pattern of names that they take."""
        from transformers.core_model_loading import WeightConverter

        return {
            pattern: entry
            for entry in self._mapping
            if isinstance(entry, WeightConverter)
            for pattern in entry.source_patterns
        }

    def renamed(self, name: str) -> tuple[str, str | None]:
        """Return the (first) name in the model of a tensor on disk, and the pattern that changes its values, if any."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        if name not in self._names:
            renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
            converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
            prefix = self.model.base_model_prefix
            target, pattern = rename_source_key(name, renamings, converters, prefix, self.meta)
            if target not in self.meta and name in self.meta:
                target, pattern = rename_source_key(name, [], [], prefix, self.meta)
            self._names[name] = target, pattern
        return self._names[name]


def _check_counts(config: Mapping[str, Any], where: str = "") -> None:
    """Refuse numbers of layers that a model class would build for ever, in any section.

    Raises:
        CheckpointError: There is one.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, f"{where}{key}.")
        elif isinstance(value, int) and value > MOST_LAYERS and _LAYERS.search(key):
            raise CheckpointError(f"config: {where}{key} is {short(value)}, more than any model has", COMPARE)


def _model(checkpoint: Checkpoint) -> Any:
    """Return the model on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    same = _same(checkpoint)
    if same:
        config = AutoConfig.for_model(same).from_dict({**checkpoint.config, "model_type": same})
    else:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    for section in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if section is None:
            continue
        # The name of a repository there would be fetched and run.
        section._attn_implementation_internal = None
        if hasattr(section, "quantization_config"):
            del section.quantization_config
    known: Any = AutoModelForCausalLM._model_mapping
    loader: Any = AutoModelForCausalLM if type(config) in known else AutoModelForImageTextToText
    with torch.device("meta"):
        model = loader.from_config(config, dtype=torch.float32, experts_implementation="eager")
    for name, buffer in model.named_non_persistent_buffers():
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    return model.eval()


def _same(checkpoint: Checkpoint) -> str:
    """Return the `model_type` that transformers has for a model it doesn't know by name (Kimi-K2 is a DeepSeek-V3)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from proxy.family_table import FAMILIES

    name = checkpoint.config.get("model_type")
    if name in CONFIG_MAPPING:
        return ""
    twins = (family.model_type for family in FAMILIES if name in family.also)
    return next((twin for twin in twins if twin in CONFIG_MAPPING), "")


def cannot_load(checkpoint: Checkpoint, error: BaseException) -> BuildError:
    """Return a library's error as one line of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return BuildError(
        f"transformers cannot load {checkpoint.folder}: {' '.join(lines[:2])}",
        "compare its config.json with that of the model's source; --strategy first_k and random do without",
    )
