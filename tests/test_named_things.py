"""Docstrings, comments, HINTs and pages name rooms, files and options that exist."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from docs.hooks.parsers import parser_of
from tests import checkout, test_imports
from tests.test_imports import ROOT

# Programs of ours, as they are typed, and the modules whose ``main`` parses for them.
PROGRAMS = {
    "train.py": "collective.train",
    "compare.py": "collective.compare",
    "collectiverun": "collective.launch.__main__",
    **{
        f"python -m collective.{name}": f"collective.{name}"
        for name in ("train", "compare")
    },
    **{
        f"python -m collective.{name}": f"collective.{name}.__main__"
        for name in ("launch", "bench", "doctor", "recorder")
    },
    "python -m collective.distribute": "collective.distribute.command",
}
# Options of other programs that our texts name.
FOREIGN = {
    "Open MPI's configure": "--with-ft",
    "mpirun": "--bind-to --map-by --oversubscribe --pmixmca --prtemca --mca",
    "Slurm": "--mem --ntasks-per-node --open-mode --overlap --requeue --signal --me",
    "jsrun": "--memory",
    "docker": "--build-arg --ipc --shm-size",
    "pip": "--no-binary --no-deps --force-reinstall --upgrade",
    "pre-commit": "--hook-type",
    "Python": "--check-hash-based-pycs",
    "DeepXDE and DeePMD": "--tf",
}
# Modules, programs and words of others that a room's docstring may name.
OTHERS = re.compile(
    r"(keras|tf|tensorflow|horovod)\.[\w.]+|(collective|horovod)run|test_step|DataParallel"
)
# Files that are a user's, another project's, or made up.
OTHER_FILES = {"mpi.h", "argparse.py", "script.py", "mine.py", "my_code.py"}


# ---- faces: the docstrings of packages ----


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules() -> dict[str, Path]:
    return test_imports.modules()


@functools.cache
def defined(module: str) -> frozenset[str]:
    """Return the names that a module defines or imports at its top."""
    found = set()
    for node in tree_of(modules()[module]).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found.update(n.id for n in names if isinstance(n.ctx, ast.Store))
    return frozenset(found)


def resolves(dotted: str) -> bool:
    """Return whether an absolute name leads to a module, or to a name in one."""
    parts = dotted.split(".")
    known = modules()
    for end in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:end]), parts[end:]
        if module in known:
            return not rest or rest[0] in defined(module) or dotted in public()
    return False


@functools.cache
def public() -> frozenset[str]:
    import collective

    names = collective.__all__
    return frozenset({*names, *(f"collective.{name}" for name in names)})


def exists(name: str, package: str) -> bool:
    """Return whether the docstring of a package may use a name.

    It may be relative to the package or to one that holds it, absolute, public
    (``collective.fit``), or defined in any module of the package.
    """
    if OTHERS.fullmatch(name) or name in public():
        return True
    outer = package.split(".")
    around = [".".join(outer[:end]) for end in range(len(outer), 0, -1)]
    if resolves(name) or any(f"{one}.{name}" in modules() for one in around):
        return True
    if any(resolves(f"{one}.{name}") for one in around):
        return True
    inside = [one for one in modules() if f"{one}.".startswith(f"{package}.")]
    return any(name in defined(one) for one in inside)


def faces() -> Iterator[tuple[str, Path, str]]:
    for name, path in modules().items():
        if path.name == "__init__.py":
            yield name, path, ast.get_docstring(tree_of(path)) or ""


def test_each_name_in_the_docstring_of_a_package_exists():
    gone = [
        f"{package}: {name}"
        for package, path, text in faces()
        for name in re.findall(r"``([\w.]+)``", text)
        if not exists(name.removesuffix(".py"), package)
        and not (path.parent / name).exists()
        and not name.isupper()  # a variable of the environment: test_docs.py
    ]
    assert gone == []


def test_each_dotted_name_of_ours_exists():
    gone = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules().values()
        for line, text in texts(path, "``collective.")
        for name in re.findall(r"``(collective(?:\.\w+)+)", text)
        if not resolves(name) and ".".join(name.split(".")[:2]) not in public()
    ]
    assert gone == []


def test_a_name_that_is_gone_is_found():
    package = "collective.training"
    assert exists("fit", package) and exists("loop.observer", package)
    assert exists("collective.training.partition.rules.owned", package)
    assert exists("training.partition", "collective.training.step")
    assert not exists("forward", "collective.training.step") and not exists(
        "loop.recipe", package
    )


def test_each_room_in_the_picture_of_the_floors_exists():
    """``docs/hooks/figures.py`` lists them: a folder, its task, a colour, its rooms."""
    tree = tree_of(ROOT / "docs" / "hooks" / "figures.py")
    floors = [
        (node.elts[0].value, [room.value for room in node.elts[3].elts])
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 4
        and isinstance(node.elts[3], ast.List)
    ]
    gone = [
        f"{folder}{room}"
        for folder, rooms in floors
        for room in rooms
        if room != "|"
        and not [*(ROOT / folder).glob(room if "*" in room else f"{room}*")]
    ]
    assert len(floors) > 4 and gone == []


def test_each_name_that_programs_outside_of_the_package_import_exists():
    """No test imports all of these, and types are checked in the package alone."""
    rooms = ("benchmarks", "deploy", "docs", "examples")
    gone = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "collective"
        for alias in node.names
        if alias.name != "*" and not importable(f"{node.module}.{alias.name}")
    ]
    assert gone == []


def importable(dotted: str) -> bool:
    """Return whether a name can be imported; lazy modules are not looked into."""
    module = dotted.rpartition(".")[0]
    lazy = module in modules() and "__getattr__" in defined(module)
    return lazy or resolves(dotted)


# ---- options: in HINTs, docstrings, comments and pages ----


def texts(path: Path, sign: str = "--") -> Iterator[tuple[int, str]]:
    """Yield the prose of a file of Python: comments and strings, with their lines.

    A file that does not contain the sign is left out, to save time. A string without a blank is no prose, but a value. Pieces of one string that stand
    on several lines are one text.
    """
    source = path.read_text()
    if sign not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = " ".join(
                str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                for part in node.values
            )
        else:
            continue
        if " " in text:
            yield node.lineno, text


def pages() -> Iterator[tuple[str, str]]:
    """Yield the pages, without the table of what was removed."""
    for page in (*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))):
        if page.name != "CHANGELOG.md":
            text = page.read_text().replace("\\\n", " ")
            removed = r"^\| removed \|.*?\n\n"
            yield page.name, re.sub(removed, "", text, flags=re.M | re.S)


@functools.cache
def options(program: str) -> frozenset[str]:
    actions = parser_of(PROGRAMS[program])._actions
    own = {option for action in actions for option in action.option_strings}
    if program == "compare.py":  # it passes these on
        own |= options("train.py")
    return frozenset(own)


@functools.cache
def all_options() -> frozenset[str]:
    foreign = {option for line in FOREIGN.values() for option in line.split()}
    ours = [
        *modules().values(),
        *(p for room in ("benchmarks", "tests") for p in (ROOT / room).rglob("*.py")),
    ]
    declared = {
        argument.value
        for path in ours
        if re.search(r"argparse|sys\.argv|add", path.read_text())
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")).startswith("add")
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    return frozenset(foreign | declared).union(*map(options, PROGRAMS))


OPTION = r"--?[a-z][\w-]*"
# A program, and the options that stand directly behind it, each with at most one value.
COMMAND = re.compile(
    rf"(?<![\w.])({'|'.join(map(re.escape, PROGRAMS))})((?: +{OPTION}(?:[= ][^-\s]\S*)?)+)"
)


def unknown_options(text: str) -> list[str]:
    """Return the options that a text gives to one of our programs, or to none, wrongly."""
    wrong = [
        f"{program} {option}"
        for program, given in COMMAND.findall(text)
        for option in re.findall(rf"(?<= ){OPTION}", given)
        if option not in options(program)
    ]
    alone = re.findall(r"(?<![\w<-])--[a-z][\w-]*[a-z](?!-->)\b", text)
    return wrong + [option for option in alone if option not in all_options()]


def test_each_option_that_a_text_names_exists():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in modules().values()
        for line, text in texts(path)
        for option in unknown_options(text)
    ]
    wrong += [
        f"{page}: {option}"
        for page, text in pages()
        for option in unknown_options(text)
    ]
    assert wrong == []


# ---- files: in docstrings and comments ----

FILE = re.compile(r"(?<![\w/.<*+-])((?:[\w-]+/)*[\w-]+\.(?:py|cc|h))\b")


def commented(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file of C++, line by line."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if comment := re.search(r"//.*|^ *(?:/\*|\*).*", line):
            yield number, comment[0]


def test_each_file_that_a_comment_names_exists():
    files = {f"/{name}" for name in checkout.names()}
    ends = {name[at:] for name in files for at in range(len(name)) if name[at] == "/"}
    native = ROOT / "collective" / "native"
    proses = {
        **{path: texts(path, "py") for path in modules().values()},
        **{path: commented(path) for path in native.rglob("*.[ch]*")},
    }
    gone = [
        f"{path.relative_to(ROOT)}:{line}: {file}"
        for path, prose in proses.items()
        for line, text in prose
        for file in FILE.findall(text)
        if f"/{file}" not in ends and file.split("/")[-1] not in OTHER_FILES
    ]
    assert gone == []
