"""A line that all ranks print on stderr is shown once, and nothing else changes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.launch import likeness, screen
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


class OneProgram(Shown):
    """Ranks that run one program."""

    def __init__(self, size):
        Screen.__init__(self, one_program=True)
        self.lines = []
        for rank in range(size):
            self.open(rank, lambda *line: self.lines.append(line))


def test_a_late_line_of_another_rank_is_left_out_and_kept():
    shown = OneProgram(2)
    shown.put(0, "a warning", True)
    shown.put(0, "a warning", True)
    shown.flush()
    for _ in range(3):
        shown.put(1, "a warning", True)
    shown.flush()
    assert [ranks for ranks, *_ in shown.lines] == [[0], [0], [1]]
    assert [*shown.repeated[1]] == ["a warning"] * 2 and not shown.repeated[0]


def test_a_bar_does_not_wait_for_other_ranks():
    shown = OneProgram(2)
    shown.put(0, " 10%|#  |\r", True)
    assert [text for _, text, _ in shown.lines] == [" 10%|#  |\r"]


@given(LINES)
def test_a_line_of_one_program_is_shown_as_often_as_one_rank_prints_it(given_lines):
    shown = OneProgram(3)
    for line in given_lines:
        shown.put(*line)
    shown.flush()
    for text in "abc":
        counts = [given_lines.count((rank, text, True)) for rank in range(3)]
        assert sum(line[1:] == (text, True) for line in shown.lines) == max(counts)
        out = [
            (rank, text)
            for rank, t, error in given_lines
            if (t, error) == (text, False)
        ]
        assert sum(line[1:] == (text, False) for line in shown.lines) == len(out)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2026-11-28 10:00:01,250 WARNING x", "2026-11-28 10:00:02,001 WARNING x"),
        ("2026-11-28T10:00:01Z x", "2026-11-28T10:00:02Z x"),
        ("I0000 00:00:1764.25     100 port.cc:153] x", "I0000 00:00:1764.75  101 port.cc:153] x"),
        ("W0000 00:00:1764.25    4711 port.cc:153] x", "W0000 00:00:1764.75 4712 port.cc:153] x"),
        ("2026-11-28 10:00:01.25: I tensorflow/x.cc:1] x", "2026-11-28 10:00:01.5: I tensorflow/x.cc:1] x"),
        ("[4711] x", "[4712] x"),
        ("pid=12 x", "pid=13 x"),
        ("<A at 0x7f00aa001200>", "<A at 0x7f00aa001300>"),
    ],
)  # fmt: skip
def test_times_and_processes_make_no_other_line(one, other):
    assert likeness.common(one, 4711) == likeness.common(other, 4712)
    assert likeness.common(f"{one}!", 4711) != likeness.common(other, 4712)


@pytest.mark.parametrize("text", ["step 7: loss 0.25", "epoch 4711/9000", "10:30"])
def test_other_numbers_do(text):
    assert likeness.common(text, 7) == text


BAR = " 50%|#####     | 5/10 [00:01<00:01, 4.9it/s]"


@pytest.mark.parametrize(
    ("printed", "left"),
    [
        ("a\nb\n", ["a\n", "b\n"]),
        (f"a\n\r{BAR}\r{BAR}\nb\n", ["a\n", "b\n"]),
        (f"\r{BAR}WARNING: x\n", ["WARNING: x\n"]),
        (f"\r{BAR}\r{' ' * 40}\rWARNING: x\n\n", ["WARNING: x\n", "\n"]),
        ("\r7it [00:01, 4.9it/s]\n", []),
        ("\rloss [0.5] of step 3\n", ["loss [0.5] of step 3\n"]),
    ],
)
def test_messages_are_what_is_no_bar(printed, left):
    assert [*likeness.messages(printed.splitlines(keepends=True))] == left
