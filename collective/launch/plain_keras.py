"""Warns about a plain Keras script that is started like one that knows about ranks.

If the script of ``collectiverun -np 2 python mine.py`` (without ``--keras``) does not use
ranks, each rank trains a model of its own, and all write the same files.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.errors import UsageError

_TRAINS = {"fit", "train_on_batch", "GradientTape"}
_KERAS = {"keras", "tensorflow"}
# Names that a script which uses ranks imports, calls or reads from its environment.
_KNOWS = {"collective", "horovod", "mpi4py"}
_STRATEGIES = {"MultiWorkerMirroredStrategy", "ParameterServerStrategy"}
_VARIABLE = re.compile(r"([A-Z]+_)*RANK|TF_CONFIG")
_MOST_FILES = 200  # files of the script's folder that are read
# Flags of Python whose value is the next word.
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


@dataclass(frozen=True)
class Program:
    """A Python program within a command: its words, and its source."""

    python: Sequence[str]  # the interpreter and its flags; may be empty
    words: Sequence[str]  # the script, or -m and a module
    arguments: Sequence[str]
    path: Path | None  # None if this folder does not have it
    folder: Path  # from which it imports

    @property
    def typed(self) -> str:
        """Return the words that follow ``--keras`` to run the program unedited."""
        module = ["python"] if self.words[0] == "-m" else []
        return " ".join([*module, *self.words])

    @classmethod
    def of(cls, command: Sequence[str]) -> Program | None:
        """Parse ``[python [flags]] script.py`` or ``python [flags] -m module``; else None."""
        python, words = _split(command)
        if len(words) > 1 and words[0] == "-m" and python:
            name = words[1].replace(".", "/")
            files = [Path(f"{name}.py"), Path(name, "__main__.py")]
            path = next((file for file in files if file.is_file()), None)
            return cls(python, words[:2], words[2:], path, Path())
        if not words or not words[0].endswith(".py"):
            return None
        script = Path(words[0])
        path = script if script.is_file() else None
        return cls(python, words[:1], words[1:], path, script.parent)

    def sources(self) -> Iterator[tuple[str, ast.AST]]:
        """Yield text and syntax tree of the program and of the modules that it imports.

        Only modules of its own folder count.
        """
        waiting, seen = [self.path] if self.path else [], set[Path]()
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
            yield text, tree
            for name in _imported(tree):
                for folder in {self.folder, path.parent}:
                    waiting += folder.glob(f"{name}.py")
                    waiting += folder.glob(f"{name}/**/*.py")


def start_of(ranks: int | None) -> str:
    """Return the words to type in front of a command."""
    return f"collectiverun -np {ranks}" if ranks else "collectiverun"


def is_python(word: str) -> bool:
    """Return whether a word of a command names a Python interpreter."""
    return re.fullmatch(r"python[\d.]*", Path(word).name) is not None


def check_program(command: Sequence[str], start: str) -> None:
    """Refuse a script that stands in place of a program.

    Args:
        start: The words typed before it, such as ``collectiverun -np 2``.

    Raises:
        UsageError: It shows the two lines that the user may mean.
    """
    script = command[0]
    if not script.endswith(".py") or not os.path.isfile(script):
        return
    if os.path.dirname(script) and os.access(script, os.X_OK):
        return  # the script names its interpreter
    raise UsageError(
        f"{script} is a script, not a program",
        hint=f"did you mean: {start} --keras {script} (a Keras script that knows of no "
        f"ranks), or: {start} python {script} (one that calls collective)",
    )


def warning(command: Sequence[str], ranks: int, start: str) -> str:
    """Return a warning for a command that trains a model of its own on each rank; or ''."""
    program = Program.of(command)
    if ranks < 2 or program is None:
        return ""
    words = set[str]()
    for _, tree in program.sources():
        words |= _imported(tree) | _names(tree)
        if words & (_KNOWS | _STRATEGIES):
            return ""
    if not (words & _KERAS and words & _TRAINS):
        return ""
    return (
        f"warning: {program.typed} calls neither collective nor horovod: each of the "
        f"{ranks} ranks trains a model of its own, and all write the same files\n"
        f"HINT: {start} --keras {program.typed}; or collective.fit(model, ...) in it"
    )


def none_joined(command: Sequence[str], ranks: int, start: str) -> str:
    """Return a message for a Python program that ended and of which no rank joined."""
    if ranks < 2 or not any(map(is_python, command)):
        return ""
    program = Program.of(command)
    typed = program.typed if program else "script.py"
    return (
        f"none of the {ranks} ranks joined the job: each ran the whole program by itself, "
        f"and nothing was distributed\nHINT: a Keras script: {start} --keras {typed}; "
        "others call collective.fit or collective.init"
    )


def misplaced(
    command: Sequence[str], options: Mapping[str, bool], keras: bool, start: str
) -> str:
    """Return a warning about options of the launcher that follow the script; or ''.

    Args:
        options: Names of the launcher's options, and whether each takes a value.
        keras: Whether the script is one that does not use ranks. Other scripts often have
            options with these names, as ``train.py --backend`` does; only a few are safe.
    """
    program = Program.of(command)
    if program is None:
        return ""
    wanted = options.keys() if keras else {"-np", "--keras"}
    found: dict[str, str] = {}
    for word, after in itertools.pairwise([*program.arguments, ""]):
        name = word.partition("=")[0]
        if name in wanted:
            found[name] = f"{word} {after}" if options[name] and name == word else word
    texts = [text for text, _ in program.sources()] if found else []
    found = {n: w for n, w in found.items() if not any(_takes(t, n) for t in texts)}
    if not found:
        return ""
    typed = program.typed
    mode = ["--keras"] if keras and "--keras" not in found else []
    return (
        f"warning: {', '.join(found)} after {typed} goes to the script, and not to "
        f"collectiverun\nHINT: {' '.join([start, *mode, *found.values(), typed])}"
    )


def _takes(text: str, option: str) -> bool:
    """Return whether a source has an option's name in quotes, as parsers ask for it."""
    name = re.escape(option.lstrip("-")).replace(r"\-", "[-_]")
    return re.search(rf"""["']-*{name}["']""", text) is not None


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split Python and its flags off; flags may be joined as in ``-uW ignore``."""
    python, words = [], list(command)
    if words and is_python(words[0]):
        python.append(words.pop(0))
        while words and words[0].startswith("-") and words[0] not in ("-", "-c", "-m"):
            python.append(flag := words.pop(0))
            if words and (flag in _WITH_VALUE or re.fullmatch("-[a-zA-Z]+[WX]", flag)):
                python.append(words.pop(0))
    return python, words


def _imported(tree: ast.AST) -> set[str]:
    """Return the first words of imported modules, and the names imported from them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if alias.name != "*"}
            if node.module:
                found.add(node.module.split(".")[0])
    return found


def _names(tree: ast.AST) -> set[str]:
    """Return attributes that are read; ``collective`` for a variable of a rank."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and _VARIABLE.fullmatch(str(node.value)):
            found.add("collective")
    return found
