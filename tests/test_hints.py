"""Every HINT of the code: its commands, options and names exist.

The texts are read from the sources: what follows ``HINT:`` in a string, and the argument
``hint`` of errors. Values that are filled in are replaced by an example.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from collective import fit_options
from collective.distribute import command as distribute
from tests import checkout, launch

MAKEFILE = (launch.ROOT / "Makefile").read_text()
# Programs whose options are ours, each with the module whose main prints its help.
OURS = {
    "collectiverun": "collective.launch",
    "train.py": "collective.train",
    "compare.py": "collective.compare",
}
# Of mpirun, Slurm, docker and pip: a hint may name these.
OTHERS = {"--force-reinstall", "--memory", "--map-by", "--no-binary", "--no-deps"}
OTHERS |= {"--mem", "--ntasks-per-node", "--shm-size", "--upgrade", "--with-ft"}
# What a value is replaced by: its source, and an example.
EXAMPLES = {
    "python()": "python script.py",
    "start": "collectiverun -np 2",
    "peer.lower()": "mpi",
    "script_path()": "script.py",
    "_starter(environment)": "collectiverun",
}


def text_of(node: ast.AST) -> str:
    """A string, or the pieces of one with examples in place of values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return EXAMPLES.get(ast.unparse(node.value), "2")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)}; {text_of(node.orelse)}"
    return ""


def hints() -> Iterator[tuple[str, str]]:
    """Yields where a hint is, and its text."""
    for source in checkout.sources(launch.ROOT, (".py",)):
        for node in ast.walk(ast.parse(source.read_text())):
            where = f"{source.relative_to(launch.ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.keyword) and node.arg == "hint":
                yield where, text_of(node.value)
            elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                _, found, hint = text_of(node).partition("HINT: ")
                if found:
                    yield where, hint.replace("%s", "2").replace("%d", "2")


HINTS = sorted({text: where for where, text in hints() if text}.items())


@functools.cache
def parser_of(module: str) -> argparse.ArgumentParser | None:
    """The parser that ``main`` of a module makes; None where it has none."""

    class Made(Exception):
        pass

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Made(parser)

    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    if spec.submodule_search_locations:
        module = f"{module}.__main__"
    if module.startswith("collective.distribute"):
        return distribute.parser()
    main = importlib.import_module(module).main
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", capture),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        mock.patch.object(sys, "argv", [module]),
    ):
        try:
            main(*[[]] * len(inspect.signature(main).parameters))
        except Made as made:
            return made.args[0]
    return None


@functools.cache
def known_options() -> set[str]:
    """Every option of every program of ours."""
    found = set(OTHERS)
    programs = ["doctor", "bench", "recorder", "backends"]
    modules = {*OURS.values(), *(f"collective.{name}" for name in programs)}
    for module in modules:
        if parser := parser_of(module):
            found |= set(parser._option_string_actions)
    return found | set(distribute.parser()._option_string_actions)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a text: up to what ends a clause."""
    verbs = "continues|cuts|shows|starts|trains|with the|without|writes"
    for clause in re.split(rf"[;\n(`]|, |: |\. | or | and | (?={verbs})", text):
        found = re.search(
            r"(?:^|\s)((?:python (?:-m |train\.py|compare\.py)|collectiverun ).*)",
            clause,
        )
        if found:
            words = found[1].rstrip(".,:)`").split()
            words = ["2" if word == "N" else word for word in words]
            if not words[-1].startswith("-n") and words[-1] != "--min-np":
                yield words  # else the option is named, and its value left open


@pytest.mark.parametrize(("text", "where"), HINTS, ids=[where for _, where in HINTS])
def test_what_a_hint_names_exists(text, where):
    for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        assert option in known_options(), f"{where}: {option}"
    for target in re.findall(r"\bmake ([a-z-]+)\b(?= |$|[;,:)])", text):
        words = ("it", "them", "the", "a", "sure", "and", "its", "no")
        assert target in words or f"\n{target}:" in MAKEFILE, f"{where}: make {target}"
    for name in re.findall(r"\bcollective((?:\.[A-Za-z_]\w*)+)", text):
        assert exists(name[1:].split(".")), f"{where}: collective{name}"
    for name in re.findall(r"--set (\w+)=", text):
        assert fit_options.Setting.of(f"{name}=4").value == 4, where
    for page, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", text):
        assert (launch.ROOT / page).is_file(), f"{where}: {page}"
        titles = re.findall(r"^#+ (.*)$", (launch.ROOT / page).read_text(), re.M)
        slugs = {re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title in titles}
        assert not anchor or anchor in slugs, f"{where}: {page}#{anchor}"


def exists(names: list[str]) -> bool:
    """Whether ``collective.NAMES`` is a module, or a name in one."""
    for count in range(len(names), -1, -1):
        module = ".".join(["collective", *names[:count]])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        found = importlib.import_module(module) if names[count:] else object()
        for name in names[count:]:
            found = getattr(found, name, None)
        return found is not None
    return False


COMMANDS = sorted(
    {shlex.join(words): w for text, w in HINTS for words in commands(text)}
)


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_of_a_hint_is_understood(typed):
    """Its program takes its options; what it then does has tests of its own."""
    words = shlex.split(typed)
    if words[0] == "python" and words[1] == "-m":
        program, arguments = words[2], words[3:]
    else:
        program, arguments = (
            words[words[0] == "python"],
            words[1 + (words[0] == "python") :],
        )
    if program == "ensurepip":  # Python's own
        return
    parser = parser_of(OURS.get(program, program))
    if parser is None or arguments == ["--help"]:
        return  # there is such a program; it reads its words itself
    parser.parse_args(arguments)


PLAIN = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
print("trained")
"""


@pytest.mark.launches
@pytest.mark.parametrize("backend", ["tf-parameter-server", "tf-mirrored"])
def test_the_command_of_a_hint_runs_the_script_unedited(backend, tmp_path):
    """It is typed where the first command was, whose script is in another folder."""
    script = tmp_path / "my scripts" / "plain.py"
    script.parent.mkdir()
    script.write_text(PLAIN)
    typed = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
    typed += ["--backend", backend, "my scripts/plain.py"]
    environment = launch.environment()
    refused = subprocess.run(
        typed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2, refused.stderr
    hint = refused.stderr.partition("HINT: ")[2].partition("; or")[0].strip()
    words = shlex.split(hint)
    if words[0] == "collectiverun":
        words[:1] = ["python", "-m", "collective.launch"]
    words[0] = sys.executable
    code, printed = launch.run(words, environment, 120, tmp_path)
    assert code == 0 and printed.count("trained") == 1, f"{hint}\n{printed}"
