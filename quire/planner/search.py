"""The best mesh for a workload on some devices, and the fewest devices that hold a model.

Owns the comparison. Does not own fit (`placement`) nor time (`cost`). Every mesh of exactly the devices is looked at.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.planner.accelerators import Accelerator
from quire.planner.calibration import Calibration
from quire.planner.command import mesh_refusal
from quire.planner.cost import calibrated
from quire.planner.expert_loads import ExpertLoads
from quire.planner.formats import Formats
from quire.planner.mesh import division_refusal, meshes, n_experts_of
from quire.planner.parts import EVEN_LOADS, RankParts, rank_parts
from quire.planner.placement import Limits, Placement, place
from quire.planner.serving import Point, best_point, frontier
from quire.planner.states import fitting_seqs
from quire.planner.workload import Objective, Workload

MOST_DEVICES = 1024


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh that the model can be divided among."""

    mesh: Mesh
    placement: Placement
    refusal: str = ""
    """Why this engine has no such mesh; empty: it has."""
    points: tuple[Point, ...] = ()
    """Of rising concurrency; empty: it does not fit, or not a sequence of the workload."""
    best: Point | None = None
    """Within the objective."""
    nearest: Point | None = None
    """To the objective, where none is within it."""
    excess: float = math.inf
    """Of the nearest, as in `Point`."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned."""

    arch: ModelArch
    device: Accelerator
    calibration: Calibration
    formats: Formats
    limits: Limits
    workload: Workload
    objective: Objective
    loads: ExpertLoads = EVEN_LOADS
    """Of experts; with copies, where `--enable-eplb` moves them."""
    weights: str = "auto"
    """Their format as it was asked for."""

    def parts(self, mesh: Mesh) -> RankParts:
        """Of one rank, the busiest where they differ. ConfigError where the mesh cannot divide the model."""
        return rank_parts(self.arch, mesh, self.formats, self.loads)


def candidate(task: Task, mesh: Mesh) -> Candidate:
    """ConfigError where the mesh cannot divide the model."""
    placement = placed(task, mesh)
    refusal = mesh_refusal(mesh, task.device, task.arch, moves_experts=task.loads.n_redundant is not None)
    if not placement.fits:
        return Candidate(mesh=mesh, placement=placement, refusal=refusal)
    cost = calibrated(
        task.arch, task.device, formats=task.formats, mesh=mesh, calibration=task.calibration, loads=task.loads
    )  # fmt: skip
    points = frontier(cost, task.workload, placement, task.limits.max_num_batched_tokens, task.objective)
    best, nearest = best_point(points, task.objective), None
    if best is None:
        nearest = min(points, key=lambda one: one.excess(task.objective), default=None)
    return Candidate(
        mesh=mesh, placement=placement, refusal=refusal, points=tuple(points), best=best, nearest=nearest,
        excess=nearest.excess(task.objective) if nearest else math.inf,
    )  # fmt: skip


def candidates(task: Task, n_devices: int, mesh: Mesh | None = None) -> tuple[list[Candidate], dict[str, str]]:
    """(those that can be, the best first; mesh → why it cannot be). mesh: only this one."""
    has_experts = any(n_experts_of(spec) for spec in dict.fromkeys(task.arch.layers))
    found, refused = [], {}
    for one in [mesh] if mesh is not None else meshes(n_devices, experts=has_experts, sequences=False):
        reason = division_refusal(one, task.arch, task.loads.copies(one.ep))
        if reason:
            refused[one.words] = reason
        else:
            found.append(candidate(task, one))
    return sorted(found, key=_merit, reverse=True), refused


def _merit(one: Candidate) -> tuple[bool, bool, float, float, bool, bool, float, int]:
    """What this engine serves first, then within the objective, then speed or how near; of what has no room, what this
    engine would have, then what lacks least memory."""
    speed = one.best.tokens_per_s if one.best else 0.0
    return (
        not one.refusal and bool(one.points),
        one.best is not None,
        speed,
        -one.excess,
        one.placement.fits,
        not one.refusal,
        -float(one.placement.lacking_bytes),
        -one.mesh.n_ranks,
    )


def least_devices(task: Task) -> tuple[Mesh | None, Mesh | None]:
    """(the smallest mesh of one replica, in powers of two, that this engine has and that holds one sequence of the
    workload; a smaller one that it has not). None: there is none within `MOST_DEVICES`."""
    other, n = None, 1
    while n <= MOST_DEVICES:
        for mesh in meshes(n, experts=False, sequences=False):
            if mesh.dp > 1 or division_refusal(mesh, task.arch):
                continue
            is_had = not mesh_refusal(mesh, task.device, task.arch)
            if (is_had or other is None) and _holds(task, mesh):
                if is_had:
                    return mesh, other if other is None or other.n_ranks < n else None
                other = mesh
        if other is not None and n >= task.device.n_in_host:
            break
        n *= 2
    return None, other


def _holds(task: Task, mesh: Mesh) -> bool:
    placement = placed(task, mesh)
    return placement.fits and placement.seqs_within(task.workload.longest) > 0


def placed(task: Task, mesh: Mesh) -> Placement:
    """With as many sequences as were asked for, or as an engine chooses where nobody did and each keeps a recurrent
    state; or fewer where what is reserved for each of them leaves too little."""

    def with_seqs(n_seqs: int) -> Placement:
        limits = msgspec.structs.replace(task.limits, max_num_seqs=n_seqs)
        return place(
            task.arch, task.device.memory_bytes, mesh, task.formats, limits, task.loads, on_hopper=task.device.is_hopper
        )

    def holds(n_seqs: int) -> bool:
        placement = with_seqs(n_seqs)
        return placement.fits and placement.seqs_within(task.workload.longest) > 0

    def longest(n_seqs: int) -> int:
        placement = with_seqs(n_seqs)
        return placement.longest if placement.fits else 0

    asked = task.limits.max_num_seqs
    if task.arch.state_specs and not task.limits.are_seqs_given:
        asked = fitting_seqs(asked, task.limits.max_model_len or task.arch.max_position, longest)
    if holds(asked) or not holds(1):
        return with_seqs(asked)
    return with_seqs(bisect.bisect_left(range(1, asked), True, key=lambda n: not holds(n)))
