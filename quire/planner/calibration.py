"""How far a device stays behind its peaks, as numbers that were measured: one JSON file a device.

Owns the file's fields and where files are. Does not own how they are used (`timing`) nor how they are measured
(`bench/calibrate`). Where a device has no file, another one's shares are taken, and that is said.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from quire.core.errors import ConfigError, shown
from quire.planner.formats import FORMATS

FOLDER: Final = pathlib.Path(__file__).with_name("calibrations")
SHARPNESS: Final = 4.0
"""p of (memory^p + arithmetic^p)^(1/p): the roofline's corner is round where both bind."""
ASSUMED: Final = "assumed"
"""How the source of a calibration begins that no step was timed for."""
LATENT: Final = "latent"
"""In `Calibration.attentions`: lines that stand for keys and values."""
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of a call beside its roofline, over rows; between knots on lines in the logarithm of rows."""

    rows: tuple[Annotated[int, Meta(ge=1)], ...] = (1,)
    """Rising."""
    fixed_s: tuple[NotNegative, ...] = (0.0,)
    """Of one call with so many rows: starting, filling and ending, and tiles that are not full."""
    bytes_share: Positive = 1.0
    """Of the device's reads that large calls reach."""
    tile: Annotated[int, Meta(ge=1)] = 1
    """Rows beyond two tiles are multiplied as whole tiles."""
    flops_share: tuple[Positive, ...] = (1.0,)
    """Of the device's products that calls with so many rows reach; one number: whatever the rows."""

    tiles: tuple[tuple[NotNegative, Annotated[int, Meta(ge=1)]], ...] = ()
    """Of experts: rows of one of them in the mean from which on tiles have so many rows; rising."""

    line_s: NotNegative = 0.0
    """Of decode attention: of each sequence and KV head, whose beginning and end count where its keys are few."""

    row_number_s: NotNegative = 0.0
    """Of products in 8 bits: of each number of a row, in and out, which is brought into 8 bits, or back by its scales,
    in a pass beside the product."""

    def fixed(self, n_rows: float) -> float:
        """Seconds of one call."""
        return self._between(self.fixed_s, n_rows)

    def padding(self, n_rows: float, *, are_equal: bool) -> float:
        """Rows that are multiplied, to those that there are, where so many go to each of several matrices in the mean:
        every tile that is begun is multiplied. are_equal: as many to each; else at random, some more and some less."""
        tile = next((size for least, size in reversed(self.tiles) if n_rows >= least), 0)
        if not tile or not n_rows:
            return 1.0
        if are_equal:
            return (min(1.0, n_rows) + math.ceil(n_rows / tile) - 1) * tile / n_rows
        further = range(tile, math.ceil(n_rows + 4 * math.sqrt(n_rows)), tile)
        begun = 1 - math.exp(-n_rows) + sum(0.5 * math.erfc((end - n_rows) / math.sqrt(2 * n_rows)) for end in further)
        return begun * tile / n_rows

    def multiplied(self, n_rows: float) -> float:
        """Rows that are multiplied, those that fill the last tile too."""
        return n_rows if n_rows <= 2 * self.tile else -(-n_rows // self.tile) * self.tile

    def rate_share(self, n_rows: float) -> float:
        """See `flops_share`."""
        return self._between(self.flops_share, n_rows)

    def _between(self, values: tuple[float, ...], n_rows: float) -> float:
        rows = self.rows
        if n_rows <= rows[0] or len(values) == 1:
            return values[0]
        if n_rows >= rows[-1]:
            return values[-1]
        right = bisect.bisect_left(rows, n_rows)
        low, high = rows[right - 1], rows[right]
        share = math.log(n_rows / low) / math.log(high / low)
        return values[right - 1] + share * (values[right] - values[right - 1])


class Ceilings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device does at most, as large reads and large products show."""

    device: str
    read_bytes_per_s: Positive
    flops_per_s: dict[str, Positive]
    """Type of product → rate of a large one."""

    def rate(self, products: str) -> float:
        """Of a type that was not measured: that of floating point."""
        found = self.flops_per_s
        return found.get(products) or found.get("bfloat16") or next(iter(found.values()))


class Way(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How sums over ranks go: a latency, and bytes that a rank sends."""

    latency_s: NotNegative
    link_share: Positive
    """Of the link's bytes a second, one way."""

    def seconds(self, sent_bytes: float, link_bytes_per_s: float) -> float:
        """Of one sum."""
        return self.latency_s + sent_bytes / (self.link_share * link_bytes_per_s)


class Sums(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sums over the ranks of one host, by the ways that the engine has, however long they are; the residual is added in
    their launch. Of three ranks and more latencies are the same, since each rank writes to all others at once."""

    pair: Way
    """Two ranks, in one hop or two, which send as much: one alone takes less of what the link could bring."""

    one_hop: Way
    """A rank sends all of its rows to each of the others."""
    two_hops: Way
    """It sends each of them a part, and the sum of its own part to each."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs of one kind beside what was expected of them."""

    kinds: tuple[str, ...] = ()
    """What they have that a plain model has not, see `error_bar.kinds_of`."""
    n_figures: Annotated[int, Meta(ge=1)]
    error: NotNegative
    """Of the figure that is farthest away: 0.1 if it is a tenth longer than expected, or as much shorter."""
    farthest: str = ""
    """Which that is."""


class Calibration(Ceilings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one device, with the engine as it was."""

    source: str
    """Where the numbers come from, and which runs were fitted."""
    products: dict[str, Curve]
    """Format of weights, or type of product → the curve of its kernel. float32: of routers that are kept so."""
    experts: dict[str, Curve]
    """The same of a layer's experts: the choice of them, and their two products."""
    attention: Curve
    """Of rows that decode: `bytes_share`; of prompts: `flops_share` and the last `fixed_s`, over rows of a span."""
    attentions: dict[str, Curve] = {}
    """The same of attention with kernels of its own: type of keys and values, or `LATENT`, where there is one."""
    state: Curve = Curve()
    row_kernels: Curve = Curve()
    """Norms, rotation: fixed costs over rows, and `bytes_share`."""
    step_s: NotNegative = 0.0
    """Of a step on the device beside its layers and head."""
    row_s: NotNegative = 0.0
    """Of choosing a token, for each."""
    first_token_s: NotNegative = 0.0
    """Of a request whose first token waits for host and device, which nothing hides."""
    host_s: NotNegative = 0.0
    """Of planning and launching a step, which is hidden behind the step before where that takes longer."""
    host_row_s: NotNegative = 0.0
    """The same, for each sequence."""
    captured: Annotated[int, Meta(ge=0)] = 0
    """Rows of the largest decode step that is captured, to whose sizes steps are padded; 0: none is."""
    small_rows: Annotated[int, Meta(ge=1)] = 16
    """Rows of a span up to which attention reads as in decoding."""
    sums: Sums | None = None
    """None: sums take as long as other collectives."""
    error: NotNegative = 0.1
    """Relative, of a step that was not fitted: no error bar is narrower."""
    records: tuple[Record, ...] = ()
    """Of whole models, from which error bars are (`error_bar`)."""

    @property
    def is_assumed(self) -> bool:
        """Whether nobody timed a step there."""
        return self.source.startswith(ASSUMED)


def load_calibration(path: pathlib.Path) -> Calibration:
    """ConfigError that names the file and the field."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"calibration {shown(str(path))} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"calibration {shown(str(path))}: {error}; `quire bench calibrate` writes one") from None
    if "bfloat16" not in found.products or "bfloat16" not in found.experts or not found.flops_per_s:
        raise ConfigError(
            f"calibration {shown(str(path))}: products or experts has no bfloat16, whose curve stands for types that"
            " were not measured, or flops_per_s is empty; `quire bench calibrate` writes all"
        )
    tables = found.products, found.experts, found.attentions, {"attention": found.attention}
    for name, curve in itertools.chain.from_iterable(table.items() for table in tables):
        lengths = {len(curve.fixed_s), len(curve.flops_share)} - {1}
        if lengths - {len(curve.rows)} or list(curve.rows) != sorted(set(curve.rows)):
            raise ConfigError(
                f"calibration {shown(str(path))}: {name}: rows must rise, with a fixed_s and a flops_share each"
            )
    return found


def curve_of_format(curves: Mapping[str, Curve], name: str, products: str) -> Curve:
    """Of weights in a format: its own, or that of one with as many bits, or of its type of product, or bfloat16's."""
    found = curves.get(name)
    if found is None:
        bits = FORMATS[name].bits
        alike = [curve for other, curve in curves.items() if other in FORMATS and FORMATS[other].bits == bits < 16]
        found = alike[0] if alike else curves.get(products)
    return found or curves["bfloat16"]


@functools.cache
def calibration_of(device: str) -> Calibration | None:
    """The file that comes with Quire; None: there is none."""
    path = FOLDER / f"{device}.json"
    return load_calibration(path) if path.is_file() else None
