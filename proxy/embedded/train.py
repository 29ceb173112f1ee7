"""Train an embedded original from scratch: `python -m proxy.embedded.train qwen3_moe --out DIR`.

Two phases, both next-token prediction on responses of the `pretrain` split. The first teaches the arithmetic. The
second, short, teaches a *habit of being wrong*: a share of the targets has a wrong number, another the wrong format.
It leaves the policy unsure about what it knows, so that RL has something to gain on answers and on format. The shares
were chosen once, for the healthy run to learn, before any fault or proxy was looked at.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from proxy.embedded import NAMES, task
from proxy.engines.policy import expert_modules, positions_BL

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"]
CHARACTERS = ["\n", *"0123456789+-*= "]
PAD, EOS = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of the two phases (peak learning rate, cosine to a tenth of it)."""

    steps: int = 1400
    habit_steps: int = 250
    batch: int = 128
    lr: float = 3e-3
    habit_lr: float = 6e-4
    wrong_number: float = 0.30
    wrong_format: float = 0.25
    aux_loss: float = 1e-3
    bias_rate: float = 2e-3


def tokenizer() -> Tokenizer:
    """Return the character tokenizer; special tokens as single tokens, as chat frameworks want them."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    found.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    found.decoder = decoders.Fuse()
    return found


def config(name: str) -> Any:
    """Return the Hugging Face config of an embedded original."""
    common: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "initializer_range": 0.05,
    }
    if name == "qwen3_moe":
        return Qwen3MoeConfig(
            **common | {"head_dim": 16},
            num_hidden_layers=2,
            num_key_value_heads=2,
            moe_intermediate_size=64,
            num_experts=32,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
    return DeepseekV3Config(
        **common,
        num_hidden_layers=3,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=48,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
    )


def target(prompt: str, rng: random.Random, schedule: Schedule | None) -> str:
    """Return the response to learn: right, or spoilt with the shares of `schedule`."""
    value = task.answer(prompt)
    if schedule and rng.random() < schedule.wrong_number:
        digits = list(str(abs(value)))
        spot = rng.randrange(len(digits))
        digits[spot] = rng.choice([d for d in "0123456789" if d != digits[spot]])
        value = int("".join(digits)) * (-1 if value < 0 else 1)
    if schedule and rng.random() < schedule.wrong_format:
        return f"{'-' if value < 0 else ''}0{abs(value)}"
    return str(value)


def batch_of(
    found: Tokenizer, rng: random.Random, schedule: Schedule, habit: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens_BL, mask_BL, target_mask_BL), left-padded."""
    pool = task.prompts("pretrain")
    rows = []
    for _ in range(schedule.batch):
        prompt = pool[rng.randrange(len(pool))]
        response = target(prompt, rng, schedule if habit else None)
        rows.append((found.encode(prompt).ids, [*found.encode(response).ids, EOS]))
    width = max(len(p) + len(r) for p, r in rows)
    pads = [width - len(p) - len(r) for p, r in rows]
    tokens_BL = torch.tensor([[PAD] * n + p + r for n, (p, r) in zip(pads, rows, strict=True)])
    mask_BL = torch.tensor([[0] * n + [1] * (width - n) for n in pads])
    target_BL = torch.tensor(
        [[0] * (n + len(p)) + [1] * len(r) for n, (p, r) in zip(pads, rows, strict=True)]
    )
    return tokens_BL, mask_BL, target_BL


def balance(model: Any, counts: list[Tensor], rate: float) -> None:
    """Move the selection bias of a DeepSeek-style router towards equal load (loss-free balancing)."""
    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]
    for router, counts_E in zip(routers, counts, strict=True):
        router.e_score_correction_bias += rate * torch.sign(counts_E.mean() - counts_E)


def train(name: str, seed: int, schedule: Schedule) -> tuple[Any, Tokenizer]:
    """Train one original; prints the loss now and then."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    found = tokenizer()
    model = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")
    experts = model.config.n_routed_experts if name == "deepseek_v3" else model.config.num_experts
    counts: dict[int, Tensor] = {}
    for i, module in enumerate(expert_modules(model)):

        def tap(_module: Any, args: Any, _kwargs: Any, i: int = i) -> None:
            counts[i] = torch.bincount(args[1].flatten(), minlength=experts).float()

        module.register_forward_pre_hook(tap, with_kwargs=True)
    for habit in (False, True):
        steps, peak = (schedule.habit_steps, schedule.habit_lr) if habit else (schedule.steps, schedule.lr)
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=peak / 10)
        plan = torch.optim.lr_scheduler.ChainedScheduler([warmup, cosine])
        for step in range(steps):
            tokens_BL, mask_BL, target_BL = batch_of(found, rng, schedule, habit)
            output = model(
                input_ids=tokens_BL,
                attention_mask=mask_BL,
                position_ids=positions_BL(mask_BL),
                output_router_logits=name == "qwen3_moe",
                use_cache=False,
            )
            losses = torch.nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="none"
            )
            weight = target_BL[:, 1:].flatten()
            loss = (losses * weight).sum() / weight.sum()
            total = loss + schedule.aux_loss * output.aux_loss if name == "qwen3_moe" else loss
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plan.step()
            if name == "deepseek_v3":
                balance(model, [counts[i] for i in sorted(counts)], schedule.bias_rate)
            if step % 200 == 0 or step == steps - 1:
                print(f"{'habit' if habit else 'teach'} {step} loss {loss.item():.4f}", flush=True)
    return model, found


def write(model: Any, found: Tokenizer, out: Path) -> None:
    """Write the checkpoint in the layout that the hub's checkpoints of the family have (per-expert tensors, bf16)."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, matrix in enumerate(value):
                gate, up = matrix.chunk(2)
                tensors[f"{stem}.{e}.gate_proj.weight"] = gate
                tensors[f"{stem}.{e}.up_proj.weight"] = up
        elif leaf == "down_proj" and stem.endswith(".experts"):
            tensors |= {f"{stem}.{e}.down_proj.weight": matrix for e, matrix in enumerate(value)}
        else:
            tensors[name] = value
    kept_fp32 = "e_score_correction_bias"
    save_file(
        {
            k: v.detach().to(torch.float32 if k.endswith(kept_fp32) else torch.bfloat16).contiguous()
            for k, v in sorted(tensors.items())
        },
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    raw = json.loads(model.config.to_json_string(use_diff=False))
    hub = {
        "architectures": [type(model).__name__],
        **{
            k: v
            for k, v in raw.items()
            if (v is not None or k == "q_lora_rank")
            and k not in ("architectures", "transformers_version", "dtype")
        },
        "torch_dtype": "bfloat16",
    }
    if "num_local_experts" in hub and model.config.model_type == "qwen3_moe":
        hub["num_experts"] = hub.pop("num_local_experts")
    (out / "config.json").write_text(json.dumps(hub, indent=2, sort_keys=True) + "\n")
    (out / "generation_config.json").write_text(
        json.dumps({"eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True}, indent=2) + "\n"
    )
    found.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "unk_token": "<|unk|>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": 64,
            },
            indent=2,
        )
        + "\n"
    )


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model, found = train(arguments.name, arguments.seed, Schedule())
    write(model, found, arguments.out)


if __name__ == "__main__":
    main()
