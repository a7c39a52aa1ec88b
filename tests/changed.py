"""Finds the tests that a change can reach: ``make test CHANGED=1``.

    python -m tests.changed [COMMIT]

It prints the test files that import a file which differs from a commit (HEAD), directly or
through others. A file also reaches the files that it starts: the modules that it names in a
string, and, if it is a test, the files that it names.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import collective
from tests.test_imports import ROOT, imported, modules

# A file that is not a Python module counts as the module that loads it.
STANDS_FOR = {"collective/native/": "collective/library.py"}
# Tests that make test leaves out; each has a target of its own.
OWN_TARGET = tuple(f"tests/{name}/" for name in ("hosts", "faults", "cluster", "gpu"))
# A change of one of these may change any result.
EVERYWHERE = ("pyproject.toml", "tests/conftest.py", "tests/launch.py")


def sources() -> dict[str, Path]:
    """Return every Python file that a test can import or start, by import name."""
    found = modules()
    for path in (*ROOT.glob("*.py"), *(ROOT / "tests").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def named(path: Path, names: dict[str, Path], files: dict[str, set[str]]) -> set[str]:
    """Return the modules that a file starts: it names them, or their files, in strings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value, f"{node.value}.__main__"} & names.keys()
            found |= files.get(node.value.rpartition("/")[2], set())
    return found


def lazily_imported(path: Path) -> set[str]:
    """Return the modules of the names that a file imports from ``collective`` itself."""
    taken = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken |= {node.attr} if node.value.id == "collective" else set()
        if isinstance(node, ast.ImportFrom) and node.module == "collective":
            taken |= {alias.name for alias in node.names}
    homes = {collective._HOME_OF.get(name, "") for name in taken} - {""}
    return {f"collective.{home}" for home in homes}


@functools.cache
def edges() -> dict[str, set[str]]:
    """Return the modules that each one reaches directly; a package's ``__init__``, too."""
    names = sources()
    files: dict[str, set[str]] = {}
    for name, path in names.items():
        if path.name != "__init__.py":
            files.setdefault(path.name, set()).add(name)
    found = {}
    for name, path in names.items():
        reached = set(imported(path, names)) | lazily_imported(path)
        if name != "tests.launch":  # it starts files that its callers name
            reached |= named(path, names, files if name.startswith("tests.") else {})
        for each in [*reached]:
            parts = each.split(".")
            reached |= {".".join(parts[:n]) for n in range(1, len(parts))}
        if name != "collective":  # its names are lazy; each counts as its own module
            found[name] = reached & names.keys()
    found["collective"] = {"collective.namesake"}
    return found


def reached_from(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Return all modules that a module reaches, itself included."""
    seen, waiting = {name}, [name]
    while waiting:
        new = edges[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def reaching(changed: set[str]) -> list[str]:
    """Return the test files that reach a changed file, as paths from the root."""
    names = sources()
    paths = {name: str(path.relative_to(ROOT)) for name, path in names.items()}
    tests = {n: p for n, p in paths.items() if names[n].name.startswith("test_")}
    if changed & set(EVERYWHERE):
        return sorted(tests.values())
    for folder, file in STANDS_FOR.items():
        if any(path.startswith(folder) for path in changed):
            changed = changed | {file}
    return sorted(
        path
        for name, path in tests.items()
        if changed & {paths[other] for other in reached_from(name, edges())}
    )


def changed_since(commit: str) -> set[str]:
    """Return the files that differ from a commit in this checkout, new ones included."""
    words = (["diff", "--name-only", commit], ["ls-files", "-o", "--exclude-standard"])
    printed = "".join(
        subprocess.check_output(["git", "-C", str(ROOT), *each], text=True)
        for each in words
    )
    return set(printed.split())


if __name__ == "__main__":
    found = reaching(changed_since(*sys.argv[1:] or ["HEAD"]))
    apart = [path for path in found if path.startswith(OWN_TARGET)]
    if apart:
        print("also reached:", *apart, file=sys.stderr)
    if len(found) == len(apart):
        sys.exit("no test of make test reaches what has changed")
    print("\n".join(path for path in found if path not in apart))
