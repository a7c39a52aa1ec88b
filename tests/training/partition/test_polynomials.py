"""Sizes with symbols against numbers: each property holds for every value of the symbols."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from collective.training.partition.sizes import (
    Size,
    Symbol,
    above_zero,
    agreed,
    is_natural,
    product,
    quotient,
    symbolic,
    total,
)


class Value:
    """A value of the graph that has an axis of unknown size."""

    def __init__(self, is_nested=False):
        self.is_nested = is_nested


ROWS = Symbol("rows")
TIME, WIDTH = Symbol("time", (Value(), 1)), Symbol("width", (Value(True), 0))
SYMBOLS = (ROWS, TIME, WIDTH)
many = settings(deadline=None, max_examples=200)

numbers = st.integers(-4, 6)
# A batch has a row; the other axes may be empty.
places = st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)).map(
    lambda counts: dict(zip(SYMBOLS, counts, strict=True))
)
monomials = st.lists(st.sampled_from(SYMBOLS), max_size=3).map(
    lambda found: product(map(symbolic, found))
)
terms = st.builds(lambda factor, monomial: factor * monomial, numbers, monomials)
sizes = st.lists(terms, max_size=4).map(total)


def value(size, at):
    """Return the number that a size stands for, given the numbers of the symbols."""
    if isinstance(size, int):
        return size
    return sum(
        factor * math.prod(_of(symbol, at) for symbol in monomial)
        for monomial, factor in size.terms.items()
    )


def _of(symbol, at):
    return at[symbol] if symbol in at else max(value(symbol.excess, at), 0)


@many
@given(sizes, sizes, places)
def test_arithmetic_is_that_of_the_numbers(a, b, at):
    assert value(a + b, at) == value(a, at) + value(b, at)
    assert value(a - b, at) == value(a, at) - value(b, at)
    assert value(a * b, at) == value(a, at) * value(b, at)
    assert value(-a, at) == -value(a, at)
    assert value(3 - a, at) == 3 - value(a, at)


@many
@given(st.lists(sizes, max_size=4), places)
def test_sums_and_products_of_many(found, at):
    assert value(total(found), at) == sum(value(size, at) for size in found)
    assert value(product(found), at) == math.prod(value(size, at) for size in found)


@many
@given(sizes, sizes, sizes)
def test_equal_polynomials_are_one_size(a, b, c):
    """Those that are made in other ways are equal, too; a number is an ``int``."""
    for one, other in (
        (a * (b + c), b * a + a * c),
        (a + b - b, a),
        ((a - b) * (a + b), a * a - b * b),
    ):
        assert one == other and hash(one) == hash(other)
    assert type(a - a) is int and not isinstance(a * 0, Size)


@many
@given(sizes, places)
def test_what_is_natural_is_never_negative(size, at):
    if is_natural(size):
        assert value(size, at) >= 0


def test_what_is_known_to_be_natural():
    rows, time = symbolic(ROWS), symbolic(TIME)
    assert is_natural(rows - 1) and is_natural(rows * time - time) and is_natural(0)
    assert not is_natural(time - 1) and not is_natural(rows - time)
    assert not is_natural(rows - 2) and not is_natural(-1)


@many
@given(sizes, places)
def test_the_part_above_zero(size, at):
    found = above_zero(size)
    assert value(found, at) == max(value(size, at), 0)
    assert is_natural(found) and above_zero(size) == found
    if isinstance(size, Size):  # and it is known where the size is known
        assert isinstance(found, int) or found.origins <= size.origins
        if size.is_of_rows and isinstance(found, Size):
            assert found.is_of_rows


@many
@given(sizes, sizes, places)
def test_a_quotient_is_exact_for_all_numbers(a, b, at):
    found = quotient(a, b)
    if found is not None:
        assert value(found, at) * value(b, at) == value(a, at)


@many
@given(sizes, terms.filter(bool))
def test_a_product_is_divided_by_a_term(a, b):
    assert quotient(a * b, b) == a


@many
@given(terms.filter(bool), sizes.filter(bool))
def test_a_multiple_of_a_sum_is_divided_by_it(a, b):
    assert quotient(a * b, b) == a


def test_no_quotient():
    rows, time = symbolic(ROWS), symbolic(TIME)
    assert quotient(rows, 0) is None and quotient(7, 2) is None
    assert quotient(rows, 2) is None and quotient(rows, time) is None
    assert quotient(rows + 1, rows) is None and quotient(rows, rows + 1) is None


@many
@given(st.data(), places, st.booleans())
def test_the_agreed_size_is_that_of_a_program_that_runs(data, at, broadcasts):
    """Operands have the same size along the axis, or 1 if they are broadcast."""
    length = data.draw(st.integers(0, 9))
    having = [*map(symbolic, SYMBOLS), symbolic(ROWS) * symbolic(TIME), 1, length]
    fits = {length, 1} if broadcasts else {length}
    known = [size for size in having if value(size, at) in fits]
    # Any symbol with a number that makes it fit.
    known += [symbolic(TIME) + (length - at[TIME])]
    chosen = data.draw(st.lists(st.sampled_from([None, *known]), max_size=4))
    found = agreed(chosen, broadcasts=broadcasts)
    if found is None:
        return
    if None not in chosen:
        lengths = {value(size, at) for size in chosen} - {1 if broadcasts else None}
        assert value(found, at) == (lengths.pop() if lengths else 1)
    else:  # an operand of unknown size may be the one that is not 1
        assert value(found, at) == length


def test_which_sizes_last():
    rows, time, width = map(symbolic, SYMBOLS)
    assert (rows * time).is_lasting and not (rows + width).is_lasting
    assert (rows + 1).is_of_rows and not (rows * time).is_of_rows
    assert (time + width).origins == {TIME.origin[0], WIDTH.origin[0]}
