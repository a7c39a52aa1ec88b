"""Every pair of features trains as stock Keras, or is refused as the table says.

Refusals need no training. ``pairs.py`` trains the pairs that work: ``make test-equivalence``
runs all of them, ``make test`` a few.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re

import keras
import pytest

import collective
from collective import fit_options
from collective.backends.options import Options
from collective.backends.single import SingleBackend
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.training.preparation import compatibility
from tests import launch
from tests.training import pairs

PAIRS = [*itertools.combinations(compatibility.FEATURES, 2)]
REFUSED = [pair for pair in PAIRS if compatibility.why_not(*pair)]
# Features that one process can have, and that do not concern ranks.
TRAINED = [
    pair
    for pair in itertools.combinations(pairs.TRAINED, 2)
    if pair not in REFUSED and pair != ("ledger", "batches")
]
QUICK = {
    frozenset(pair)
    for pair in (
        ("own_step", "look_ups"),
        ("accumulate", "coupled"),
        ("checkpoint", "batches"),
        ("shard_weights", "checkpoint"),
    )
}


@pytest.fixture
def backend() -> SingleBackend:
    return SingleBackend(Options())


@pytest.mark.parametrize("pair", REFUSED, ids=" ".join)
def test_a_pair_of_the_table_is_refused(pair, backend):
    with pytest.raises(UsageError) as caught:
        compatibility.check(pair, backend)
    titles = [compatibility.FEATURES[name].title.split(" (")[0] for name in pair]
    assert all(title in caught.value.message for title in titles)
    assert "; or " in caught.value.hint and caught.value.exit_code == 2


def test_each_pair_says_why():
    for why in compatibility.PAIRS.values():
        assert re.match("[a-z]", why) and not why.endswith(".")
    reasons = {*compatibility.PAIRS.values()}
    assert len(compatibility.FEATURES) <= 15 and len(reasons) <= 12


def test_a_ledger_wants_numbers_of_rows(backend, tmp_path):
    batches = pairs.data({"batches"})
    with pytest.raises(UsageError, match="have none"):
        collective.fit(
            pairs.make({"batches"}), *batches, backend=backend, ledger=tmp_path / "rows"
        )


@pytest.mark.on_ranks
@pytest.mark.usefixtures("clean_keras")
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, marks=[] if frozenset(pair) in QUICK else [pytest.mark.matrix]
        )
        for pair in TRAINED
    ],
    ids=" ".join,
)
def test_a_pair_trains_what_keras_trains(pair, backends_by_name, tmp_path):
    keras.config.set_floatx("float64")
    trained = backends_by_name(pairs.NAME)
    assert pairs.differences(set(pair), trained, tmp_path) == []


@pytest.mark.launches
@pytest.mark.parametrize(
    "chosen", ["quick", pytest.param("all", marks=pytest.mark.matrix)]
)
def test_on_ranks(chosen, tmp_path):
    names = [" ".join(p) for p in TRAINED if chosen == "all" or frozenset(p) in QUICK]
    here = "tests/training/test_compatibility.py"
    tests = [f"{here}::test_a_pair_trains_what_keras_trains[{name}]" for name in names]
    tests += ["-m", "matrix or not matrix"]
    ended = launch.launch("native", 2, tests, tmp_path, seconds=1500)
    assert ended.passed() == len(names)


def test_the_keywords_of_fit_are_the_record():
    """The signature is written out, for editors; this test compares it with the record."""
    words = inspect.signature(collective.fit).parameters
    for field in dataclasses.fields(FitOptions):
        assert words[field.name].default == field.default
        assert words[field.name].annotation == field.type
        assert field.name in fit_options.NAMES
