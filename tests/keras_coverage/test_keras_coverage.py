"""Every public object of Keras that takes part in a training equals stock Keras.

This file starts itself on ranks, where each small model is trained by Keras on rank 0 and
by all ranks together. ``KERAS_TABLE=docs/reference/keras-coverage.md`` writes the page.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import pytest

from collective.training.process.object_collectives import broadcast_object
from tests import launch
from tests.keras_coverage import page
from tests.keras_coverage.case import differences, outcome
from tests.keras_coverage.table import CASES, GROUPED, missing
from tests.test_imports import ROOT
from tests.training.small import on_rank_zero

HERE = "tests/keras_coverage/test_keras_coverage.py"
PAGE = ROOT / "docs/reference/keras-coverage.md"
RESULTS = "TESTS_KERAS_RESULTS"  # the file in which rank 0 writes its results


def test_every_object_has_a_case():
    assert missing() == []


def test_the_page_says_what_is_gathered_and_nothing_may_grow():
    lines = [
        "train: gathered: TopKV2 at a.py:1, 288 bytes, for GatherV2, Mul",
        "train: gathered for a gradient: Mul at b.py:2, 0.2 MB, for AddN",
        "train: 2 gathers, 0.2 MB a step",
    ]
    name = "layers.Dense"
    entries = {name: [{"ranks": 2, "apart": [], "lines": lines}]}
    text = page.text(entries)
    assert page.recorded(text)[name] == (288, 200_000) == page.sent(lines)
    assert page.grown(page.recorded(text), entries) == {}
    more = {name: [{**entries[name][0], "lines": [*lines, lines[0]]}]}
    assert page.grown(page.recorded(text), more) == {
        name: ((288, 200_000), (576, 200_000))
    }
    less = {name: [{**entries[name][0], "lines": lines[1:]}]}
    assert page.grown(page.recorded(text), less) == {}


@pytest.mark.skipif(not launch.launched(), reason="on ranks, which the launch starts")
@pytest.mark.usefixtures("clean_keras")
@pytest.mark.parametrize("names", GROUPED, ids=lambda names: names[0])
def test_is_as_stock_keras(names, backends_by_name, monkeypatch):
    """Several objects share a model, which takes less time; after a failure each is alone."""
    monkeypatch.setenv("COLLECTIVE_EXPLAIN", "1")
    backend = backends_by_name(os.environ[launch.BACKEND])
    found = _compared(names, backend)
    if len(names) > 1 and not broadcast_object(backend, _is_plain(found)):
        results = {name: _compared([name], backend) for name in names}
    else:
        results = dict.fromkeys(names, found)
    if backend.rank == 0 and RESULTS in os.environ:
        with Path(os.environ[RESULTS]).open("a") as file:
            for name, result in results.items():
                entry = {"name": name, "ranks": backend.size, **result}
                print(json.dumps(entry), file=file)
    assert [result for result in results.values() if result["apart"]] == []


def _compared(names: Sequence[str], backend: Any) -> dict[str, Any]:
    """Return the differences, and the lines that explain the steps."""
    cases = [CASES[name] for name in names]
    wanted = on_rank_zero(backend, lambda: _stock(names))
    keras.utils.clear_session(free_memory=False)
    try:
        assert not isinstance(wanted, str), f"stock Keras: {wanted}"
        got, lines = outcome(cases, backend)
    except Exception as error:
        return {"apart": [f"{type(error).__name__}: {error}"], "lines": []}
    return {"apart": differences(got, wanted, cases[0].tolerance), "lines": lines}


def _is_plain(found: dict[str, Any]) -> bool:
    """Return whether all is equal, and only sums are exchanged."""
    return not found["apart"] and not page.exchanged(found["lines"])


def _stock(names: Sequence[str]) -> dict[str, Any] | str:
    """Return stock Keras' results, or its error, once for all launches and ranks."""
    file = Path(
        os.environ[launch.REFERENCE], f"{'-'.join([names[0], names[-1]])}.pickle"
    )
    if not file.exists():
        try:
            found: Any = outcome([CASES[name] for name in names])[0]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        file.write_bytes(pickle.dumps(found))
    return pickle.loads(file.read_bytes())


@pytest.mark.launches
@pytest.mark.keras_coverage
def test_on_ranks(tmp_path):
    file = tmp_path / "results"
    for ranks in (2, 3):
        tests = [f"{HERE}::test_is_as_stock_keras"]
        options = {RESULTS: str(file)}
        ended = launch.launch("native", ranks, tests, tmp_path, seconds=3600, **options)
        assert ended.passed() == len(GROUPED)
    found = page.read(file)
    assert page.grown(page.recorded(PAGE.read_text()), found) == {}
    if table := os.environ.get("KERAS_TABLE"):
        Path(table).write_text(page.text(found))
