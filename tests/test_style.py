"""Rules for the product's code that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import ROOT, modules

FILE, FUNCTION = 500, 60  # lines at most, as CONTRIBUTING.md says
# Functions that are longer, and why.
LONGER = {
    "collective/training/calls/fit.py": {"fit", "attempt"},  # the recipe of a training
    "collective/train.py": {"parser"},  # a list of options
    "collective/ray/executor.py": {"__init__"},  # Horovod's arguments
    "collective/run_function.py": {"run"},  # Horovod's arguments
}


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
    lines = {
        str(path): len((ROOT / path).read_text().splitlines()) for path, _ in trees()
    }
    assert {path: n for path, n in lines.items() if n > FILE} == {}


def test_a_function_is_one_step():
    long = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and length(node) > FUNCTION
        and node.name not in LONGER.get(str(path), ())
    ]
    assert long == []


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without its docstring."""
    docstring = ast.get_docstring(function, clean=False) or ""
    lines = function.end_lineno - function.lineno + 1
    return lines - len(docstring.splitlines())


def test_contributing_says_the_same():
    rule = f"at most {FILE} lines, functions {FUNCTION}"
    assert rule in (ROOT / "CONTRIBUTING.md").read_text()
