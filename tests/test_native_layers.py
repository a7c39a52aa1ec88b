"""The C++ core's layers: a file includes files of its own layer or of lower ones."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_imports import circles

NATIVE = Path(__file__).resolve().parent.parent / "collective/native"
# From the lowest: folders, and loose files by their stems.
LAYERS = (
    ("clock", "failure", "plan"),
    ("kernels",),
    ("rendezvous",),
    ("recorder", "network"),
    ("membership",),
    ("transport",),
    ("communicator",),
    ("algorithms",),
    ("queue",),
    ("core",),
    ("c_api",),
    ("bindings",),
)
# Further files of the C interface.
C_API = {"session", "c_api_recorder", "c_api_timing", "source"}
LAYER_OF = {part: i for i, layer in enumerate(LAYERS) for part in layer}


def part(file: str) -> str:
    """Return the folder of a file, or the stem of a loose file."""
    first = file.split("/")[0].split(".")[0]
    return "c_api" if first in C_API else first


def included() -> dict[str, set[str]]:
    """Return by file the files of the core that it includes."""
    files = [*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")]
    names = {file.relative_to(NATIVE).as_posix(): file for file in files}
    pattern = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
    return {
        name: {other for other in pattern.findall(file.read_text()) if other in names}
        for name, file in names.items()
    }


def parts() -> dict[str, set[str]]:
    """Return by folder the folders of which it includes files."""
    found: dict[str, set[str]] = {one: set() for one in LAYER_OF}
    for name, others in included().items():
        found[part(name)] |= {part(other) for other in others} - {part(name)}
    return found


def test_the_core_opens_no_connection_to_another_host():
    """Between hosts bytes travel only by MPI (docs/reference/security.md)."""
    network = re.compile(r"AF_INET|sockaddr_in|getaddrinfo|<netinet/|<arpa/")
    files = [*NATIVE.rglob("*.h"), *NATIVE.rglob("*.cc")]
    assert [file for file in files if network.search(file.read_text())] == []
    assert [file for file in files if "AF_UNIX" in file.read_text()]


def test_each_part_has_a_layer():
    assert set(LAYER_OF) == {part(name) for name in included()}


def test_no_circle_of_folders():
    assert not circles(parts())


def test_nothing_includes_a_higher_layer():
    upward = {
        f"{name} includes {other}"
        for name, others in included().items()
        for other in others
        if LAYER_OF[part(other)] > LAYER_OF[part(name)]
    }
    assert not upward


def test_the_bindings_use_the_c_interface():
    allowed = {"bindings", "c_api", "failure", "kernels", "plan", "recorder"}
    assert parts()["bindings"] <= allowed
