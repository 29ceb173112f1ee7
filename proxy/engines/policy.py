"""A Hugging Face causal MoE as a policy: loading, token log-probabilities, and a tap on its routes.

Legend of shape suffixes: ``_B`` responses, ``_L`` padded positions of a sequence (prompt then response), ``_R``
response positions, ``_V`` vocabulary, ``_T`` routed tokens (= B·L), ``_K`` experts a token, ``_E`` experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Routes = tuple[Tensor, Tensor]
"""(expert ids_TK, weights_TK) of one MoE layer for one forward pass."""
RouteHook = Callable[[int, Routes], Routes]


class NotAMoE(ValueError):
    """The checkpoint has no expert modules that routes could be read from."""


class BadCheckpoint(ValueError):
    """Tensors are missing or left over (config and weights do not belong together), or the tokenizer is."""


@dataclass
class Policy:
    """A loaded model and what the engine needs to know about it.

    Attributes:
        model: The Hugging Face module.
        tokenizer: Fast tokenizer of the checkpoint.
        eos: Token that ends a response.
        pad: Padding token.
        layers: Decoder-layer index of each MoE layer, in order.
        num_experts: Experts of a MoE layer (E).
        top_k: Experts a token (K).
        hook: Called for every MoE layer with (index in `layers`, routes); may replace the routes.
    """

    model: Any
    tokenizer: Tokenizer
    eos: int
    pad: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hook: RouteHook | None = field(default=None)

    def __post_init__(self) -> None:
        for position, module in enumerate(expert_modules(self.model)):
            module.register_forward_pre_hook(self._tap(position), with_kwargs=True)

    def _tap(self, position: int) -> Callable[..., Any]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.hook is None:
                return None
            hidden, index_TK, weights_TK = (*args, *kwargs.values())[:3]
            return (hidden, *self.hook(position, (index_TK, weights_TK))), {}

        return hook


def expert_modules(model: Any) -> list[Any]:
    """Return the `experts` submodules in layer order.

    Their inputs (hidden states, expert ids, weights) come after bias, groups and tables: the model's true routing.
    """
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Policy:
    """Load a checkpoint folder as a policy (safetensors only, no remote code).

    Raises:
        NotAMoE: No expert modules were found.
        BadCheckpoint: Weights are missing or left over, or there is no tokenizer.
    """
    if not (folder / "tokenizer.json").is_file():
        raise BadCheckpoint(f"{folder} has no tokenizer.json: complete the folder")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, info = loaded
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])})
    if wrong:
        raise BadCheckpoint(f"{folder}: config and weights disagree on {len(wrong)} tensors, e.g. {wrong[0]}")
    model.set_experts_implementation("grouped_mm")
    model.to(device).eval()
    found = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    if not found:
        raise NotAMoE(f"{folder} has no expert modules: the local engine runs Mixture-of-Experts models")
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    pad = config.pad_token_id if config.pad_token_id is not None else eos
    return Policy(
        model,
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        eos,
        pad,
        tuple(int(name.split(".")[-3]) for name in found),
        int(getattr(config, "num_local_experts", None) or config.num_experts),
        int(config.num_experts_per_tok),
    )


def positions_BL(mask_BL: Tensor) -> Tensor:
    """Return position ids under left padding: the first real token of a row is position 0."""
    return (mask_BL.cumsum(-1) - 1).clamp(min=0)


def token_log_probs(
    policy: Policy,
    tokens_BL: Tensor,
    mask_BL: Tensor,
    response: int,
    scale: float,
    tap: Callable[[Tensor], Tensor] = lambda logits_BRV: logits_BRV,
) -> tuple[Tensor, Tensor]:
    """Return (log-probability_BR of each response token, entropy_BR of its distribution), both in float32.

    Args:
        policy: The model.
        tokens_BL: Left-padded prompts followed by the responses.
        mask_BL: 1 for real tokens; finished rows may be 0 at their end.
        response: Number of response positions R; the last R columns of the tokens.
        scale: Factor on the logits, 1 / temperature.
        tap: May replace the logits_BRV (float32) before they are scaled.
    """
    logits_BRV = policy.model(
        input_ids=tokens_BL,
        attention_mask=mask_BL,
        position_ids=positions_BL(mask_BL),
        use_cache=False,
        logits_to_keep=response + 1,
    ).logits[:, :-1]
    log_probs_BRV = (tap(logits_BRV.float()) * scale).log_softmax(-1)
    chosen_BR = log_probs_BRV.gather(-1, tokens_BL[:, -response:, None]).squeeze(-1)
    entropy_BR = -(log_probs_BRV.exp() * log_probs_BRV).sum(-1)
    return chosen_BR, entropy_BR
