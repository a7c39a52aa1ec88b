"""The page of replaced attributes has each place in the code that replaces one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/explanation/replaced-attributes.md"
_CALLS = {"replacing", "job.replace", "replace_for"}
# Attributes of objects that the code itself makes, or of the project's own classes.
OWN = {
    ("collective/distribute/datasets.py", "distribute_dataset"),
    ("collective/training/keras_compat/traced.py", "traced"),
    ("collective/tensorflow/gradients.py", "DistributedGradientTape"),
    ("backends/base.py", "Backend"),
    ("collective/training/unedited/script_job.py", "ScriptJob"),
}
#: More entries are a sign that something should be done in another way.
MOST = 42


def replaces(node: ast.AST) -> bool:
    """Return whether it replaces an attribute by name, a private one, or a class."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in _CALLS
    targets = node.targets if isinstance(node, ast.Assign) else []
    flat = [t for target in targets for t in getattr(target, "elts", [target])]
    return any(
        t.attr == "__class__" or (t.attr[0] == "_" and t.attr[:2] != "__")
        for t in flat
        if isinstance(t, ast.Attribute)
        if t.attr == "__class__" or ast.unparse(t.value) not in ("self", "cls")
    )


def in_code() -> Iterator[tuple[str, str]]:
    for folder in ("collective", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith("collective/backends/"):
                continue  # a link
            for top in ast.parse(path.read_text()).body:
                if isinstance(top, ast.FunctionDef | ast.ClassDef) and any(
                    map(replaces, ast.walk(top))
                ):
                    yield name, top.name


def on_page() -> list[tuple[str, str]]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = line.split(" | ")
        for file, names in re.findall(
            r"`(\S+\.py)`: ([^;]+)", cells[1] if cells[1:] else ""
        ):
            found += [(file, name) for name in re.findall(r"`(\w+)`", names)]
    return found


def test_the_page_has_every_place():
    assert set(in_code()) - OWN - set(on_page()) == set()


def test_every_place_of_the_page_is_there():
    for file, name in on_page():
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.M), (
            file
        )


def test_there_are_few():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) <= MOST
