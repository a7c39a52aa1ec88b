"""Memory that a launcher shares with its ranks, and the effect of a stale variable."""

import os
import resource

import pytest

from collective.distribute import command
from collective.elastic import membership_file, wait_report
from collective.elastic.membership_file import JOINED, MembershipFile
from collective.errors import UsageError
from tests.collective.unlaunched_ranks import Ranks
from tests.launch import NEEDS_CORE, NOT_ON_RANKS


@pytest.fixture
def stale(tmp_path, monkeypatch):
    """Set a variable to the name of another program's file; return that file."""

    def point(variable, inode=None, text=b"e" * 100):
        file = tmp_path / "precious"
        file.write_bytes(text)
        opened = os.open(file, os.O_RDWR)
        inode = os.fstat(opened).st_ino if inode is None else inode
        monkeypatch.setenv(variable, f"/proc/{os.getpid()}/fd/{opened}:{inode}")
        return file

    return point


def test_a_rank_and_its_launcher_read_each_other(monkeypatch):
    board = MembershipFile(3)
    monkeypatch.setenv(membership_file.VARIABLE, board.path)
    monkeypatch.setenv("COLLECTIVE_RANK", "2")
    membership_file.write_state(JOINED)
    assert [board.read(rank) for rank in range(3)] == [b"", b"", JOINED]
    board.ask_to_restart(2)
    assert membership_file.read_state() == membership_file.RESTART
    report = wait_report.WaitReport()
    monkeypatch.setenv(wait_report.VARIABLE, report.path)
    assert not report.waits() and report.works()
    with wait_report.reported_wait():
        assert report.waits() and not report.works()


def test_a_rank_that_fails_with_others_waits_for_the_end_of_one(monkeypatch):
    board = MembershipFile(3)
    monkeypatch.setenv(membership_file.VARIABLE, board.path)
    board.note_exit(2)  # before
    assert membership_file.count_exited() == 1
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        board.note_exit(0)

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert not command._ends_with_rank_zero(0) and not waits
    assert command._ends_with_rank_zero(1)
    assert len(waits) == 1


def test_a_limit_on_the_size_of_files_is_named():
    """Memory that processes share counts as a file."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        with pytest.raises(UsageError, match="File too large") as refused:
            MembershipFile(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "ulimit -f" in refused.value.hint


@pytest.mark.parametrize("inode", [None, 1], ids=["of the same inode", "of another"])
def test_a_stale_variable_changes_no_file_of_another_program(inode, stale, monkeypatch):
    monkeypatch.setenv("COLLECTIVE_RANK", "3")
    file = stale(membership_file.VARIABLE, inode)
    membership_file.write_state(JOINED)
    assert membership_file.read_state() == b""
    stale(wait_report.VARIABLE, inode)
    with wait_report.reported_wait():
        pass
    assert file.read_bytes() == b"e" * 100


# Counts the mappings of a process after each of some jobs.
AGAIN = """
    import collective, numpy as np
    counts = []
    for _ in range(6):
        collective.init()
        assert collective.allreduce(np.ones(3), collective.Sum)[0] == 2
        collective.shutdown()
        counts.append(len(open("/proc/self/maps").readlines()))
    print(counts[-1] - counts[2])
"""


@pytest.mark.launches
@NOT_ON_RANKS
@NEEDS_CORE
def test_the_core_reads_only_its_launcher_s_file_and_maps_it_once(stale):
    # A foreign file has "e" for "exited" everywhere: each rank would be alone.
    stale(membership_file.VARIABLE)
    foreign = Ranks(2, AGAIN)
    board = MembershipFile(2)
    own = Ranks(2, AGAIN, COLLECTIVE_BOARD=board.path)
    for code, out, err in foreign.finish() + own.finish():
        assert code == 0, err
        assert int(out) < 3, out  # after three jobs
