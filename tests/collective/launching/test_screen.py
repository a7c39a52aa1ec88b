"""A line that all ranks print on stderr is shown once, and nothing else changes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.launch import screen
from collective.launch.screen import Screen, label


class Shown(Screen):
    """A screen whose ranks print into a list."""

    def __init__(self, size):
        super().__init__()
        self.lines = []
        for rank in range(size):
            self.open(rank, lambda *line: self.lines.append(line))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(screen, "WAIT_SECONDS", 1e6)


def test_what_all_print_is_shown_once_when_the_last_has_printed_it():
    shown = Shown(3)
    for rank in (0, 2):
        shown.put(rank, "a warning", True)
    assert shown.lines == []
    shown.put(1, "a warning", True)
    assert shown.lines == [([0, 1, 2], "a warning", True)]


def test_lines_of_some_ranks_keep_their_places():
    shown = Shown(2)
    shown.put(0, "only 0", True)
    shown.put(0, "out", False)
    shown.put(0, "both", True)
    shown.put(0, "out 0", False)
    shown.put(1, "out 1", False)
    shown.put(1, "both", True)
    assert shown.lines == [([1], "out 1", False)]  # rank 1 may still print "only 0"
    shown.flush()
    assert shown.lines == [
        ([1], "out 1", False),
        ([0], "only 0", True),
        ([0], "out", False),
        ([0, 1], "both", True),
        ([0], "out 0", False),
    ]


def test_the_count_of_a_line_is_that_of_each_rank():
    shown = Shown(3)
    for rank, times in enumerate((3, 1, 2)):
        for _ in range(times):
            shown.put(rank, "again", True)
    shown.flush()
    assert [ranks for ranks, *_ in shown.lines] == [[0, 1, 2], [0, 2], [0]]


def test_a_rank_that_has_ended_is_not_waited_for():
    shown = Shown(2)
    shown.put(0, "traceback", True)
    shown.close(0)
    shown.put(1, "traceback", True)
    shown.close(1)
    shown.put(0, "late", False)
    assert shown.lines == [([0, 1], "traceback", True), ([0], "late", False)]


def test_a_line_waits_for_a_second_only(monkeypatch):
    monkeypatch.setattr(screen, "WAIT_SECONDS", 0.01)
    shown = Shown(2)
    shown.put(0, "alone", True)
    while not shown.lines:  # a thread prints them
        time.sleep(0.001)
    assert shown.lines == [([0], "alone", True)]


LINES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.booleans()), max_size=30
)


@settings(deadline=None)
@given(LINES)
def test_nothing_is_lost_and_no_rank_changes_its_order(given_lines):
    shown = Shown(3)
    for line in given_lines:
        shown.put(*line)
    shown.flush()
    for rank in range(3):
        mine = [(text, error) for who, text, error in given_lines if who == rank]
        assert [(t, e) for ranks, t, e in shown.lines if rank in ranks] == mine


def test_labels():
    assert [label([0]), label([2, 0, 1, 5])] == ["[0] ", "[0-2,5] "]
    assert re.fullmatch(r"\[\d\] ", label([7]))
