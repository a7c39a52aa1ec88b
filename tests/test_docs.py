"""The docs are true: scripts run, links resolve, commands and names exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from docs.hooks.parsers import parser_of
from tests import launch

ROOT = launch.ROOT
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ROOT / "hostfiles" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FLOORS = ("collective", "backends")
SOURCES = [
    path
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*")
    if path.suffix in (".py", ".cc", ".h") and not path.is_symlink()
]
# Filled in by docs/hooks/reference.py: no link or option can be read from the page.
PROGRAMS = {
    "train.py": "collective.train",
    "compare.py": "collective.compare",
    "collectiverun": "collective.launch.__main__",
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page that are in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for language, text in found if language in languages]


def anchors(page: Path) -> set[str]:
    """Return the names that a link to a page may have after its #."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles)
    return {re.sub(r"[\s-]+", "-", title) for title in plain}


@pytest.mark.launches
def test_the_script_of_the_home_page_runs(tmp_path):
    (script,) = blocks(ROOT / "docs" / "index.md", "python")
    assert sum(map(bool, script.splitlines())) <= 12
    (tmp_path / "my_script.py").write_text(script)
    command = [sys.executable, "-m", "collective.launch", "-np", "2"]
    code, printed = launch.run(
        [*command, sys.executable, str(tmp_path / "my_script.py")],
        launch.environment(forked=True),
        120,
    )
    assert code == 0, printed
    losses = re.findall(r"^\[\d\] native \[([\d.e, -]+)\]$", printed, re.M)
    assert len(losses) == 2 and losses[0] == losses[1], printed
    numbers = [float(number) for number in losses[0].split(",")]
    assert len(numbers) == 5 and numbers[-1] < numbers[0] / 2


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {link}"
        generated = target.suffix == ".md" and "<!-- " in target.read_text()
        if anchor and not generated:
            assert anchor in anchors(target), f"{name(page)}: {link}"


def test_every_variable_is_in_the_reference():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    named = set(re.findall(r"\b(?:COLLECTIVE|HOROVOD)_[A-Z0-9_]+", page))
    used = set()
    for source in SOURCES:
        for variable in re.findall(
            r"\b((?:COLLECTIVE|HOROVOD)_[A-Z0-9_]+[A-Z0-9])\b", source.read_text()
        ):
            if not re.search(r"_H$|^COLLECTIVE_(EXPORT|INLINE)$", variable):
                used.add(variable)
    assert len(used) > 50
    assert used - named == set()
    built = (ROOT / "CMakeLists.txt").read_text()
    gone = {variable for variable in named - used if variable not in built}
    assert gone == set(), "no longer in the code"


def test_pages_that_the_code_names_exist():
    names = {
        found
        for source in SOURCES
        for found in re.findall(r"\bdocs/[\w./-]+\.(?:md|json)", source.read_text())
    }
    assert names
    assert [found for found in sorted(names) if not (ROOT / found).is_file()] == []


def test_files_that_the_pages_name_exist():
    folders = "collective|backends|benchmarks|deploy|tests|examples"
    named = re.compile(
        rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\.(?:py|cc|h|yaml|sbatch))\b"
    )
    gone = [
        f"{name(page)}: {found}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for found in named.findall(page.read_text())
        if not (ROOT / found).is_file()
    ]
    assert gone == []


def test_the_reference_has_every_public_name():
    import collective

    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = set(re.findall(r"\bcollective\.(\w+)", page))
    assert set(collective.__all__) - named == set()


def hook():
    """Return the module that fills the reference from the parsers."""
    pytest.importorskip("mkdocs")
    path = ROOT / "docs" / "hooks" / "reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_for_users_of_keras_has_every_argument():
    """The rows of its tables are the arguments of fit, evaluate and predict."""
    page = (ROOT / "docs/how-to/from-model-fit.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.M)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    for path in ("fit", "evaluate", "predict"):
        tree = ast.parse(
            (ROOT / "collective/training/calls" / f"{path}.py").read_text()
        )
        function = path
        (found,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        arguments = {a.arg for a in (*found.args.args, *found.args.kwonlyargs)}
        assert arguments - named == set(), function


def test_commands_use_options_that_exist():
    options = {
        program: {
            option
            for action in parser_of(module)._actions
            for option in action.option_strings
        }
        for program, module in PROGRAMS.items()
    }
    options["compare.py"] |= options["train.py"]
    checked = 0
    for page in PAGES:
        for block in blocks(page, "", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                try:
                    words = shlex.split(line, comments=True)
                except ValueError:
                    continue
                program = None
                for word in words:
                    word = word.removeprefix("./")
                    if word in PROGRAMS:
                        program = word
                    elif word in ("python", "mpirun", "srun", "horovodrun"):
                        program = None
                    elif program and re.match(r"--?[a-z]", word):
                        option = word.partition("=")[0]
                        assert option in options[program], f"{name(page)}: {line}"
                        checked += 1
    assert checked > 40


def test_python_of_the_pages_parses_and_names_what_exists():
    import collective

    seen = 0
    for page in PAGES:
        for block in blocks(page, "python"):
            for node in ast.walk(ast.parse(block)):
                if not isinstance(node, ast.Attribute):
                    continue
                if isinstance(node.value, ast.Name) and node.value.id == "collective":
                    assert node.attr in collective.__all__, f"{name(page)}: {node.attr}"
                    seen += 1
    assert seen >= 5
