"""Makes wide tables readable on a narrow page: each cell knows the head of its column.

MkDocs calls ``on_page_content`` with the HTML of each page. The style sheet shows a row as
a list of labelled lines where the columns do not fit (``docs/assets/site.css``).
"""

from __future__ import annotations

import re
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_ROW = re.compile(r"<tr>.*?</tr>", re.S)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.S)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.S)
_SECONDS = re.compile(r"([\d.]+) s")
_FAULTS = 7  # columns of a table of faults; its last one has a time for each fault


def on_page_content(html: str, **_: Any) -> str:
    """Labels the cells of every table."""
    return _TABLE.sub(lambda table: _labelled(table[0]), html)


def _labelled(table: str) -> str:
    heads = [re.sub(r"<[^>]+>", "", head).strip() for head in _HEAD.findall(table)]

    def row(found: re.Match[str]) -> str:
        heads_left = iter(heads)

        def cell(found: re.Match[str]) -> str:
            label, text = next(heads_left, ""), found[2]
            if len(heads) == _FAULTS and label == heads[-1]:
                text = _together(text)
            return f'<td{found[1]} data-label="{label}">{text}</td>'

        return _CELL.sub(cell, found[0])

    labelled, several = _ROW.sub(row, table), f'<table data-several="{len(heads)}">'
    return labelled.replace("<table>", several, 1) if len(heads) > 2 else labelled


def _together(text: str) -> str:
    """Return what was measured of the faults of one row: once if alike, else from and to."""
    found = list(dict.fromkeys(part.strip() for part in re.split(r"<br ?/?>", text)))
    times = [float(time[1]) for part in found if (time := _SECONDS.fullmatch(part))]
    if len(found) > 1 and len(times) == len(found):
        return f"{min(times):g} to {max(times):g} s"
    return "<br />".join(found)
