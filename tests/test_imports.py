"""Imports between modules: there are no circles, and no import of a higher floor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From the lowest floor to the highest; a file may import from its own floor and lower ones.
FLOORS = ("collective", "backends", "training", "distribute", "comparison")
# The command lines, which import no TensorFlow, belong to the floors that they open.
SCRIPTS = {
    "collective.train": "training",
    "collective.layouts": "training",
    "collective.compare": "comparison",
}


def modules() -> dict[str, Path]:
    """Return the files of the package's modules by import name."""
    found = {}
    package = ROOT / "collective"
    for folder in (package, package / "backends"):  # rglob does not follow links
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, names: dict[str, Path], types: bool = True) -> Iterator[str]:
    """Yield the package's modules that a file imports: at its top, or inside a function.

    Args:
        types: Whether imports only for type checkers count.
    """
    tree = ast.parse(path.read_text())
    if not types:
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted = [name if name in names else node.module for name in whole]
        else:
            continue
        yield from (name for name in wanted if name in names)


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def graph(types: bool = True) -> dict[str, set[str]]:
    """Return the modules that each module imports.

    The result is without ``collective`` itself: its names are lazy, and stand for the
    module that each is from.
    """
    names = modules()
    return {
        name: set(imported(path, names, types)) - {name, "collective"}
        for name, path in names.items()
        if name != "collective"
    }


def circles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return strongly connected components of two or more modules [Tarjan, 1972]."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.add(frozenset(stack[start:]))
            del stack[start:]

    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def floor(name: str) -> int:
    parts = name.split(".")
    part = SCRIPTS.get(".".join(parts[:2])) or parts[1]
    return FLOORS.index(part) if part in FLOORS else 0


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(edges) == {frozenset("bc")}
    assert circles({"a": {"b"}, "b": {"a"}}) == {frozenset("ab")}
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_imports_inside_functions_count():
    names = modules()
    found = set(imported(names["collective.backends.native"], names))
    assert {"collective", "collective.backends.world"} <= found
    assert "collective.tensorflow_ops" in found  # only inside a function


def test_no_circle():
    assert not circles(graph(types=False)), "a circle: move what both need below both"


def test_circles_of_types_are_in_the_partition():
    """A rule may name the type of what calls it; nothing else imports in a circle."""
    inside = "collective.training.partition."
    for circle in circles(graph()):
        assert all(name.startswith(inside) for name in circle), circle


def test_no_import_of_a_higher_floor():
    upward = {
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if floor(other) > floor(name)
    }
    assert not upward


def test_rooms_of_the_training_have_an_order():
    """No folder or loose file imports one that imports it, directly or through others."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph(types=False).items():
        for other in others:
            one, another = _room(name), _room(other)
            rooms.setdefault(one, set())
            rooms.setdefault(another, set())
            if one and another and one != another:
                rooms[one].add(another)
    assert not circles(rooms), "a circle of rooms: move what both need below both"


def _room(name: str) -> str:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["collective", "training"] and parts[2:] else ""


def test_every_public_name_is_found():
    import collective

    for name in collective.__all__:
        assert getattr(collective, name) is not None
