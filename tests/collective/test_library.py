"""The native library fits the Python code that loads it, and the sources beside it."""

import ctypes
import os

import pytest

from collective import library
from collective.errors import CollectiveError
from collective.recorder import memory

pytestmark = [
    pytest.mark.skipif("COLLECTIVE_RANK" in os.environ, reason="the same on all ranks"),
    pytest.mark.skipif(not library.path().exists(), reason="the core was not built"),
]


def test_the_structures_are_laid_out_alike():
    library.check_layout(library.load(), library.Tensor, "collective_tensor")
    library.check_layout(library.load(), library.Request, "collective_request")
    memory.check_layout()


# The first two swap fields, or widen one, so that the size stays; then one is missing.
@pytest.mark.parametrize(
    "fields",
    [
        lambda old: [old[1], old[0], *old[2:4], ("dtype", ctypes.c_int64)],
        lambda old: [*old[:3], ("dimensions", ctypes.c_int64), *old[3:4]],
        lambda old: old[:-1],
    ],
    ids=["wider", "moved", "missing"],
)
def test_a_structure_that_differs_is_refused(fields):
    class Other(ctypes.Structure):
        _fields_ = tuple(fields(list(library.Tensor._fields_)))

    with pytest.raises(CollectiveError, match="collective_tensor") as raised:
        library.check_layout(library.load(), Other, "collective_tensor")
    assert "make core" in raised.value.hint


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
