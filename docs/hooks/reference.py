"""Fills pages of the site from the code: options, the module map, and what works together.

A page asks for it by a line such as ``<!-- options: collective.train -->`` or
``<!-- modules: training -->``. MkDocs calls ``on_page_markdown`` for each page.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from docs.hooks.parsers import parser_of  # noqa: E402

_MARKER = re.compile(r"^<!-- (options|modules|pairs): (\S+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by the tables that they ask for."""
    makers = {"options": options, "modules": modules, "pairs": pairs}
    return _MARKER.sub(lambda found: makers[found[1]](found[2]), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load anything from another server."""
    if loaded := re.search(
        r'<(?:script|img|link rel="stylesheet")[^>]*"https?:[^>]*>', output
    ):
        raise PluginError(f"{page.file.src_uri} loads {loaded[0]}")
    return output


def options(module: str) -> str:
    """Return every option of a program, group by group, as definition lists."""
    parser = parser_of(module)
    lines: list[str] = []
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.help is not argparse.SUPPRESS and action.dest != "help"
        ]
        if not actions:
            continue
        title = {"options": "General", "positional arguments": "Arguments"}
        name = title.get(group.title or "", (group.title or "").rstrip(":"))
        lines += [f"## {name[:1].upper()}{name[1:]}", ""]
        if group.description:
            lines += ["```", group.description, "```", ""]
        for action in actions:
            lines += [f"`{_invocation(action)}`", f":   {_help(parser, action)}", ""]
    return "\n".join(lines)


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    text = ", ".join(action.option_strings)
    return f"{text} {value}".strip() if action.nargs != 0 else text


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    text = " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")
    text = re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)
    shown = "default" in text or not action.option_strings
    if not shown and action.nargs != 0 and action.default not in (None, "", [], ()):
        text = f"{text} (default: {action.default})"
    return text or "(no description)"


def modules(folder: str) -> str:
    """A table of the files below a folder, with the first line of what each says."""
    rooms: dict[Path, list[Path]] = {}
    for file in sorted((ROOT / folder).rglob("*")):
        if file.suffix in (".py", ".cc", ".h") and file.is_file():
            rooms.setdefault(file.parent, []).append(file)
    lines = []
    for room in sorted(rooms):
        lines += [f"### `{room.relative_to(ROOT)}/`", ""]
        first = room / "__init__.py"
        if first.is_file():
            lines += [_first_line(first), ""]
        # A header is left out if its source file is listed.
        sources = {
            file.with_suffix(".h") for file in rooms[room] if file.suffix == ".cc"
        }
        rows = [
            f"| `{file.name}` | {_first_line(file)} |"
            for file in rooms[room]
            if file != first and file not in sources
        ]
        if rows:
            lines += ["| file | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def pairs(module: str) -> str:
    """Return a table of the features that do not work together, by a module."""
    code = importlib.import_module(module)

    def title(name: str) -> str:
        return code.FEATURES[name].title.replace(" (backend {backend!r})", "")

    rows = [
        f"| {title('asynchronous')} | all but {'; '.join(map(title, code.OF_WORKERS))} "
        f"| {code.NO_ORDER} |",
    ]
    by_reason: dict[str, list[set[str]]] = {}
    for pair, why in code.PAIRS.items():
        by_reason.setdefault(why, []).append({*pair})
    for why, found in by_reason.items():
        one = max(set().union(*found), key=lambda name: sum(name in p for p in found))
        others = "; ".join(title((pair - {one}).pop()) for pair in found)
        rows.append(f"| {title(one)} | {others} | {why} |")
    return "\n".join(["| | does not work with | |", "|---|---|---|", *rows])


def _first_line(file: Path) -> str:
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        text = text.split("\n\n")[0]
    else:
        text = _comment(file) or _comment(file.with_suffix(".h"))
    text = " ".join(text.split()).replace("|", "\\|").replace("``", "`")
    return re.split(r"(?<=[.:;]) ", text)[0].rstrip(":;") or "&nbsp;"


def _comment(file: Path) -> str:
    """Return the first comment of a C++ file that is a sentence."""
    text = file.read_text() if file.is_file() else ""
    comment = re.search(r"(?:^//.*\n)+", text, re.M)
    return re.sub(r"^[/ ]+", "", comment[0], flags=re.M) if comment else ""
