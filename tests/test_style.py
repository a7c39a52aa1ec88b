"""Rules for the product's code that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import ROOT, modules

SIZE = 550  # lines of the longest file of Python


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in modules().values():
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_no_call_unpacks_what_it_could_pass():
    """``f(*(a, b), c)`` must be ``f(a, b, c)``."""
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
            for argument in node.args
        )
    ]
    assert found == []


def test_nothing_is_read_from_locals_or_mocked():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == "locals")
        or (
            isinstance(node, ast.ImportFrom | ast.Import)
            and "unittest" in ast.unparse(node)
        )
    ]
    assert found == []


def test_a_file_is_one_idea():
    long = {
        str(path): len((ROOT / path).read_text().splitlines()) for path, _ in trees()
    }
    assert {path: lines for path, lines in long.items() if lines > SIZE} == {}
