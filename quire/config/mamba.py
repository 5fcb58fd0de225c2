"""Mamba-2 as a token mixer (Dao and Gu 2024): a short convolution, the scan of a state space, a gated norm.

Owns its description. Does not own what is computed (`compute/layers/mamba`). Torch-free.
"""

from __future__ import annotations

import msgspec

from quire.config.layers import NormSpec
from quire.config.parameters import Cut, Matrix, MixerParameters, NormTable, Section, Tensor
from quire.config.recurrent import RecurrentMixer
from quire.config.shares import part_of, times_of
from quire.config.states import StatePart, StateSpec


class MambaSpec(RecurrentMixer, frozen=True, kw_only=True):
    """See `MixerSpec` for what all mixers say."""

    n_scan_heads: int
    head_dim: int
    n_groups: int
    """Divides n_scan_heads: heads of a group share b and c."""
    state_size: int
    kernel: int
    """Tokens that the convolution sees."""
    eps: float
    """Of the norm of what the scan gives times the gate, in the columns of each group."""
    conv_bias: bool = True
    bias: bool = False
    """Of both projections."""
    dt_min: float = 0.0
    dt_max: float = float("inf")
    group: int = 0
    """Number of these heads' group in the whole model, where it is on several ranks."""
    n_groups_of_all: int = 0
    """Groups of the whole model then; 0: the norm of each is of columns that are here."""

    @property
    def inner_size(self) -> int:
        """Columns of all heads."""
        return self.n_scan_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Columns of the convolution: x, b and c."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def group_size(self) -> int:
        """Columns of a group that are here."""
        return self.inner_size // self.n_groups

    @property
    def state_spec(self) -> StateSpec:
        state = self.n_scan_heads, self.head_dim, self.state_size
        return StateSpec((StatePart((self.kernel - 1, self.conv_size)), StatePart(state, is_exact=True)))

    @property
    def n_row_numbers(self) -> int:
        in_float32 = 6 * self.inner_size if self.n_groups_of_all else 0  # of ranks that norm together, thrice
        return 3 * self.inner_size + 2 * self.conv_size + self.n_scan_heads + in_float32

    @property
    def words(self) -> str:
        groups = f" in {self.n_groups} groups" if self.n_groups > 1 else ""
        return (
            f"Mamba-2, {self.n_scan_heads} heads of {self.head_dim}{groups}, state of {self.state_size}, "
            f"convolution of {self.kernel} tokens"
        )

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'in' (gate, x, b, c, dt) and 'out', norm 'gated'; 'weight' and 'bias' of the convolution."""
        own, cut, heads = at + "mixer", Cut.COLUMN, (self.n_scan_heads,)
        inner = Section(self.inner_size, self.head_dim)
        shared = Section(self.n_groups * self.state_size, self.state_size, is_repeated=True)
        inside = inner, inner, shared, shared, Section(self.n_scan_heads)
        shape, of_conv = (self.conv_size, 1, self.kernel), (inner, shared, shared)
        tensors = {
            "weight": Tensor(name=own + ".conv1d", shape=shape, cut=cut, sections=of_conv),
            **{
                kind: Tensor(name=own, shape=heads, kind=kind, is_float32=True, cut=cut)
                for kind in ("A_log", "D", "dt_bias")
            },
        }
        if self.conv_bias:
            name = own + ".conv1d"
            tensors["bias"] = Tensor(name=name, shape=(self.conv_size,), kind="bias", cut=cut, sections=of_conv)
        n_in, norm = sum(one.n_rows for one in inside), NormSpec(eps=self.eps)
        gated = NormTable(
            name=own + ".norm", shape=(self.inner_size,), spec=norm, cut=cut, unit=self.head_dim
        )  # fmt: skip
        return MixerParameters(
            matrices={
                "in": Matrix(
                    n_in=hidden_size, parts=((own + ".in_proj", n_in),), bias=self.bias, cut=cut, sections=(inside,)
                ),
                "out": Matrix(
                    n_in=self.inner_size, parts=((own + ".out_proj", hidden_size),), bias=self.bias, cut=Cut.ROW,
                    unit=self.head_dim,
                ),
            },
            norms={"gated": gated},
            tensors=tensors,
        )  # fmt: skip

    def share(self, rank: int, n_ranks: int) -> MambaSpec:
        """Its heads; ranks that have heads of one group have that group each."""
        n_heads = part_of(f"Mamba-2 has {self.n_scan_heads} heads", self.n_scan_heads, n_ranks)
        n_times = times_of(self.n_groups, n_ranks, True)
        n_groups = part_of(f"Mamba-2 has {self.n_groups} groups", self.n_groups, n_ranks // n_times)
        return msgspec.structs.replace(
            self, n_scan_heads=n_heads, n_groups=n_groups, group=rank // n_times if n_times > 1 else 0,
            n_groups_of_all=self.n_groups if n_times > 1 else 0,
        )  # fmt: skip
