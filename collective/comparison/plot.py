"""The picture of a comparison: the losses, how far apart they are, and the time of a step.

Matplotlib draws it, and is imported when a picture is asked for.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from collective.comparison.results import EqualityProof, Results
from collective.comparison.speed import Timed
from collective.errors import CollectiveError, UsageError

# The colours of Okabe and Ito, which everybody can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5F00")
_REFERENCE_COLOUR = "#C9CED6"
# Greys, because a colour stands for a backend in the other panels; by part: its title, its
# grey, and its hatching.
_PARTS = {
    "input": ("input", "#DDE2E9", ""),
    "compute": ("compute", "#9BA9B9", ""),
    "wait": ("wait for the slowest", "#FFFFFF", "/////"),
    "all_reduce": ("all-reduce", "#33424F", ""),
    "update": ("update", "#C2CBD6", ""),
}
_INK, _FAINT = "#22303C", "#8A96A3"
_LEAST = 1e-17  # a difference of 0 is drawn here, because a logarithmic scale has no 0
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "hatch.color": _FAINT,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "collective",  # the same file from the same results
}


def check_matplotlib() -> None:
    """Refuse a picture that cannot be drawn, before the work whose results it shows.

    Raises:
        UsageError: Matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--plot: Matplotlib is not installed", hint="pip install matplotlib"
        ) from None


def draw(results: Results, path: str) -> None:
    """Draw the results into a file, whose ending names its format (.png, .svg, .pdf).

    Raises:
        CollectiveError: It cannot be written, or Matplotlib does not know its format.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    proofs = [*results.equal.items()]
    counts = sorted(map(int, results.fast))
    rows = len(proofs[:1]) + len(counts)
    if not rows:
        return
    with matplotlib.rc_context(_STYLE):
        heights = [3.0] * len(proofs[:1]) + [
            0.9 + 0.32 * len(_timed(results, count)) for count in counts
        ]
        layout = ConstrainedLayoutEngine(h_pad=0.16, w_pad=0.16, hspace=0.04)
        figure = Figure((10.5, sum(heights) + 1.1), layout=layout)
        grid = figure.add_gridspec(rows, 2, height_ratios=heights)
        for precision, proof in proofs[:1]:
            colours = _colours(proof.losses, proof.reference)
            _draw_losses(figure.add_subplot(grid[0, 0]), precision, proof, colours)
            _draw_differences(figure.add_subplot(grid[0, 1]), proof, colours)
        for row, count in enumerate(counts, rows - len(counts)):
            _draw_steps(figure.add_subplot(grid[row, :]), _timed(results, count), count)
        figure.suptitle(
            results.verdict, x=0.012, ha="left", weight="bold", fontsize=13, color=_INK
        )
        figure.supxlabel(_footer(results), x=0.012, ha="left", fontsize=8, color=_FAINT)
        try:
            kind = os.path.splitext(path)[1].lower()
            metadata = {"Date": None} if kind == ".svg" else None
            figure.savefig(path, dpi=160, metadata=metadata)
        except (OSError, ValueError) as error:
            raise CollectiveError(
                f"--plot: {path} cannot be written: {error}", hint="--plot FILE.png"
            ) from None


def _timed(results: Results, count: int) -> dict[str, Timed]:
    """Return the backends that were timed at a number of replicas, the fastest first."""
    timed = {n: t for n, t in results.fast[str(count)].items() if t.parts}
    return dict(sorted(timed.items(), key=lambda pair: pair[1].step))


def _colours(names: Mapping[str, Any], reference: str) -> dict[str, str]:
    others = [name for name in names if name != reference]
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(others)}


def _draw_losses(
    axes: Any, precision: str, proof: EqualityProof, colours: Mapping[str, str]
) -> None:
    """Draw one curve for each backend; dashes keep the curves below the last one visible."""
    axes.set_title(f"Loss of each step, {precision}")
    reference = proof.losses.get(proof.reference, [])
    steps = range(1, len(reference) + 1)
    axes.plot(
        steps, reference, color=_REFERENCE_COLOUR, linewidth=7, label=proof.reference,
        solid_capstyle="round",
    )  # fmt: skip
    for i, (name, colour) in enumerate(colours.items()):
        losses = proof.losses[name]
        axes.plot(
            range(1, len(losses) + 1), losses, color=colour, linewidth=1.8,
            linestyle=_dashes(i, len(colours)),
        )  # fmt: skip
        axes.plot([], [], color=colour, linewidth=1.8, label=name)  # in the legend
    axes.set_xlabel("step")
    if min(reference, default=-1.0) >= 0:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#EEF1F4")
    axes.set_axisbelow(True)
    axes.legend(loc="best", labelcolor=_INK, handlelength=1.6)


def _dashes(number: int, lines: int) -> Any:
    """Return the style of one of several lines of which all can be seen if they coincide."""
    return (3 * number, (3, 3 * (lines - 1))) if lines > 1 else "-"


def _draw_differences(
    axes: Any, proof: EqualityProof, colours: Mapping[str, str]
) -> None:
    """Draw how far each backend is from the reference, with the limit of rounding errors."""
    axes.set_title(f"Largest relative difference from {proof.reference} so far")
    reference = proof.losses.get(proof.reference, [])
    for i, (name, colour) in enumerate(colours.items()):
        found = _largest_so_far(proof.losses[name], reference)
        steps = range(1, len(found) + 1)
        style = {"color": colour, "drawstyle": "steps-post"}
        axes.plot(steps, found, linewidth=0.8, zorder=1.5, **style)
        axes.plot(
            steps, found, linewidth=2, linestyle=_dashes(i, len(colours)), **style
        )
        if name in proof.verdicts:
            weights = max(proof.verdicts[name].parameter, _LEAST)
            place = len(found) * (1.05 + 0.025 * i)
            axes.plot(place, weights, "D", color=colour, markersize=4.5)
    limits = [v.tolerance for v in proof.verdicts.values()]
    if limits and reference:
        first, last = max(limits)
        axes.plot([1, 1.2 * len(reference)], [first, last], color=_INK, linewidth=1)
        axes.annotate(
            "more than this is not rounding", (1, first), (0, -11), fontsize=8.5,
            textcoords="offset points",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(_LEAST / 3, None)
    lowest = [_LEAST, *(10.0**power for power in range(-15, 1, 3))]
    top = axes.get_ylim()[1]
    ticks = [tick for tick in lowest if tick <= top]
    axes.set_yticks(ticks, ["0", *(f"1e{round(math.log10(t))}" for t in ticks[1:])])
    axes.minorticks_off()
    axes.grid(axis="y", color="#EEF1F4")
    axes.set_axisbelow(True)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= len(reference)])
    axes.set_xlabel("step   ·   lines: losses   ·   diamonds: weights after the last")


def _largest_so_far(mine: Sequence[float], reference: Sequence[float]) -> list[float]:
    pairs = zip(mine, reference, strict=False)
    found = (abs(a - b) / (abs(b) or 1.0) for a, b in pairs)
    # A loss that is not finite is as far away as can be, from its step on.
    finite = (max(d, _LEAST) if math.isfinite(d) else 1.0 for d in found)
    return [*itertools.accumulate(finite, max)]


def _draw_steps(axes: Any, timed: Mapping[str, Timed], replicas: int) -> None:
    """Draw one bar for each backend, of the parts of a step."""
    several = "s" if replicas > 1 else ""
    axes.set_title(f"Time of a step, {replicas} replica{several}, ms")
    left = dict.fromkeys(timed, 0.0)
    for part, (title, grey, hatch) in _PARTS.items():
        widths = [1e3 * one.parts.get(part, 0.0) for one in timed.values()]
        axes.barh(
            [*timed],
            widths,
            0.62,
            [*left.values()],
            color=grey,
            hatch=hatch,
            label=title,
        )
        for name, width in zip(timed, widths, strict=True):
            left[name] += width
    longest = max(left.values(), default=0.0)
    for place, (name, end) in enumerate(left.items()):
        rate = f"{end:.1f}   ({timed[name].rate:,.0f} samples/s)"
        axes.text(end + longest / 100, place, rate, va="center", fontsize=8.5)
    axes.set_xlim(0, 1.24 * longest or 1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color="#EEF1F4")
    axes.set_axisbelow(True)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_PARTS), borderpad=0,
        handlelength=0.9, handleheight=0.9, columnspacing=1.2,
    )  # fmt: skip


def _footer(results: Results) -> str:
    found, cores = results.machine, results.machine["cores"]
    said = [
        results.options.get("command", ""),
        f"{cores} cores, {found['architecture']}",
    ]
    said += [f"TensorFlow {results.versions['tensorflow']}"] * (
        "tensorflow" in results.versions
    )
    if warning := results.busy:
        said.append(warning)
    return "   ·   ".join(filter(None, said))
