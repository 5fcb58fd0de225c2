"""Adapters of experts that are in one tensor, as PEFT writes them (`target_parameters`): one pair for all experts.

Owns that layout. Does not own adapters of each expert's own linear layers, which are like all others (`files`).
A is [n_experts * rank, n_in], expert by expert; B is [n_out, rank * n_experts], whose columns of an expert are
n_experts apart (PEFT 0.21, `ParamWrapper.get_delta_weight`). A module with two such tensors has the pair of one of
them under its own name and that of the other under `base_layer`; which is which, only their shapes tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from quire.compute.adapters.pairs import TENSOR_NAME, Pair, Target, check_dtype, finite_tensor, upright
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Names, Rows, rearrange
from quire.config.adapter import CONFIG, AdapterConfig
from quire.core.errors import LoadError, shown

WRAPPED = ".base_layer"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredExperts:
    """A tensor with a matrix of each expert, that an adapter may add to."""

    module: str
    """Name of the tensor, in the model's own words."""
    targets: list[Target]
    """Of each expert."""
    rows: Rows

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Of A and B."""
        n, one = len(self.targets), self.targets[0]
        return {"A": (n * rank, one.n_in), "B": (one.n_out, n * rank)}


@dataclasses.dataclass(slots=True)
class StoredPair:
    """Both tensors of a module, and the experts that they are of."""

    module: str
    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    experts: StoredExperts | None = None

    def find(self, candidates: list[StoredExperts], config: AdapterConfig, where: str) -> None:
        """The experts, by shapes. Raises LoadError."""
        for kind in "AB":
            if kind not in self.entries:
                raise LoadError(f"{where}: module {shown(self.module)} has no lora_{kind}")
            check_dtype(self.entries[kind], where)
        found = {kind: entry.shape for kind, entry in self.entries.items()}
        fitting = [one for one in candidates if one.shapes(config.rank_of(one.module)) == found]
        if not fitting:
            implied = "; or ".join(f"{one.module}: {one.shapes(config.rank_of(one.module))}" for one in candidates)
            raise LoadError(f"{where}: {shown(self.module)} has shapes {found}; {CONFIG} and the model imply {implied}")
        self.experts = fitting[0]

    def pairs(
        self, content: bytes, config: AdapterConfig, where: str, held: Collection[str]
    ) -> Iterator[tuple[str, Pair]]:
        """(name of a projection, what is added to it) of those in `held`, in memory of their own: that of all experts
        is let go of. Raises LoadError."""
        experts = self.experts
        assert experts is not None
        a, b = (finite_tensor(content, self.entries[kind], where) for kind in "AB")
        n = len(experts.targets)
        each_a, each_b = a.view(n, -1, a.shape[1]), b.view(len(b), -1, n).permute(2, 0, 1)
        for expert, target in enumerate(experts.targets):
            if not any(name in held for name, _ in target.parts):
                continue
            own = each_b[expert].contiguous() * config.scale_of(experts.module)
            own_a = each_a[expert].clone()
            rearrange(own, upright(experts.rows))
            start = 0
            for name, rows in target.parts:
                yield name, Pair(own_a, own[start : start + rows].contiguous())
                start += rows


def stacks_of(
    entries: list[Entry], config: AdapterConfig, targets: Mapping[str, Target], names: Names, where: str
) -> tuple[list[StoredPair], list[Entry]]:
    """Of a file's tensors those of experts in one, and the others. Raises LoadError for what does not fit."""
    found: dict[str, StoredPair] = {}
    rest: list[Entry] = []
    candidates: dict[str, list[StoredExperts]] = {}
    for entry in entries if config.parameters else ():
        match = TENSOR_NAME.match(entry.name)
        module, kind = match.groups() if match else ("", "")
        base = _stripped(module)
        if base not in candidates:
            candidates[base] = list(_candidates(base, config, targets, names))
        if kind not in ("A", "B") or not candidates[base]:
            rest.append(entry)
            continue
        stack = found.setdefault(module, StoredPair(module))
        if kind in stack.entries:
            raise LoadError(f"{where}: module {shown(module)} has lora_{kind} twice")
        stack.entries[kind] = entry
    for module, stack in found.items():
        stack.find(candidates[_stripped(module)], config, where)
    absent = [one for one in config.parameters if not any(_is_of(s.experts, one) for s in found.values())]
    if absent:
        raise LoadError(f"{where} has nothing for {', '.join(map(shown, absent[:5]))} of target_parameters")
    return list(found.values()), rest if config.parameters else entries


def _stripped(module: str) -> str:
    while module.endswith(WRAPPED):
        module = module.removesuffix(WRAPPED)
    return module


def _candidates(
    base: str, config: AdapterConfig, targets: Mapping[str, Target], names: Names
) -> Iterator[StoredExperts]:
    """What a module has of the tensors that the configuration names."""
    for last in dict.fromkeys(one.rpartition(".")[2] for one in config.parameters):
        module = f"{base}.{last}"
        is_named = any(module == one or module.endswith("." + one) for one in config.parameters)
        of_experts = names.of_experts(module) if is_named else None
        if of_experts is not None:
            each = [targets.get(name.removesuffix(".weight")) for name in of_experts[0]]
            if each and None not in each:
                yield StoredExperts(module, [one for one in each if one is not None], of_experts[1])


def _is_of(experts: StoredExperts | None, name: str) -> bool:
    return experts is not None and (experts.module == name or experts.module.endswith("." + name))
