"""Mamba-2 as a token mixer (Dao and Gu 2024): a short convolution, the scan of a state space, a gated norm.

Owns its description. Does not own what is computed (`compute/layers/mamba`). Torch-free.
"""

from __future__ import annotations

from quire.config.layers import NormSpec
from quire.config.parameters import Matrix, MixerParameters, NormTable, Tensor
from quire.config.recurrent import RecurrentMixer
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

    @property
    def inner_size(self) -> int:
        """Columns of all heads."""
        return self.n_scan_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Columns of the convolution: x, b and c."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def state_spec(self) -> StateSpec:
        state = self.n_scan_heads, self.head_dim, self.state_size
        return StateSpec((StatePart((self.kernel - 1, self.conv_size)), StatePart(state, is_exact=True)))

    @property
    def n_row_numbers(self) -> int:
        return 3 * self.inner_size + 2 * self.conv_size + self.n_scan_heads

    @property
    def words(self) -> str:
        groups = f" in {self.n_groups} groups" if self.n_groups > 1 else ""
        return (
            f"Mamba-2, {self.n_scan_heads} heads of {self.head_dim}{groups}, state of {self.state_size}, "
            f"convolution of {self.kernel} tokens"
        )

    def parameters(self, at: str, hidden_size: int) -> MixerParameters:
        """Projections 'in' (gate, x, b, c, dt) and 'out', norm 'gated'; 'weight' and 'bias' of the convolution."""
        own, heads = at + "mixer", (self.n_scan_heads,)
        tensors = {
            "weight": Tensor(name=own + ".conv1d", shape=(self.conv_size, 1, self.kernel)),
            **{kind: Tensor(name=own, shape=heads, kind=kind, is_float32=True) for kind in ("A_log", "D", "dt_bias")},
        }
        if self.conv_bias:
            tensors["bias"] = Tensor(name=own + ".conv1d", shape=(self.conv_size,), kind="bias")
        n_in = self.inner_size + self.conv_size + self.n_scan_heads
        return MixerParameters(
            matrices={
                "in": Matrix(n_in=hidden_size, parts=((own + ".in_proj", n_in),), bias=self.bias),
                "out": Matrix(n_in=self.inner_size, parts=((own + ".out_proj", hidden_size),), bias=self.bias),
            },
            norms={"gated": NormTable(name=own + ".norm", shape=(self.inner_size,), spec=NormSpec(eps=self.eps))},
            tensors=tensors,
        )
