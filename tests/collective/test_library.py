"""The native library fits the Python code that loads it, and the sources next to it."""

import ctypes
import os

import pytest

from collective import library
from collective.errors import CollectiveError
from tests.launch import NEEDS_CORE

pytestmark = [
    pytest.mark.skipif("COLLECTIVE_RANK" in os.environ, reason="the same on all ranks"),
    NEEDS_CORE,
]


def test_a_library_of_other_sources_is_found_out(tmp_path, monkeypatch):
    core = library.load()
    assert not library.stale(core)
    native = tmp_path / "collective" / "native"
    native.mkdir(parents=True)
    assert library.source_digest(tmp_path) is None  # as in site-packages
    (tmp_path / "CMakeLists.txt").write_text("project(collective)\n")
    (native / "core.cc").write_text("int one;\n")
    (native / "core.h").write_text("extern int one;\n")
    before = library.source_digest(tmp_path)
    (native / "core.cc").write_text("int two;\n")
    assert library.source_digest(tmp_path) not in (before, None)
    monkeypatch.setattr(library, "source_digest", lambda: before)
    with pytest.warns(RuntimeWarning, match="make core"):
        library._check_source(core)


def test_a_library_without_a_digest_is_refused():
    with pytest.raises(CollectiveError, match="older sources"):
        library._check_source(ctypes.CDLL("libc.so.6"))


def test_without_the_extension_the_message_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "path", lambda: tmp_path / "libcollective.so")
    with pytest.raises(
        CollectiveError, match=r"no collective_python.abi3.so"
    ) as raised:
        library.extension.__wrapped__()
    assert "python3-dev" in raised.value.hint
