"""Forward passes of verl's training engine: the model as a `Policy`, and what its routers did.

Legend of shape suffixes: ``_B`` responses, ``_L`` positions, ``_T`` tokens (= B·L), ``_K`` experts a token, ``_E``
experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from proxy.embedded import task
from proxy.engines import local
from proxy.engines.injector import route_agreement
from proxy.engines.metrics import flips
from proxy.engines.policy import Policy, Routes
from proxy.engines.rollout import encode_prompts
from proxy.engines.verl_plugin.state import Process, process
from taxonomy.stages import Stage, StageContext

_LAYER = re.compile(r"(?:layers|h|blocks)\.(?:_fsdp_wrapped_module\.)?(\d+)\.")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NAME = "_rl_diagnose_policy"


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer of the job's checkpoint."""
    return Tokenizer.from_file(str(Path(process().job["rollout"]["checkpoint"]) / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """Return the ids of a text, nothing added."""
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def policy_of(engine: Any) -> Policy | None:
    """Return an engine's model as a policy, whose hook sees its routes; None where it has no experts."""
    if not hasattr(engine, _NAME):
        setattr(engine, _NAME, _made(engine.module))
    found: Policy | None = getattr(engine, _NAME)
    return found


def _made(module: Any) -> Policy | None:
    """Return a module as a policy; None where it has no experts, or is not laid out as Hugging Face models are."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "named_modules"):
        return None
    names = [name for name, _ in module.named_modules() if name.endswith(".experts")]
    layers = [found for name in names if (found := _LAYER.search(name))]
    known = {key: getattr(config, key, None) for key in ("eos_token_id", "num_experts_per_tok", *_COUNTS)}
    experts = next((known[key] for key in _COUNTS if known[key]), None)
    if not names or len(layers) != len(names) or not experts or not known["num_experts_per_tok"]:
        return None
    eos = known["eos_token_id"]
    eos = int((eos[0] if isinstance(eos, list) else eos) or 0)
    pad = getattr(config, "pad_token_id", None)
    has_words = (Path(process().job["rollout"]["checkpoint"]) / "tokenizer.json").is_file()
    return Policy(
        module,
        tokenizer() if has_words else None,  # type: ignore[arg-type]  # nobody asks for it then
        eos,
        eos if pad is None else pad,
        tuple(int(found[1]) for found in layers),
        int(experts),
        int(known["num_experts_per_tok"]),
    )


class RoutingTally:
    """Sums of one step from which the routing metrics are made, so that it may come in several micro batches."""

    def __init__(self, layers: Sequence[int], num_experts: int) -> None:
        self.layers = layers
        self.load_LE = torch.zeros(len(layers), num_experts, dtype=torch.float64)
        self.agreement = [0.0] * len(layers)
        self.tokens = 0

    def add(self, trainer: Sequence[Routes], rollout_LTK: Tensor, live_T: Tensor) -> None:
        """Count the routes of a micro batch.

        Args:
            trainer: (expert ids_TK, weights_TK) by layer.
            rollout_LTK: The rollout's expert ids for the same tokens, −1 for an expert that was left out.
            live_T: True for tokens that both sides have fed to their model.
        """
        count = int(live_T.sum())
        self.tokens += count
        for place, (ids_TK, weights_TK) in enumerate(trainer):
            own = (ids_TK[live_T], weights_TK[live_T])
            other_TK = rollout_LTK[place][live_T].to(ids_TK)
            self.agreement[place] += count * route_agreement(own, (other_TK, (other_TK >= 0).float()))
            load_E = torch.bincount(own[0].flatten(), minlength=self.load_LE.shape[1])
            self.load_LE[place] += load_E.double().cpu()

    def metrics(self) -> dict[str, float]:
        """Return agreement, load entropy and largest load, by layer and as means, as the local engine names them."""
        share_LE = self.load_LE / self.load_LE.sum(-1, keepdim=True).clamp(min=1)
        found = {
            "agreement": [total / max(1, self.tokens) for total in self.agreement],
            "load_entropy": torch.special.entr(share_LE).sum(-1).tolist(),
            "load_max": (share_LE.max(-1).values * share_LE.shape[1]).tolist(),
        }
        metrics = {}
        for name, values in found.items():
            metrics[f"routing/{name}/mean"] = sum(values) / len(values)
            for layer, value in zip(self.layers, values, strict=True):
                metrics[f"routing/{name}/layer_{layer}"] = float(value)
        return metrics


def rollout_routes(micro_batch: Any, length: int) -> tuple[Tensor, Tensor] | None:
    """Return (the rollout's expert ids_LTK, mask_T of the tokens that the rollout fed), None where it reports none.

    Args:
        micro_batch: verl's micro batch; `routed_experts` is nested, one (tokens, layers, K) a response.
        length: Padded positions of a response.
    """
    nested = micro_batch.get("routed_experts", None)
    if nested is None:
        return None
    lengths = nested.offsets().diff().tolist()
    rows = nested.values().long().split(lengths)
    layers, top_k = rows[0].shape[1:]
    ids_BLMK = torch.zeros(len(rows), length, layers, top_k, dtype=torch.long)
    fed_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (ids, count) in enumerate(zip(rows, lengths, strict=True)):
        ids_BLMK[row, :count] = ids
        ids_BLMK[row, count - 1 :] = ids_BLMK[row, max(0, count - 2)]  # the last token is never fed
        fed_BL[row, : count - 1] = True
    return ids_BLMK.flatten(0, 1).transpose(0, 1), fed_BL.flatten()


class Probe:
    """Routes of fixed prompts from one step to the next."""

    def __init__(self, policy: Policy) -> None:
        device = next(policy.model.parameters()).device
        prompts = list(task.prompts("calibration")[: local.PROBE_PROMPTS])
        self._policy = policy
        self._asked = encode_prompts(policy, prompts, device)
        self._routes = local.prompt_routes(policy, *self._asked)

    def flips(self) -> dict[str, float]:
        """Return the share of expert choices that changed since the last call."""
        before, self._routes = self._routes, local.prompt_routes(self._policy, *self._asked)
        return flips(before, self._routes, self._policy.layers, self._asked[1].flatten() == 1)


def probe_of(engine: Any, policy: Policy | None) -> Probe | None:
    """Return a probe where one may be asked between the steps.

    That is on a CPU alone: elsewhere parameters may be offloaded, and ranks may share a sequence.
    """
    if policy is None or policy.tokenizer is None or process().job["platform"] != "cpu":
        return None
    return None if engine.is_param_offload_enabled else Probe(policy)


def own(tensor: Tensor) -> Tensor:
    """Return the part of a possibly sharded tensor that lies in this process; it shares its memory."""
    local_part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local_part


@contextmanager
def seen_weights(engine: Any, state: Process, context: StageContext) -> Iterator[None]:
    """Let the passes inside see what a fault makes of the weights (``weights/<name>``), backward passes too.

    The shards are changed in place, since that is where FSDP gathers them from, and put back afterwards.
    """
    kept = []
    if state.injector.acts(Stage.FORWARD, state.step):
        for name, parameter in engine.module.named_parameters():
            shard = own(parameter.data)
            changed = state.injector.transform(Stage.FORWARD, f"weights/{name}", shard, context)
            if changed is not shard:
                kept.append((shard, shard.clone()))
                shard.copy_(changed)
    try:
        yield
    finally:
        for shard, value in kept:
            shard.copy_(value)
