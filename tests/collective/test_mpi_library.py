"""The MPI library that a job loads; tests/hosts/test_mpis.py and tests/wheels.py load them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collective import mpi_library
from collective.errors import CollectiveError


@pytest.mark.parametrize(
    "variables, names",
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["libmpi.so.40", "libmpi_abi.so.1"]),
        ({"PMI_RANK": "0"}, ["libmpi.so.12", "libmpi_abi.so.1"]),
        (
            {"PMIX_NAMESPACE": "a", "PMIX_RANK": "0"},
            ["libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1"],
        ),
        ({"PMI_RANK": "0", "COLLECTIVE_LIBMPI": "/a/b.so"}, ["/a/b.so"]),
    ],
)
def test_the_launcher_says_which(monkeypatch, variables, names):
    monkeypatch.setattr(mpi_library, "_folders", lambda: iter(()))
    monkeypatch.setattr(mpi_library, "_loaded", lambda: iter(()))
    assert mpi_library.candidates(variables) == names


class Parent:
    """A process that started this one, in the form of psutil."""

    def __init__(self, program: str):
        self.program = program

    def exe(self) -> str:
        return self.program


@pytest.mark.parametrize(
    "programs, first",
    [
        (["/bin/bash", "/opt/mpi/bin/prted", "/opt/other/bin/mpirun"], "/opt/mpi/lib"),
        (["/opt/mpi/bin/hydra_pmi_proxy"], "/opt/mpi/lib"),
        (["/bin/bash"], f"{sys.prefix}/lib"),
        (["/usr/bin/orterun"], None),  # the loader finds it
    ],
)
def test_the_folder_of_what_started_this_process_is_first(monkeypatch, programs, first):
    monkeypatch.setattr(
        mpi_library.psutil.Process, "parents", lambda _: map(Parent, programs)
    )
    assert next(mpi_library._folders(), None) == (first and Path(first))


def test_no_library_is_said_with_what_was_tried(monkeypatch, tmp_path):
    empty = tmp_path / "libmpi.so.12"
    empty.write_bytes(b"")
    monkeypatch.setenv("COLLECTIVE_LIBMPI", str(empty))
    with pytest.raises(
        CollectiveError, match=r"no MPI library loads on .*too short"
    ) as e:
        mpi_library.load_mpi()
    assert "COLLECTIVE_LIBMPI=" in e.value.hint
    monkeypatch.setenv("COLLECTIVE_LIBMPI", "libc.so.6")
    with pytest.raises(CollectiveError, match=r"libc.so.6 is no MPI library"):
        mpi_library.load_mpi()
