"""A mixture of experts as the feed-forward of a layer: router, experts, and what every token goes through beside them.

Owns the parameters and the data flow. Does not own the choice and the products of experts (`kernels/moe`).
Invariant: where matrices of all experts lie in one tensor (`expert_banks`), one call multiplies by them; where a scheme
lays each out by itself, so does one call if they are alike and packed for the CPU kernels; else experts take turns,
each with all of its tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import torch

from quire.compute.dist.exchange import Exchange
from quire.compute.layers.expert_banks import Bank, bank_of
from quire.compute.layers.expert_copies import ExpertCopies
from quire.compute.layers.fused_rows import LayerRows
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm
from quire.compute.layers.residual import ResidualSum
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.packed import PackedProduct
from quire.compute.schemes.plain import PlainProduct
from quire.config.experts import ExpertsSpec, RoutingSpec, Scores
from quire.config.parameters import FfnParameters, Kept
from quire.kernels import gemm, moe
from quire.kernels.act import sigmoid
from quire.kernels.fused_step import FusedStep
from quire.kernels.qgemm.cpu import ADD, SILU_MUL, WIDEN

_CHOSEN_TYPES: Final = (torch.int32, torch.float32)
Around = Callable[[torch.Tensor], contextlib.AbstractContextManager[None]]
"""What is entered for the products of one expert, given the numbers of its rows."""


class Adapted(Protocol):
    """The products where adapters may be of experts. Arguments of both: those of `Experts.plain_products`."""

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As `Experts.plain_products`; None: no row of this step has an adapter."""
        ...

    def build(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Make what such a call needs, where that takes time."""
        ...

    def places(self, n_rows: int) -> torch.Tensor:
        """int32 [n_rows]: of the adapter of each row of this step, -1: none."""
        ...

    def received(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """The sums over the experts that are held, of rows of any rank's step, whose places came along."""
        ...


class HasFfn(Protocol):
    """A layer."""

    @property
    def ffn(self) -> object: ...


class Experts:
    """See `ExpertsSpec`."""

    def __init__(
        self,
        spec: ExpertsSpec,
        parameters: FfnParameters,
        make: Make,
        schemes: Schemes,
        post_norm: Norm | None,
        scale: float,
    ) -> None:
        self.spec = spec
        matrices = parameters.matrices

        def linear(place: str) -> Linear | None:
            return Linear(make, matrices[place], schemes.of(matrices[place])) if place in matrices else None

        router = linear("router")
        assert router is not None
        self.router = router
        self.shared_up, self.shared_down, self.shared_gate = map(linear, ("shared_up", "shared_down", "shared_gate"))
        self.up, self.down = (
            bank_of(make, [matrices[f"{place}.{expert}"] for expert in spec.held], schemes) for place in ("up", "down")
        )
        correction = parameters.tensors.get("correction")
        self.correction = None if correction is None else Table(make, correction)
        like = make(0)
        self.dtype = like.dtype
        self.load = torch.zeros(spec.n_experts, dtype=torch.int64, device=like.device)
        """Tokens that chose each expert, rows that fill a captured step up among them."""
        self.copies: ExpertCopies | None = None
        """Where experts may be in other slots than at first, some in several."""
        if spec.n_redundant is not None and spec.n_held:
            n_ranks, (block, _) = spec.n_slots // spec.n_held, spec.block
            self.copies = ExpertCopies(spec.n_experts, spec.n_slots, n_ranks, block, like.device)
        self.sum = ResidualSum(post_norm, scale)
        self.exchange: Exchange | None = None
        """Where rows go to experts of ranks that have other rows; to be set before there is a step."""
        self.adapted: Adapted | None = None
        """Where adapters may be of experts: asked first, in every step."""
        self.packed: moe.PackedExperts | None = None
        self.is_wide = self.router.matrix.kept is Kept.FLOAT32

    def take(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `Ffn`: what the router and the experts read [n, hidden]."""
        return x if norm is None else norm(x)

    def add(self, taken: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Ffn`."""
        if self.exchange is not None:
            y = self._exchanged(self.exchange, taken)
            return self.sum.add(taken, y if self.shared_up is None else self._add_shared(taken, y), x)
        if self.sum.adds:
            return self._run(taken, x)
        return self.sum.add(taken, self._run(taken, None), x)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """What experts make of the normed x, added to the residual, which is returned, if there is one."""
        if (shared := self._beside()) is not None:
            return moe.experts_with_shared(x, *self.choose(x), *shared, residual=residual)
        y = self._products(x, *self.choose(x), residual)
        return y if self.shared_up is None else self._add_shared(x, y)

    def _beside(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Matrices of experts, and of what every token goes through beside them, where one call may multiply by all:
        SwiGLU in floating numbers, all experts here, no gate, no bias, no adapters."""
        spec, up, down = self.spec, self.up.matrices, self.down.matrices
        if self.shared_gate is not None or spec.bias or spec.gating != moe.SWIGLU or spec.n_held or self.adapted:
            return None
        shared = [one.run for one in (self.shared_up, self.shared_down) if one is not None]
        if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor) or len(shared) < 2:
            return None
        first, second = shared
        if not isinstance(first, PlainProduct) or not isinstance(second, PlainProduct):
            return None
        return up, down, first.weight, second.weight

    def _exchanged(self, exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
        """What the experts of all ranks make of the rows of this one."""
        return self._sent(exchange, x, *self._routed(x))

    def _sent(
        self, exchange: Exchange, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        n_held, adapted = self.spec.n_held, self.adapted
        if adapted is None:
            return exchange.run(x, expert_ids, weights, n_held, self._products)
        return exchange.run(x, expert_ids, weights, n_held, adapted.received, adapted.places(len(x)))

    def join(self, x: torch.Tensor) -> None:
        """Of a step in which this rank has no rows, x [0, hidden]: compute those of others."""
        n_chosen = self.spec.routing.n_chosen
        expert_ids, weights = (torch.empty(0, n_chosen, dtype=dtype, device=x.device) for dtype in _CHOSEN_TYPES)
        if self.exchange is not None:
            self._sent(self.exchange, x, expert_ids, weights)

    def _products(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The sums over the experts of each row that are held, added to the residual if there is one."""
        y = None if self.adapted is None else self.adapted(x, expert_ids, weights, residual)
        return self.plain_products(x, expert_ids, weights, residual) if y is None else y

    def plain_products(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same of the model's own matrices: those of rows without adapters."""
        if (up := self.up.matrices) is not None and (down := self.down.matrices) is not None:
            return moe.experts(
                x, expert_ids, weights, up, down, gating=self.spec.gating,
                up_bias=self.up.bias, down_bias=self.down.bias, residual=residual,
            )  # fmt: skip
        if (matrices := self._all_packed()) is not None:
            return moe.packed_experts(x, expert_ids, weights, matrices, residual=residual)
        return self.in_turn(x, expert_ids, weights, residual)

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [n, hidden] → (its experts [n, k] int32, as numbers among the slots held, -1: not held; their weights
        [n, k] float32)."""
        expert_ids, weights = self._routed(x)
        return self._held(expert_ids) if self.spec.n_held else expert_ids, weights

    def _routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with numbers among all slots, which are experts where there are no copies."""
        expert_ids, weights = self._choice(x, self.load)
        return (expert_ids if self.copies is None else self.copies.of(expert_ids)), weights

    def _choice(self, x: torch.Tensor, load: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same before experts have copies. load: where it is counted."""
        correction = None if self.correction is None else self.correction.values
        routing, product, bias = self.spec.routing, self.router.run, self.router.bias
        if isinstance(product, PlainProduct):
            return moe.choose(x, product.weight, routing, correction, load, bias=bias)
        if self.is_wide:
            logits = self.router(x.float())
        else:
            logits = torch.empty(len(x), self.spec.n_experts, dtype=torch.float32, device=x.device)
            self.router(x, out=logits)
        return moe.route(logits, routing, correction, load)

    def _held(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """Numbers among the slots of this rank; -1 of those that others have."""
        own = expert_ids - self.spec.first
        return own.masked_fill_((own < 0) | (own >= self.spec.n_held), -1)

    @property
    def is_plain(self) -> bool:
        """See `Ffn`."""
        is_gated = self.shared_gate is not None
        is_whole = self.sum.adds and not self.spec.n_held  # the fused step does not take numbers among those held
        return is_whole and not self.is_wide and not is_gated and self._all_packed() is not None

    def record(self, fused: FusedStep, rows: LayerRows, norm: Norm) -> None:
        """See `Ffn`."""
        own, matrices, correction = rows.experts[self.spec], self._all_packed(), self.correction
        assert norm.pair is not None and matrices is not None
        fused.norm(rows.x, norm.pair, own.normed)
        self.router.record(fused, own.normed, own.logits, then=WIDEN)
        table = None if correction is None else correction.values
        fused.route(own.logits, self.spec.routing, table, self.load, own.expert_ids, own.weights)
        fused.experts(own.normed, own.expert_ids, own.weights, matrices, own.scratch, rows.x)
        if self.shared_up is not None and self.shared_down is not None:
            self.shared_up.record(fused, own.normed, own.shared, then=SILU_MUL)
            self.shared_down.record(fused, own.shared, rows.x, then=ADD)

    def _add_shared(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert self.shared_up is not None and self.shared_down is not None
        inner = self.shared_up(x, silu_mul=True)
        if self.shared_gate is not None:
            inner.mul_(sigmoid(self.shared_gate(x)))
        return self.shared_down(inner, residual=y)

    def _all_packed(self) -> moe.PackedExperts | None:
        """All experts for the CPU kernels, where they are packed alike and gated by SwiGLU."""
        if self.up.matrices is not None:
            return None
        first = self.up.linears[0].product
        if self.spec.gating != moe.SWIGLU or not isinstance(first, PackedProduct):
            return None
        if self.packed is None or self.packed.up[0] is not first.packed:  # the weights are new
            self.packed = _packed(self.up, self.down)
        return self.packed

    def in_turn(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None,
        around: Around = lambda _: contextlib.nullcontext(),
    ) -> torch.Tensor:  # fmt: skip
        """Each expert with all of its tokens, behind one another; a row's sum is in the order of its own choice."""
        n, k = expert_ids.shape
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        n_elsewhere, *ends = torch.bincount(flat + 1, minlength=1 + len(self.spec.held)).cumsum(0).tolist()
        rows = order // k
        x_sorted, each = x[rows], x.new_empty(n * k, x.shape[1])
        start = n_elsewhere
        each[:start] = 0
        for up, down, end in zip(self.up.linears, self.down.linears, ends, strict=True):
            if start < end:
                with around(rows[start:end]):
                    down(self._inner(up, x_sorted[start:end]), out=each[start:end])
            start = end
        placed = torch.empty_like(order)
        placed[order] = torch.arange(n * k, device=order.device)
        outputs = each[placed].view(n, k, -1).float()
        total = torch.zeros(x.shape, device=x.device) if residual is None else residual.float()
        for j in range(k):
            total.addcmul_(outputs[:, j], weights[:, j, None])
        return total.to(x.dtype) if residual is None else residual.copy_(total)

    def _inner(self, up: Linear, x: torch.Tensor) -> torch.Tensor:
        gating = self.spec.gating
        return up(x, silu_mul=True) if gating == moe.SWIGLU else moe.gate(up(x), gating)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Ffn`."""
        shared = (one for one in (self.shared_up, self.shared_down, self.shared_gate) if one is not None)
        both = zip(self.up.linears, self.down.linears, strict=True)
        return self.router, *(linear for pair in both for linear in pair), *shared

    @property
    def of_experts(self) -> list[Linear]:
        """Those of the experts that are here."""
        return [*self.up.linears, *self.down.linears]

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """See `Ffn`: what every token goes through; of experts see `adapted`."""
        return () if self.shared_up is None or self.shared_down is None else (self.shared_up, self.shared_down)

    @property
    def tables(self) -> tuple[Table, ...]:
        """See `Ffn`."""
        return () if self.correction is None else (self.correction,)

    def slot_tensors(self) -> list[list[torch.Tensor]]:
        """Of each slot of this rank all that is stored of its expert."""
        return [self.up.of_slot(slot) + self.down.of_slot(slot) for slot in range(len(self.spec.held))]

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Ffn`."""
        for linear in self.linears:
            yield from linear.tensors()
        for bank in (self.up, self.down):
            yield from bank.tensors()

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Ffn`; the norm is never taken in, and products in float32 need nothing built."""
        found = [] if self.is_wide else [self.router.kernel(wide=True)]
        if self.shared_up is not None and self.shared_down is not None:
            found += [self.shared_up.kernel(silu_mul=True), self.shared_down.kernel(residual=True)]
        return found + ([] if self.shared_gate is None else [self.shared_gate.kernel()])

    def build(self, max_rows: int) -> None:
        """See `Ffn`: the products once for each of `moe.build_rows`, of rows of zeros."""
        up, down = self.up.matrices, self.down.matrices
        if up is None or down is None or up.device.type != "cuda":
            return
        spec, n_chosen = self.spec, self.spec.routing.n_chosen
        evenly = RoutingSpec(n_chosen=n_chosen, scores=Scores.EVEN)
        for n_rows in moe.build_rows(spec.n_experts, n_chosen, max_rows):
            logits = torch.zeros(n_rows, spec.n_experts, device=up.device)
            x = torch.zeros(n_rows, up.shape[2], dtype=self.dtype, device=up.device)
            self._choice(x, None)
            expert_ids, factors = moe.route(logits, evenly)
            expert_ids = self._held(expert_ids) if spec.n_held else expert_ids
            self.plain_products(x, expert_ids, factors, torch.zeros_like(x))
            if (shared := self._beside()) is not None:
                moe.experts_with_shared(x, expert_ids, factors, *shared, residual=torch.zeros_like(x))
            if self.adapted is not None:
                self.adapted.build(x, expert_ids, factors, torch.zeros_like(x))


def _packed(up: Bank, down: Bank) -> moe.PackedExperts | None:
    """None if the matrices of a product are of several kinds."""
    both = [
        [linear.product.packed for linear in bank.linears if isinstance(linear.product, PackedProduct)]
        for bank in (up, down)
    ]
    if any(len({(one.scheme, one.n, one.k) for one in product}) > 1 for product in both):
        return None
    up_biases, down_biases = (
        [linear.bias for linear in bank.linears if linear.bias is not None] or None for bank in (up, down)
    )
    return moe.PackedExperts(both[0], both[1], up_biases, down_biases)


def experts_of(layers: Iterable[HasFfn]) -> list[Experts]:
    """Of each layer that has any."""
    return [layer.ffn for layer in layers if isinstance(layer.ffn, Experts)]
