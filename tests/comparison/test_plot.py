"""The picture of a comparison is drawn from whatever was found."""

import sys

import pytest

from collective.comparison import plot, tables
from collective.errors import CollectiveError, UsageError
from tests.comparison.made_up import results


def only_equal():
    found = results(wrong=True)
    found.fast.clear()
    return found


def only_fast():
    found = results()
    found.equal.clear()
    found.fast["2"]["mpi"].parts.clear()
    return found


def not_finite():
    found = results()
    found.equal["float64"].losses["mpi"] = [float("nan"), float("inf")]
    del found.equal["float64"].verdicts["native"]
    return found


@pytest.mark.parametrize("make", [results, only_equal, only_fast, not_finite])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_it_is_drawn(make, kind, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for file in files:
        plot.draw(make(), str(file))
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert files[0].read_bytes().startswith(begins)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_differences_grow_and_have_a_least():
    found = plot._largest_so_far(
        [1.0, 1.1, 2.0, float("nan"), 3.0], [1.0, 1.0, 2.0, 1.0, 3.0]
    )
    assert found == [plot._LEAST, pytest.approx(0.1), pytest.approx(0.1), 1.0, 1.0]


def test_what_cannot_be_drawn_is_named(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(CollectiveError, match="cannot be written") as caught:
        plot.draw(results(), str(tmp_path / "file.docx"))
    assert "--plot FILE.png" in caught.value.hint
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="not installed"):
        plot.check_matplotlib()


@pytest.mark.parametrize(
    ("share", "said"), [(0.05, ""), (0.4, "used 40% of the cores")]
)
def test_other_work_of_the_machine_is_said(share, said):
    found = results()
    found.machine["busy"] = share
    (fast,) = (t for t in tables.tables(found) if t.title == "Fast? 2 replicas")
    assert said in found.busy and bool(said) == bool(found.busy)
    assert any("times say little" in s for s in fast.sentences) == bool(said)
