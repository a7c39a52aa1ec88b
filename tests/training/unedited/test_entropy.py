"""What asks the system for random numbers gets those of rank 0, but for libraries' names."""

from __future__ import annotations

import contextlib
import os
import sysconfig
from types import SimpleNamespace

from collective.replacements import replacing
from collective.training.unedited.entropy import share_entropy

NAME = """
import tempfile
tempfile._name_sequence = None  # as in a process that has just begun
name = next(tempfile._get_candidate_names())
"""


def drawn(code: str, file: str) -> str:
    """Return the name that code of a file draws on a rank."""
    found: dict = {}
    with contextlib.ExitStack() as stack:
        replace = lambda *args: stack.enter_context(replacing(*args))  # noqa: E731
        share_entropy(SimpleNamespace(replace=replace, shared_names=set()), seed=7)
        exec(compile(code, file, "exec"), found)
    return found["name"]


def test_names_of_temporary_files_are_alike_for_the_script_alone():
    """Else libraries of two ranks would write into one file, or one folder."""
    library = os.path.join(sysconfig.get_path("purelib"), "library", "module.py")
    assert drawn(NAME, "/home/me/script.py") == drawn(NAME, "/home/me/script.py")
    assert drawn(NAME, library) != drawn(NAME, library)


def test_a_generator_without_a_seed_is_alike_for_libraries_too():
    library = os.path.join(sysconfig.get_path("purelib"), "library", "module.py")
    code = "import random\nname = random.Random().random()"
    assert drawn(code, library) == drawn(code, library)
