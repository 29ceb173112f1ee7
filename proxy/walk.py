"""One pass of a streamed model over tokens: layer by layer, and inside a layer expert by expert.

A layer runs twice over its batches: once up to its experts, where the router's input, the experts it chose and
the weights the model applies are seen (after selection bias and groups, so this is the true routing in every
family), and once more with the experts' results at hand. The experts are visited in the order of the files, so
each tensor is read once, and only hidden states are kept in between. Models whose layers hand each other more
than hidden states, or whose experts can't be called one at a time, go through the plain forward instead, batch
by batch.

Shape suffixes: R rows of equal length, S tokens of a row, T tokens, H hidden size, K top-k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.checkpoint import Checkpoint
from proxy.errors import UNCALIBRATED, BuildError, CannotPredict, ProxyError
from proxy.families import Layout, hidden_size
from proxy.hidden import HiddenStates, Saved, Tallies
from proxy.memory import give_back_large_blocks, peak_memory
from proxy.rows import Rows, batch_tokens, batches
from proxy.selection import Selection
from proxy.skeleton import LoadErrors
from proxy.stream import Streamed
from proxy.tally import Tally

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]

WIDE = 512
"""Hidden size from which on weights are large enough for the allocator to matter."""
EXPERT_VALUES = 1 << 21
"""Hidden values that an expert computes at a time."""


@dataclass
class _Batch:
    """Rows that run together.

    Attributes:
        half: Which half of the rows they belong to.
        ids_RS: Their tokens.
        first: Place of the first token among all.
        calls: What each layer is called with beside hidden states.
    """

    half: int
    ids_RS: torch.Tensor
    first: int
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def span(self) -> slice:
        """Places of the batch's tokens."""
        return slice(self.first, self.first + self.ids_RS.numel())


class _Odd(Exception):
    """The model's layers hand each other more than hidden states."""


class _Enough(Exception):
    """The forward has shown what was wanted of it."""


class Pass:
    """One pass of a streamed checkpoint over calibration rows.

    Attributes:
        pairs: Pairs of a token and an expert that were computed.
        plain: Whether the plain forward had to be used.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: Layout,
        rows: Rows,
        progress: Progress | None = None,
        state: Path | None = None,
        outputs: bool = False,
    ) -> None:
        import torch

        self.model = Streamed(checkpoint, layout)
        self.layout = layout
        self.progress = progress
        self.saved = Saved(state) if state else None
        self.outputs = outputs
        self.pairs = 0
        self.plain = False
        self._last = max(layout.moe_layers)
        self._as_tuple = False
        width = hidden_size(checkpoint.config)
        if width >= WIDE:
            give_back_large_blocks()
        self._at_once = max(1, EXPERT_VALUES // max(width, 1))
        self.batches: list[_Batch] = []
        first = 0
        for half in (0, 1):
            for ids_RS in batches(rows[half::2], batch_tokens(width)):
                self.batches.append(_Batch(half, torch.tensor(ids_RS), first, []))
                first += self.batches[-1].ids_RS.numel()
            if half == 0:
                self._middle = first
        self.tokens = first
        self.tallies = Tallies(self.saved)
        self._began = time.monotonic()
        self._before = 0

    def run(self) -> Tallies:
        """Return the sums of both halves of the rows, by layer."""
        import torch

        used = {int(token) for batch in self.batches for token in batch.ids_RS.unique()}
        with torch.inference_mode(), self.model.ends(used):
            hidden = self._record() if self.model.single else None
            if hidden is None:
                self.plain = True
                self._plainly()
            else:
                self._by_layer(hidden)
        seen = set(self.tallies)
        for layer in self.layout.moe_layers:
            if layer not in seen:
                raise BuildError(
                    f"layer {layer}: the experts were never called, so their routing cannot be seen",
                    UNCALIBRATED,
                )
        return self.tallies

    def predict(self, picked: Mapping[int, Selection] | None) -> list[int]:
        """Return the most likely next token after every token, of the model or of what a selection leaves of it.

        Tokens are in the order of the pass: even rows, then odd ones, each by length.

        Args:
            picked: Experts that may be chosen, by layer; None for all.

        Raises:
            CannotPredict: The layers hand each other more than hidden states, or there is no plain head.
        """
        import torch

        self.outputs, self._last = True, len(self.model.layers) - 1
        used = {int(token) for batch in self.batches for token in batch.ids_RS.unique()}
        mask = self.model.masked(picked) if picked is not None else nullcontext()
        with torch.inference_mode(), self.model.ends(used), mask:
            start = self._record()
            if start is None:
                raise CannotPredict(
                    "this family's layers hand each other more than hidden states, so its predictions cannot be "
                    "streamed"
                )
            final = self._by_layer(start)
            tokens: list[int] = []
            for batch in self.batches:
                states = final.values[batch.span].reshape(*batch.ids_RS.shape, *final.shape)

                def handed(*_: Any, states: Any = states, **__: Any) -> Any:
                    return (states,) if self._as_tuple else states

                with _replaced([(module, handed) for module in self.model.layers]):
                    result = self.model.text(input_ids=batch.ids_RS, use_cache=False).last_hidden_state
                tokens += self.model.next_tokens(result.reshape(batch.ids_RS.numel(), -1))
        return tokens

    def _record(self) -> HiddenStates | None:
        """Run the model without its layers; keep what each is called with, and return the first hidden states.

        None where the layers hand each other more than hidden states.
        """
        for as_tuple in (False, True):
            try:
                self._as_tuple = as_tuple
                return self._record_as(as_tuple)
            except (ProxyError, OSError):
                raise
            except (_Odd, IndexError, *LoadErrors):
                continue
        return None

    def _record_as(self, as_tuple: bool) -> HiddenStates:
        """Do so for models whose layers return a tensor, or a tuple that begins with it."""
        hidden: HiddenStates | None = None
        last = self._last
        for batch in self.batches:
            batch.calls.clear()
            handed: list[Any] = []

            def layer(
                number: int, args: tuple[Any, ...], kwargs: dict[str, Any], batch: _Batch, handed: Any
            ) -> Any:
                nonlocal hidden
                states, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
                if handed and (states is not handed[-1] or number != len(batch.calls)):
                    raise _Odd
                if not handed:
                    states_T = states.reshape(batch.ids_RS.numel(), *states.shape[2:])
                    hidden = hidden or HiddenStates(self.tokens, states_T.shape[1:], self._file("start"))
                    hidden.values[batch.span] = states_T
                batch.calls.append((rest, {k: v for k, v in kwargs.items() if k != "hidden_states"}))
                if number == last:
                    raise _Enough
                handed.append(states.view_as(states))
                return (handed[-1],) if as_tuple else handed[-1]

            def stub(number: int, batch: _Batch = batch, handed: Any = handed) -> Callable[..., Any]:
                return lambda *args, **kwargs: layer(number, args, kwargs, batch, handed)

            with _replaced([(module, stub(i)) for i, module in enumerate(self.model.layers)]):
                try:
                    self.model.text(input_ids=batch.ids_RS, use_cache=False)
                except _Enough:
                    continue
                raise _Odd
        assert hidden is not None
        return hidden

    def _file(self, name: str) -> Path | None:
        """Return the place of hidden states that are kept on disk."""
        return self.saved.folder / f"{name}.bin" if self.saved else None

    def _by_layer(self, hidden: HiddenStates) -> HiddenStates:
        """Go through the layers once, each over all tokens; return what the last one hands on."""
        last = self._last
        start = 0
        if self.saved:
            start, states = self.saved.load(self.tokens, hidden.shape)
            hidden = states or hidden
            self.saved.forget(start)
            if start and self.progress:
                self.progress(
                    f"going on with a calibration that was interrupted after layer {start} of {last + 1}"
                )
        for number in range(start, last + 1):
            after = hidden.like(self._file(f"hidden-{number % 2}"))
            with self.model.layer(number) as module:
                if number not in self.layout.moe_layers:
                    for batch in self.batches:
                        after.values[batch.span] = self._forward(module, number, batch, hidden)
                else:
                    self._moe_layer(module, number, hidden, after, finish=number < last or self.outputs)
            hidden.close()
            hidden = after
            if self.saved:
                self.saved.save(number, self.tallies.held.get(number), hidden)
                self.tallies.let_go(number)
            self._tell(number, last)
        return hidden

    def _moe_layer(
        self, module: Any, number: int, hidden: HiddenStates, after: HiddenStates, finish: bool
    ) -> None:
        """Route all tokens, compute the chosen experts, and run the layer with their results."""
        import torch

        given: HiddenStates | None = None
        routes: list[tuple[Any, Any]] = []

        def seen(batch: _Batch, hidden_TH: Any, index_TK: Any, weights_TK: Any) -> None:
            nonlocal given
            self._count(number, batch.half, hidden_TH, index_TK, weights_TK)
            if finish:
                given = given or HiddenStates(self.tokens, hidden_TH.shape[1:], self._file("routed"))
                given.values[batch.span] = hidden_TH
                routes.append((index_TK.to(torch.int32), weights_TK.float()))
            raise _Enough

        experts = self.model.experts(number)
        for batch in self.batches:
            with _replaced([(experts, _Seen(seen, batch))]):
                try:
                    self._forward(module, number, batch, hidden)
                except _Enough:
                    continue
                raise BuildError(f"layer {number}: the experts were never called", UNCALIBRATED)
        if not finish or given is None:
            return
        # Where they fit, the experts' results are kept in the place of what the layer makes of them.
        result = after if after.shape == given.shape else given.like(self._file("result"))
        self._compute(number, given, routes, result)
        for batch in self.batches:
            part = result.values[batch.span]
            with _replaced([(experts, lambda *args, part=part, **kw: part.reshape(_first(args, kw).shape))]):
                after.values[batch.span] = self._forward(module, number, batch, hidden)
        given.close()
        if result is not after:
            result.close()

    def _compute(
        self,
        number: int,
        given: HiddenStates,
        routes: list[tuple[Any, Any]],
        result: HiddenStates,
        first: int = 0,
    ) -> None:
        """Visit the experts in the order of their bytes, each with the tokens that chose it."""
        import torch

        index_TK = torch.cat([index for index, _ in routes])
        weights_TK = torch.cat([weights for _, weights in routes])
        result.values.zero_()
        for expert in self.model.expert_order(number):
            rows, slots = torch.where(index_TK == expert)
            if not len(rows):
                continue
            self.model.load_expert(number, expert)
            for some, at in zip(rows.split(self._at_once), slots.split(self._at_once), strict=True):
                out = self.model.compute(number, given.values[some], weights_TK[some, at])
                result.values.index_add_(0, some, out)
                self._weigh(number, expert, first + some, out)
            self.pairs += len(rows)
        self.model.drop_expert(number)
        idle, slots = torch.where(
            index_TK >= self.layout.experts
        )  # experts that hand their token on as it is
        if len(idle):
            result.values.index_add_(0, idle, given.values[idle] * weights_TK[idle, slots][:, None])

    def _weigh(self, layer: int, expert: int, places: Any, out_TH: Any) -> None:
        """Add the sizes of an expert's weighted outputs to the halves that its tokens belong to."""
        size_T = out_TH.double().norm(dim=1)
        late_T = places >= self._middle
        for half, chosen_T in enumerate((~late_T, late_T)):
            self.tallies.held[layer][half].saliency_E[expert] += size_T[chosen_T].sum()

    def _plainly(self) -> None:
        """Run the plain forward batch by batch, giving each layer its weights while it runs."""
        last = max(self.layout.moe_layers)
        for number, batch in enumerate(self.batches):

            def around(layer: int, module: Any, batch: _Batch = batch) -> Callable[..., Any]:
                def forward(*args: Any, **kwargs: Any) -> Any:
                    with self.model.layer(layer, whole=not self.model.single):
                        if layer not in self.layout.moe_layers:
                            return type(module).forward(module, *args, **kwargs)
                        with self._watched(layer, batch):
                            result = type(module).forward(module, *args, **kwargs)
                        if layer == last:
                            raise _Enough
                        return result

                return forward

            with _replaced([(module, around(i, module)) for i, module in enumerate(self.model.layers)]):
                try:
                    self.model.text(input_ids=batch.ids_RS, use_cache=False)
                except _Enough:
                    pass
                except LoadErrors as error:
                    if isinstance(error, BuildError):
                        raise
                    raise BuildError(
                        f"transformers' forward fails: {' '.join(str(error).split())[:200]}", UNCALIBRATED
                    ) from error
            self._tell(number, len(self.batches) - 1, "batch")

    @contextmanager
    def _watched(self, layer: int, batch: _Batch) -> Iterator[None]:
        """Count the routing of one layer while it runs, and compute its experts one by one."""
        import torch

        if self.model.single:

            def experts(*args: Any, **kwargs: Any) -> Any:
                hidden_TH, index_TK, weights_TK = _arguments(args, kwargs)
                self._count(layer, batch.half, hidden_TH, index_TK, weights_TK)
                given = HiddenStates.of(hidden_TH.float())
                result = given.like(None)
                self._compute(layer, given, [(index_TK, weights_TK.float())], result, batch.first)
                return result.values.reshape(_first(args, kwargs).shape)

            with _replaced([(self.model.experts(layer), experts)]):
                yield
            return

        def routed(_: Any, args: tuple[Any, ...], output: Any) -> None:
            scores_TE = output[0].reshape(-1, self.layout.experts).float()
            weights_TK, index_TK = scores_TE.topk(self.layout.top_k)
            self._count(layer, batch.half, args[0].reshape(len(scores_TE), -1), index_TK, weights_TK)
            self.pairs += torch.numel(index_TK)

        handle = self.model.router(layer).register_forward_hook(routed)
        try:
            yield
        finally:
            handle.remove()

    def _forward(self, module: Any, number: int, batch: _Batch, hidden: HiddenStates) -> Any:
        """Run one layer over a batch; return its hidden states, one row a token."""
        args, kwargs = batch.calls[number]
        states = hidden.values[batch.span].reshape(*batch.ids_RS.shape, *hidden.shape)
        try:
            result = type(module).forward(module, states, *args, **kwargs)
        except LoadErrors as error:
            if isinstance(error, BuildError):
                raise
            raise BuildError(
                f"layer {number}: transformers' forward fails: {' '.join(str(error).split())[:200]}",
                UNCALIBRATED,
            ) from error
        result = result[0] if isinstance(result, tuple) else result
        return result.reshape(batch.ids_RS.numel(), *hidden.shape)

    def _count(self, layer: int, half: int, hidden_TH: Any, index_TK: Any, weights_TK: Any) -> None:
        """Add a batch's routing to the sums."""
        held = self.tallies.held
        if layer not in held:
            held[layer] = [Tally.empty(self.layout.experts, hidden_TH.shape[1]) for _ in (0, 1)]
        if not held[layer][half].count(hidden_TH, index_TK, weights_TK):
            raise BuildError(
                f"layer {layer}: the router's input holds NaN or infinity on calibration tokens",
                "use a checkpoint from before the divergence",
            )

    def _tell(self, number: int, last: int, what: str = "layer") -> None:
        """Say how far the pass is, how long it will take and what memory it took at most."""
        if not self.progress or last == 0:
            return
        seconds = (time.monotonic() - self._began) / (number + 1 - self._before) * (last - number)
        self.progress(
            f"calibration: {what} {number + 1} of {last + 1}, {self.model.read_bytes / 1e9:.2f} GB read, "
            f"about {seconds:.0f} s left, peak memory {peak_memory() / 1e9:.2f} GB"
        )


class _Seen:
    """An experts' forward that hands its arguments on."""

    def __init__(self, seen: Callable[..., None], batch: _Batch) -> None:
        self.seen, self.batch = seen, batch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.seen(self.batch, *_arguments(args, kwargs))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among an experts module's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return an experts module's arguments, one row a token."""
    given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
    hidden, index, weights = (given[name] for name in ("hidden_states", "top_k_index", "top_k_weights"))
    index_TK = index.reshape(-1, index.shape[-1])
    return hidden.reshape(-1, hidden.shape[-1]), index_TK, weights.reshape(index_TK.shape)


@contextmanager
def _replaced(forwards: list[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules another forward for a while."""
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            del module.forward
