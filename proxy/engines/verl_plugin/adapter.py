"""A Hugging Face rollout on the CPU as a verl rollout backend: the same decoding as the local engine's.

Three parts, as verl wants them: the `Server` (a Ray actor that holds a second copy of the weights and decodes with a
KV cache), the `Replica` that starts it, and the `Adapter` that carries weights from a training worker to it.
Requests that arrive together are decoded as one batch. Each has a noise of its own, seeded by run, prompt and place in
the batch, so that a run can be repeated.

Legend of shape suffixes: ``_B`` requests of one batch, ``_P`` padded prompt positions, ``_R`` response positions.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from proxy.engines import local, policy, rollout
from proxy.engines.taps import RouteLog, Taps
from proxy.engines.verl_plugin.state import process, told
from proxy.engines.verl_plugin.table import ROLLOUT, SERVER, VALIDATION
from taxonomy.stages import Action, Stage

QUIET_S = 0.05
"""A batch is complete when a full step's requests are there, or when none came for so long."""
BUCKET_BYTES = 64 << 20
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass
class Request:
    """One prompt to be answered."""

    prompt: list[int]
    place: int
    params: dict[str, Any]
    answer: asyncio.Future[TokenOutput]


def copy_weight(target: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Copy a tensor under its checkpoint name into a state dict with packed experts."""
    found = _EXPERT.fullmatch(name)
    if found is None or name in target:
        target[name].copy_(tensor)
        return
    stem, expert, kind = found[1], int(found[2]), found[3]
    if kind == "down_proj":
        target[f"{stem}.down_proj"][expert].copy_(tensor)
        return
    packed = target[f"{stem}.gate_up_proj"][expert]
    half = packed.shape[0] // 2
    packed[:half].copy_(tensor) if kind == "gate_proj" else packed[half:].copy_(tensor)


class Server:
    """The rollout: a copy of the model that answers requests. Runs as a Ray actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        state = process()
        state.kind = SERVER
        job = state.job["rollout"]
        self._home = Path(job["checkpoint"])
        self._policy = policy.load(self._home, getattr(torch, job["dtype"]), torch.device("cpu"))
        self._prefix: policy.Policy | None = None  # the weights of a stale prefix cache
        self._shares: list[Tensor] = []
        self._waiting: list[Request] = []
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._worker: asyncio.Task[None] | None = None
        self._last_sync = 0
        state.report()

    def ready(self) -> bool:
        """Return True: the constructor has run."""
        return True

    @told
    def before_sync(self, step: int) -> None:
        """Keep the weights as they are, where the cache of the prompts is not flushed with the coming ones."""
        state = process()
        if state.injector.event(Stage.ROLLOUT, state.context(at=step)) is Action.DO:
            self._prefix = None
        elif self._prefix is None:
            self._prefix = local.copied(self._policy, self._home, torch.device("cpu"))

    @torch.no_grad()
    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        """Copy a bucket of weights, converted to this copy's precision."""
        target = self._policy.model.state_dict()
        for name, tensor in weights:
            copy_weight(target, name, tensor)

    @told
    def begin_step(self, step: int, synced: bool) -> None:
        """Note that a step begins; `synced` says whether new weights have come for it."""
        state = process()
        state.step = step
        self._seen.clear()
        if synced:
            self._last_sync = step
        if not self._shares:  # as healthy as it will ever be: before the first rollout
            self._shares = local.routing_shares(self._policy)
        lag = float(step - self._last_sync)
        state.metrics[step]["rollout/weight_lag"] = lag
        if state.injector.active(step):
            state.saw(weight_lag=lag)
        state.report()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Answer one prompt."""
        # With `rollout.full_determinism` verl's V0 trainer numbers a batch's requests; its V1 trainer calls them
        # all 0. Responses to one prompt are then numbered as they come: which of them is which doesn't matter.
        kind, _dash, index = request_id.partition("-")
        place = int(index) if kind == "det" and index.isdigit() else 0
        same = (place, *prompt_ids)
        request = Request(
            list(prompt_ids),
            place + self._seen[same],
            sampling_params,
            asyncio.get_running_loop().create_future(),
        )
        self._seen[same] += 1
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.answer

    async def _work(self) -> None:
        """Answer what is waiting, batch by batch."""
        full = process().recipe.prompts * process().recipe.group_size
        while self._waiting:
            count = -1
            while len(self._waiting) != count and len(self._waiting) < full:
                count = len(self._waiting)
                await asyncio.sleep(QUIET_S)
            batch, self._waiting = self._waiting, []
            batch.sort(key=lambda request: (request.place, request.prompt))
            try:
                answers = self._decode(batch)
            except Exception as error:
                for request in batch:
                    request.answer.set_exception(error)
                raise
            for request, answer in zip(batch, answers, strict=True):
                request.answer.set_result(answer)

    @told
    def _decode(self, batch: list[Request]) -> list[TokenOutput]:
        """Decode one batch; every request in it has the same sampling parameters."""
        state, model = process(), self._policy
        width = max(len(request.prompt) for request in batch)
        pads = [width - len(request.prompt) for request in batch]
        rows = list(zip(pads, batch, strict=True))
        tokens_BP = torch.tensor([[model.pad] * pad + request.prompt for pad, request in rows])
        mask_BP = torch.tensor([[0] * pad + [1] * len(request.prompt) for pad, request in rows])
        params = batch[0].params
        validation = params.get("top_k") == VALIDATION
        context = state.context(top_k=model.top_k, num_experts=model.num_experts)

        masks: list[Tensor] = []

        def tap(name: str, tensor: Tensor) -> Tensor:
            if name == "attention_mask":
                masks[:] = [tensor]
            changed: Tensor = state.injector.transform(Stage.ROLLOUT, name, tensor, context)
            return changed

        def live(tokens: int) -> Tensor:
            mask_BL = (
                masks[0] if masks else mask_BP[:, :-1]
            )  # none yet: older weights fill the prompts' cache
            return mask_BL[:, -(tokens // len(batch)) :].flatten()

        cap = int(params.get("max_tokens") or state.recipe.max_new_tokens)
        asked = (
            cap if validation else min(cap, state.injector.recipe(state.recipe, state.step).max_new_tokens)
        )
        log, taps = RouteLog(), Taps(state.injector, self._shares)
        if self._prefix is not None:
            state.saw(prefix_change=rollout.cache_distance(model, self._prefix, tokens_BP, mask_BP))
        with ExitStack() as stack:
            for one in (model, self._prefix):
                if one is not None:
                    stack.enter_context(
                        taps.over(one, Stage.ROLLOUT, context, log=log, batch=len(batch), live_T=live)
                    )
            found = rollout.generate(
                model,
                tokens_BP,
                mask_BP,
                max_new_tokens=asked,
                temperature=float(params["temperature"]),
                generator=[local.seeded("rollout", state.seed, r.place, *r.prompt) for r in batch],
                tap=tap,
                prefix=self._prefix,
            )
        response_BR = found.tokens_BL[:, width:]
        mask_BR = found.response_mask_BR.bool()
        if state.injector.active(state.step) and not validation:
            short_B = ~((response_BR == model.eos) & mask_BR).any(-1) & (mask_BR.sum(-1) < cap)
            state.saw(cut_short=float(short_B.float().mean()))
        state.report()
        # (B, L, layers, K): an expert with weight 0 was not used.
        routes_BLMK = torch.stack(
            [torch.where(weights != 0, ids, -1) for ids, weights in log.joined()], 2
        ).to(torch.int16)
        answers = []
        for row, (ids_R, log_probs_R, mask_R) in enumerate(
            zip(response_BR, found.log_probs_BR, mask_BR, strict=True)
        ):
            fed = slice(pads[row], width + int(mask_R.sum()) - 1)
            answers.append(
                TokenOutput(
                    token_ids=ids_R[mask_R].tolist(),
                    log_probs=log_probs_R[mask_R].tolist(),
                    routed_experts=routes_BLMK[row, fed].numpy(),
                    stop_reason="completed",
                    extra_fields={"global_steps": state.step - 1},
                )
            )
        return answers

    async def wake_up(self, *_a: Any, **_k: Any) -> None:
        """Do nothing: there is no memory to free and no request to abort on a CPU."""

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up
    abort_all_requests = resume_generation = start_profile = stop_profile = wake_up


def server_name(rank: int) -> str:
    """Return the Ray name under which an adapter finds its server."""
    return f"{ROLLOUT}_server_{rank}"


class Replica(RolloutReplica):  # type: ignore[misc]
    """Starts one server."""

    async def launch_servers(self) -> None:
        """Start the server and wait for it."""
        server = (
            ray.remote(Server)
            .options(name=server_name(self.replica_rank), max_concurrency=self.max_concurrency, num_cpus=1)
            .remote()
        )
        await server.ready.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


class Adapter(BaseRollout):  # type: ignore[misc]
    """Carries weights from the training worker that it lives in to the server."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server never gave anything up."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send the weights in buckets, then say that a step begins."""
        assert wire_format == "named_tensors", wire_format
        server = ray.get_actor(server_name(0))
        await server.before_sync.remote(process().step)
        bucket: list[tuple[str, Tensor]] = []
        size, sent = 0, False
        for name, tensor in weights:
            bucket.append((name, tensor.detach().cpu().clone()))
            size += bucket[-1][1].nbytes
            if size >= BUCKET_BYTES:
                await server.load_weights.remote(bucket)
                bucket, size, sent = [], 0, True
        if bucket:
            await server.load_weights.remote(bucket)
            sent = True
        await server.begin_step.remote(process().step, sent)
