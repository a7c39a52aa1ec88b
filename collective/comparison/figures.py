"""The figures, each as PNG and, for the page, as SVG for light and dark."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from collective.backends.registry import BACKENDS
from collective.comparison.equality import TOLERANCE
from collective.comparison.results import Results
from collective.comparison.runs import ALONE, SHARE
from collective.comparison.speed import Timed

INK, PAPER, RULE = "#1f2933", "#ffffff", "#d7dde3"
DARK = {INK: "#e4e7eb", PAPER: "#161b22", RULE: "#39424e"}  # on a dark page
# Distinguishable with colour blindness [Okabe and Ito, 2008; Tol, 2021].
COLORS = ("#0072b2", "#882255", "#e69f00", "#44aa99", "#009e73",
          "#cc79a7", "#56b4e9", "#d55e00", "#ddcc77", "#999999")  # fmt: skip
OF_PART = {
    "input": "#56b4e9",
    "compute": "#0072b2",
    "wait": "#999999",
    "all_reduce": "#e69f00",
    "update": "#009e73",
}
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
    **dict.fromkeys(("savefig.facecolor", "legend.facecolor"), PAPER),
    **dict.fromkeys(("legend.edgecolor", "grid.color"), RULE),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.titlelocation": "left",
    "font.size": 10,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}
WIDTH = 8.8  # inches; the same for every figure
LABELS = {"all_reduce": "all-reduce", "wait": "waiting for the slowest"}


def color(backend: str) -> str:
    """Returns the colour of a backend, the same in every figure."""
    names = [*BACKENDS]
    return COLORS[names.index(backend) % len(COLORS)] if backend in names else "#777777"


def losses(results: Results) -> Figure | None:
    """The losses of all backends, and how far they are from the reference."""
    proofs = {p: proof for p, proof in results.equal.items() if proof.losses}
    if not proofs:
        return None
    figure, axes = plt.subplots(
        2, len(proofs), figsize=(WIDTH, 5.2), sharex=True, squeeze=False
    )
    for column, (precision, proof) in zip(axes.T, proofs.items(), strict=True):
        top, bottom = column
        reference = proof.losses[proof.reference]
        for i, (name, values) in enumerate(proof.losses.items()):
            steps = range(1, len(values) + 1)
            top.plot(steps, values, color=color(name), label=name,
                     lw=6 - 5 * i / max(1, len(proof.losses) - 1))  # fmt: skip
            if name == proof.reference:
                continue
            # A difference of 0 has no place on a logarithmic axis.
            differences = [
                abs(a - b) / abs(b) or math.nan
                for a, b in zip(values, reference, strict=False)
            ]
            bottom.semilogy(steps, differences, ".-", color=color(name), lw=1)
        tolerance = TOLERANCE[precision]
        bottom.axhline(tolerance, color=INK, ls=":", lw=1)
        bottom.annotate(f"{tolerance:g}", (1, tolerance), va="bottom", fontsize=8)
        bottom.set_yscale("log")
        top.set(title=precision, ylabel="loss")
        bottom.set(xlabel="step", ylabel=f"relative difference\nfrom {proof.reference}")
        top.xaxis.set_major_locator(MaxNLocator(integer=True))
        top.legend(fontsize=8)
    return figure


def learning(results: Results) -> Figure | None:
    """Learning curves of asynchronous backends and of the reference."""
    if not any(of.samples for of in results.learned.values()):
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 4.4))
    what, curves = results.curves()
    for name, of in results.learned.items():
        if of.samples:
            axes.plot(of.samples, curves[name], "o-", color=color(name), label=name)
    axes.set(xlabel="samples seen", ylabel=f"{what} over the epoch")
    axes.legend(fontsize=8)
    return figure


def steps(results: Results) -> Figure | None:
    """Where the time of a step goes, at the largest number of replicas."""
    timed = results.fast[max(results.fast, key=int)] if results.fast else {}
    timed = {name: one for name, one in timed.items() if one.rates}
    if not timed:
        return None
    names = sorted(timed, key=lambda n: timed[n].step, reverse=True)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.45 * len(names)))
    left = [0.0] * len(names)
    for part, of_part in OF_PART.items():
        widths = [1e3 * max(0.0, timed[n].parts[part]) for n in names]
        axes.barh(names, widths, left=left, color=of_part,
                  label=LABELS.get(part, part), height=0.65)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, (name, end) in enumerate(zip(names, left, strict=True)):
        axes.annotate(f" {timed[name].rate:,.0f} samples/s", (end, y), va="center",
                      fontsize=8)  # fmt: skip
    axes.set(xlabel="milliseconds of a step", xlim=(0, 1.25 * max(left)))
    axes.grid(axis="y", visible=False)
    figure.legend(
        loc="outside upper left", ncols=len(OF_PART), fontsize=8, frameon=False
    )
    return figure


def scaling(results: Results) -> Figure | None:
    """Samples per second over the number of replicas, and the ideal."""
    counts = sorted(int(n) for n in results.fast)
    if len(counts) < 2:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 4.4))
    base = results.fast[str(counts[0])].get(SHARE)
    cores = results.machine["cores"]
    if base and base.rates:
        ideal = [base.rate / counts[0] * min(n, cores) for n in counts]
        axes.plot(counts, ideal, ":", color=INK, label="ideal")
    for name in results.fast[str(counts[-1])]:
        if name in ALONE:
            continue
        rates = {n: results.fast[str(n)].get(name, Timed()).rate for n in counts}
        rates = {n: rate for n, rate in rates.items() if rate}
        if rates:
            axes.plot([*rates], [*rates.values()], "o-", color=color(name), label=name)
    axes.set(xlabel="replicas", ylabel="samples per second", xticks=counts)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


FIGURES: dict[str, Callable[[Results], Figure | None]] = {
    make.__name__: make for make in (losses, learning, steps, scaling)
}


def draw(results: Results, folder: Path) -> dict[str, tuple[str, str]]:
    """Draws every figure for which there are results, as ``NAME.png`` in the folder.

    Returns:
        By name, the SVG for a light and for a dark page.
    """
    drawn = {}
    for name, make in FIGURES.items():
        with plt.rc_context(STYLE):
            figure = make(results)
            if figure is None:
                continue
            figure.savefig(folder / f"{name}.png", dpi=130)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            plt.close(figure)
        light = dark = text.getvalue()
        for color_of_light, color_of_dark in DARK.items():
            dark = dark.replace(color_of_light, color_of_dark)
        drawn[name] = light, dark
    return drawn
