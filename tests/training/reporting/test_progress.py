"""Progress bars on a terminal; elsewhere lines without control characters."""

from __future__ import annotations

import types

import pytest

import collective
from collective.training.loop import progress
from tests.training import small


@pytest.mark.parametrize(
    "asked, on_terminal, elsewhere",
    [("auto", 1, 2), (1, 1, 2), ("1", 1, 2), (2, 2, 2), ("0", 0, 0), (0, 0, 0)],
)
def test_a_bar_is_for_a_terminal(asked, on_terminal, elsewhere, monkeypatch):
    for terminal, wanted in ((True, on_terminal), (False, elsewhere)):
        monkeypatch.setattr(progress, "is_terminal", lambda t=terminal: t)
        assert progress.verbosity(asked) == wanted


def test_an_epoch_of_unknown_length_has_its_line(capsys):
    position = types.SimpleNamespace(backend=types.SimpleNamespace(rank=0), step=7)
    bar = progress.ProgressBar(position, 1, 1)
    bar.begin_epoch(0, 0, progress.ENDLESS)
    bar.end_epoch(0, {"loss": 0.5})
    assert capsys.readouterr().out.startswith("7/7 - 0s - ")


def test_nothing_that_is_printed_into_a_pipe_steers_a_terminal(capsys):
    model, (x, y) = small.model()(), small.rows(16)
    collective.fit(model, x, y, 4, epochs=2, verbose=1, backend="single")
    collective.evaluate(model, x, y, 4, verbose=1, backend="single")
    collective.predict(model, x, 4, verbose=1, backend="single")
    printed = capsys.readouterr().out
    assert printed.count("4/4 - ") == 4, printed
    assert not {"\x1b", "\b", "\r"} & set(printed)
