"""Draws the results: a bar for each contender's share of the limit, ours and peers', one panel an op."""

from __future__ import annotations

import datetime
import importlib.util
import math
import pathlib
from collections.abc import Sequence

from quire import __version__
from quire.bench import machine
from quire.bench.kernels.measurement import Timing
from quire.bench.plot import BLUE, GREEN, ORANGE
from quire.core.errors import ConfigError, shown
from quire.core.files import check_output

GREY = "#9ca3af"
OURS = (BLUE, "#7dd3fc", GREEN, "#1e3a8a")
PEERS = (ORANGE, "#9333ea", "#facc15", "#ec4899", "#78350f", GREY, "#fda4af", "#111827")
"""More than there are peers, so that no two look alike."""
BAR_INCHES, WIDTH_INCHES = 0.13, 11


def check_chart_path(path: str) -> None:
    """ConfigError, before anything is measured, for a name that cannot be drawn to."""
    if pathlib.Path(path).suffix != ".png":
        raise ConfigError(f"--plot {shown(path)}: the name must end with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    check_output(path, "--plot")


def write_chart(path: str, timings: Sequence[Timing], title: str) -> None:
    """Shares in percent, a group of bars for each case. Rows without a share are left out."""
    from matplotlib.figure import Figure  # an optional package; a Figure of its own leaves pyplot's state alone

    rows = [row for row in timings if not math.isnan(row.share)]
    ops = list(dict.fromkeys(row.op for row in rows)) or [""]
    sizes = [1 + sum(row.op == op for row in rows) + len({row.case for row in rows if row.op == op}) for op in ops]
    figure = Figure(figsize=(WIDTH_INCHES, 1.5 + BAR_INCHES * sum(sizes)), layout="constrained")
    panels = figure.subplots(len(ops), 1, squeeze=False, gridspec_kw={"height_ratios": sizes}, sharex=True)[:, 0]
    colours = _colours(rows)
    for axes, op in zip(panels, ops, strict=True):
        at, ticks, names = 0.0, [], []
        own = [row for row in rows if row.op == op]
        for case in dict.fromkeys(row.case for row in own):
            group = [row for row in own if row.case == case]
            for i, row in enumerate(group):
                axes.barh(at + i, 100 * row.share, height=0.9, color=colours[row.implementation])
            ticks.append(at + (len(group) - 1) / 2)
            names.append(case)
            at += len(group) + 1
        axes.set_yticks(ticks, names, fontsize=7)
        axes.set_ylim(at - 0.5, -1)
        axes.axvline(100, color=GREY, linewidth=1)
        axes.grid(axis="x", alpha=0.25)
        axes.set_title(op, fontsize=9, loc="left")
    panels[-1].set_xlabel("share of the measured limit, %")
    handles = [panels[0].barh([-9], [0], color=colour) for colour in colours.values()]
    figure.legend(handles, colours.keys(), loc="outside upper right", fontsize=7, ncols=4)
    figure.suptitle(f"{title}\n{origin()}", fontsize=9, x=0.01, ha="left")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"--plot {shown(path)} cannot be written: {error.strerror}") from None


def origin() -> str:
    """Processor, date and commit, as a line of the title; the title names the device."""
    today, (head, *changes) = datetime.datetime.now(datetime.UTC), machine.commit().partition("+")
    made = f"commit {head[:10]}{''.join(changes)}" if head else f"quire {__version__}"
    return f"{machine.cpu_model()}, {machine.n_cores()} cores; {today:%Y-%m-%d}; {made}"


def _colours(rows: Sequence[Timing]) -> dict[str, str]:
    """Contender → colour: blues and green are ours."""
    found: dict[str, str] = {}
    for is_peer, palette in ((False, OURS), (True, PEERS)):
        names = dict.fromkeys(row.implementation for row in rows if row.is_peer == is_peer)
        found |= {name: palette[i % len(palette)] for i, name in enumerate(names)}
    return found
