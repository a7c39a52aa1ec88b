"""Sizes of axes that are not known while a step is traced.

A size is an ``int``, or a ``Size``: a polynomial with integer coefficients over symbols.
One symbol is the number of rows of the global batch; others are axes of which TensorFlow
knows no size, such as the length of the longest text of a batch. So ``[rows, time, 8]``
reshaped to ``[rows * time, 8]`` is known to be the same places in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Monomial = tuple["Symbol", ...]  # sorted; empty: the constant term


class Symbol:
    """An unknown size.

    Args:
        name: For messages.
        origin: The value of the graph whose axis it is, and the axis; None for the rows
            of the batch.
        excess: The size of which it is the part above zero (see ``above_zero``).
        fraction: The size of which it is a fraction, rounded down (see ``fraction``).
    """

    _made = 0

    def __init__(
        self,
        name: str,
        origin: tuple[Any, int] | None = None,
        excess: Size | None = None,
        fraction: Fraction | None = None,
    ):
        self.name = name
        self.origin = origin
        self.excess = excess
        self.fraction = fraction
        self._above_zero: dict[Size, Symbol] = {}
        self._fractions: dict[Fraction, Symbol] = {}
        Symbol._made += 1
        self._order = Symbol._made

    @property
    def is_positive(self) -> bool:
        """Return whether it is not zero: a batch has a row. Other axes may have no element."""
        return self.origin is None and self.made_of is None

    @property
    def made_of(self) -> Size | None:
        """Return the size that it is computed of, or None if it is not computed."""
        return self.excess if self.fraction is None else self.fraction.of

    @property
    def is_of_rows(self) -> bool:
        """Return whether it follows from the rows of the batch alone."""
        if self.made_of is not None:
            return self.made_of.is_of_rows
        return self.origin is None

    @property
    def is_lasting(self) -> bool:
        """Return whether it is the same in all rounds of loops, and known in every graph."""
        return not any(value.is_nested for value in self.origins)

    @property
    def origins(self) -> set[Any]:
        """Return the values of the graph whose axes must be known before it is."""
        if self.made_of is not None:
            return self.made_of.origins
        return set() if self.origin is None else {self.origin[0]}

    def above_zero(self, excess: Size) -> Symbol:
        """Return the symbol of the part above zero of a size in which this symbol is."""
        if excess not in self._above_zero:
            self._above_zero[excess] = Symbol(f"max({excess}, 0)", None, excess)
        return self._above_zero[excess]

    def part(self, fraction: Fraction) -> Symbol:
        """Return the symbol of a fraction of a size in which this symbol is."""
        if fraction not in self._fractions:
            name = f"({fraction.of}) // {fraction.parts}"
            self._fractions[fraction] = Symbol(name, fraction=fraction)
        return self._fractions[fraction]

    def __lt__(self, other: Symbol) -> bool:
        return self._order < other._order

    def __repr__(self) -> str:
        return self.name


class Fraction(NamedTuple):
    """One of ``parts`` equal parts of a size; what is left over belongs to none.

    Attributes:
        of, parts: The size, and the number of parts.
        is_exact: Whether nothing is left over in any program that runs.
    """

    of: Size
    parts: int
    is_exact: bool = False


class Size:
    """A polynomial that is not a plain number; ``size_of`` makes one."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms = dict(terms)
        self._hash = hash(frozenset(self.terms.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: AnySize) -> AnySize:
        total = dict(self.terms)
        for monomial, factor in _terms(other).items():
            total[monomial] = total.get(monomial, 0) + factor
        return size_of(total)

    __radd__ = __add__

    def __neg__(self) -> AnySize:
        return self * -1

    def __sub__(self, other: AnySize) -> AnySize:
        return self + -other

    def __rsub__(self, other: AnySize) -> AnySize:
        return -self + other

    def __mul__(self, other: AnySize) -> AnySize:
        product: dict[Monomial, int] = {}
        for a, m in self.terms.items():
            for b, n in _terms(other).items():
                both = tuple(sorted(a + b))
                product[both] = product.get(both, 0) + m * n
        return size_of(product)

    __rmul__ = __mul__

    @property
    def symbols(self) -> set[Symbol]:
        """Return the symbols in it."""
        return {symbol for monomial in self.terms for symbol in monomial}

    @property
    def is_of_rows(self) -> bool:
        """Return whether it follows from the rows of the batch alone."""
        return all(symbol.is_of_rows for symbol in self.symbols)

    @property
    def is_lasting(self) -> bool:
        """Return whether it is the same wherever it is read."""
        return all(symbol.is_lasting for symbol in self.symbols)

    @property
    def origins(self) -> set[Any]:
        """Return the values of the graph whose axes must be known before it is."""
        return {value for symbol in self.symbols for value in symbol.origins}

    def __repr__(self) -> str:
        parts = []
        for monomial, factor in self.terms.items():
            names = [repr(symbol) for symbol in monomial]
            parts.append("*".join([str(factor)] * (factor != 1 or not names) + names))
        return "+".join(parts)


AnySize = int | Size


def size_of(terms: Mapping[Monomial, int]) -> AnySize:
    """Return the size with these terms: an int if it has no symbol."""
    kept = {monomial: factor for monomial, factor in terms.items() if factor}
    for monomial, factor in kept.items():
        for symbol in monomial:
            fraction = symbol.fraction
            if fraction and fraction.is_exact and not 0 <= factor < fraction.parts:
                return _put_together(kept, monomial, symbol, fraction)
    if not kept:
        return 0
    if set(kept) == {()}:
        return kept[()]
    return Size(kept)


def _put_together(
    terms: Mapping[Monomial, int], monomial: Monomial, symbol: Symbol, part: Fraction
) -> AnySize:
    """Replace all parts of a size by the size: two halves of the rows are the rows."""
    times, left = divmod(terms[monomial], part.parts)
    others = list(monomial)
    others.remove(symbol)
    return size_of({**terms, monomial: left}) + part.of * size_of(
        {tuple(others): times}
    )


def symbolic(symbol: Symbol) -> Size:
    """Return the size that a symbol stands for."""
    return Size({(symbol,): 1})


def _terms(size: AnySize) -> Mapping[Monomial, int]:
    return size.terms if isinstance(size, Size) else {(): int(size)}


def is_natural(size: AnySize) -> bool:
    """Return whether it is known to be no negative number."""
    if isinstance(size, int):
        return size >= 0
    for monomial, factor in size.terms.items():
        share = monomial[0].fraction if len(monomial) == 1 else None
        if share is not None and factor < 0:  # it is at most that part of its size
            rest = size - factor * symbolic(monomial[0])
            return is_natural(rest * share.parts + factor * share.of)
    # Nothing is subtracted from what the symbols are above the least that they can be.
    above: Counter[Monomial] = Counter()
    for monomial, factor in size.terms.items():
        open_ = [s for s in monomial if not s.is_positive]
        positive = [s for s in monomial if s.is_positive]
        for count in range(len(positive) + 1):
            for part in combinations(positive, count):
                above[tuple(sorted([*open_, *part]))] += factor
    return min(above.values()) >= 0


def above_zero(size: AnySize) -> AnySize:
    """Return ``max(size, 0)``: the length of what lies between two bounds."""
    if is_natural(size):
        return size
    if isinstance(size, int) or is_natural(-size):
        return 0
    return symbolic(max(size.symbols).above_zero(size))


def fraction(size: AnySize, count: int, *, is_exact: bool = False) -> AnySize:
    """Return ``size // count`` of a size that is no negative number.

    Args:
        is_exact: Whether ``count`` is known to divide it.
    """
    if isinstance(size, int):
        return size // count
    # What count divides comes out even: only the rest has to be rounded.
    parts = {term: divmod(factor, count) for term, factor in size.terms.items()}
    even = size_of({term: part[0] for term, part in parts.items()})
    rest = size_of({term: part[1] for term, part in parts.items()})
    if isinstance(rest, int):
        return even + rest // count
    symbol = max(rest.symbols).part(Fraction(rest, count, is_exact))
    return even + symbolic(symbol)


def about(size: AnySize, rows: int | None, other: int = 1) -> int:
    """Return what a size mostly is, to weigh bytes by.

    Args:
        rows: The number of rows that is expected, if any is.
        other: What to take for sizes of which nothing is known.
    """

    def of(symbol: Symbol) -> int:
        if symbol.made_of is not None:
            parts = symbol.fraction.parts if symbol.fraction else 1
            return max(about(symbol.made_of, rows, other) // parts, 0)
        return other if symbol.origin is not None else (rows or other)

    if isinstance(size, int):
        return size
    return sum(
        factor * math.prod(of(symbol) for symbol in monomial)
        for monomial, factor in size.terms.items()
    )


def product(sizes: Iterable[AnySize]) -> AnySize:
    """Return the product of sizes; 1 of none."""
    result: AnySize = 1
    for size in sizes:
        result = result * size
    return result


def total(sizes: Iterable[AnySize]) -> AnySize:
    """Return the sum of sizes; 0 of none."""
    result: AnySize = 0
    for size in sizes:
        result = result + size
    return result


def agreed(
    sizes: Iterable[AnySize | None], *, broadcasts: bool = False
) -> AnySize | None:
    """Return the size of an axis that operands share, or None if it is not known.

    Here alone it is decided when a number says more than a symbol. Sizes that must be
    equal are, in every program that runs, so a number is the value of all symbols beside
    it. Where operands broadcast, a 1 says nothing of the others; but another number does,
    for a symbol beside it is that number or 1.

    Args:
        sizes: Of the axis, one for each operand; None where it is not known.
        broadcasts: Whether an operand of size 1 is repeated along the axis.
    """
    found = [s for s in dict.fromkeys(sizes) if not (broadcasts and s == 1)]
    numbers = [size for size in found if isinstance(size, int)]
    if numbers or not found:
        return 1 if not found and broadcasts else _only(numbers)
    if broadcasts:
        return _only(found)
    symbols = [size for size in found if isinstance(size, Size)]
    # One that the rows give is known wherever it is read.
    return min(symbols, key=lambda s: not s.is_of_rows, default=None)


def _only(sizes: Sequence[Any]) -> Any:
    return sizes[0] if len(sizes) == 1 else None


def quotient(a: AnySize, b: AnySize) -> AnySize | None:
    """Return ``a / b`` if that is a size for all values of the symbols, or None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if a == 0:
        return 0
    divisor = _terms(b)
    if len(divisor) > 1:
        return _ratio(a, b)
    ((monomial, factor),) = divisor.items()
    if not factor:
        return None
    result: dict[Monomial, int] = {}
    for term, count in _terms(a).items():
        rest = _without(term, monomial)
        if rest is None or count % factor:
            return None
        result[rest] = count // factor
    return size_of(result)


def _ratio(a: AnySize, b: AnySize) -> AnySize | None:
    """Return the quotient by a sum, if it is a monomial."""
    first, other = next(iter(_terms(b).items())), next(iter(_terms(a).items()), None)
    if other is None:
        return None
    rest = _without(other[0], first[0])
    if rest is None or other[1] % first[1]:
        return None
    found = size_of({rest: other[1] // first[1]})
    return found if found * b == a else None


def _without(term: Monomial, factor: Monomial) -> Monomial | None:
    rest = list(term)
    for symbol in factor:
        if symbol not in rest:
            return None
        rest.remove(symbol)
    return tuple(rest)
