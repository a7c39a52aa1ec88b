"""``report.html``: a single page that needs no other file and no network."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from collective.comparison.results import Results
from collective.comparison.tables import Table

CAPTIONS = {
    "losses": "The loss of every backend, and its relative difference from the "
    "reference (no point: bit-equal; dotted: the tolerance, which in float32 is that of "
    "the first step and grows with the rounding of other summation orders).",
    "learning": "Accuracy (or loss) against samples seen; asynchronous backends train a "
    "different model by design.",
    "steps": "Where the time of a step goes.",
    "scaling": "Samples per second over the number of replicas.",
}


def write(
    path: Path,
    results: Results,
    tables: list[Table],
    pictures: dict[str, tuple[str, str]],
) -> None:
    """Writes the page; of each picture, the SVG for light and for dark."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True)
    template = environment.get_template("report.html.jinja")
    path.write_text(
        template.render(
            results=results,
            tables=tables,
            pictures={
                name: [_address(svg) for svg in themes]
                for name, themes in pictures.items()
            },
            captions=CAPTIONS,
        ),
        encoding="utf-8",
    )


def _address(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
