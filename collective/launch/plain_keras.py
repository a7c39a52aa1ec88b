"""Commands that start a plain Keras script several times: said before it trains.

``collectiverun -np 2 python mine.py`` without ``--keras``, where the script knows nothing of
other ranks: each of them trains a model of its own, and all write the same files.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from collective.errors import UsageError

_TRAINS = re.compile(r"\.(fit|train_on_batch)\(|GradientTape")
_KERAS = re.compile(r"^\s*(import|from)\s+(keras|tensorflow)\b", re.MULTILINE)
# What a script that knows of ranks mentions, by import or by environment.
_KNOWS = re.compile(r"collective|horovod|mpi4py|distribut|_RANK\b|MPI\b|torchrun")
_MOST_FILES = 200  # of the script's folder


def check_program(command: Sequence[str], start: str) -> None:
    """Refuses a script in the place of a program.

    Args:
        start: What was typed before it, as ``collectiverun -np 2``.

    Raises:
        UsageError: With the two lines that may be meant.
    """
    script = command[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return
    if os.path.dirname(script) and os.access(script, os.X_OK):
        return  # it names its interpreter
    raise UsageError(
        f"{script} is a script, not a program",
        hint=f"did you mean: {start} --keras {script} (a Keras script that knows of no "
        f"ranks), or: {start} python {script} (one that calls collective)",
    )


def warning(command: Sequence[str], ranks: int, start: str) -> str:
    """What to say of a command that trains the same model on each rank; else empty."""
    script = _script(command)
    if ranks < 2 or script is None:
        return ""
    texts = list(_texts(script))
    if not texts or any(map(_KNOWS.search, texts)):
        return ""
    whole = "\n".join(texts)
    if not (_KERAS.search(whole) and _TRAINS.search(whole)):
        return ""
    return (
        f"warning: {script} calls neither collective nor horovod: each of the {ranks} "
        "ranks trains a model of its own, and all write the same files\n"
        f"HINT: {start} --keras {script}; or collective.fit(model, ...) in the script"
    )


def _script(command: Sequence[str]) -> Path | None:
    """The script of ``python script.py``; None for other commands."""
    if len(command) < 2 or not re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        return None
    script = Path(command[1])
    return script if script.suffix == ".py" and script.is_file() else None


def _texts(script: Path) -> Iterator[str]:
    """The script's text, and those of the modules beside it that it imports."""
    waiting, seen = [script], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text()
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        yield text
        for name in _imported(tree):
            waiting += script.parent.glob(f"{name}.py")
            waiting += script.parent.glob(f"{name}/**/*.py")


def _imported(tree: ast.AST) -> set[str]:
    """The first words of the modules that are imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
