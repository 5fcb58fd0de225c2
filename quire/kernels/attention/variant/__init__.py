"""What is computed: a variant's hooks, the expressions they are traced to, and their lowering to source.

Owns no schedule and no back end: nothing here knows `schedule`, `cpu`, `hopper` or `triton`.
"""

from quire.kernels.attention.variant.definition import (
    COORDINATES,
    MAX_PARAMS,
    Params,
    Program,
    Site,
    Variant,
)

__all__ = ["COORDINATES", "MAX_PARAMS", "Params", "Program", "Site", "Variant"]
