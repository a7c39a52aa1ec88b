"""A keyed permutation of ``range(n)`` that is never held in memory.

Every process must know which rows make up global batch s without communication and
without a shuffled index as long as the data set. So the shuffle is a cipher: a
generalised Feistel network over Z_a x Z_b with a * b just above n, and cycle walking for
the few values outside. Its numbers come from integer arithmetic alone. They are the same
on every machine and with every NumPy, and must never change: a saved run resumes by them.

Source: J. Black, P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

from __future__ import annotations

import math

import numpy as np

# Three rounds are enough with ideal round functions. For small n, more are needed until
# all orders are about equally likely.
ROUNDS = 8

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB


def hash64(values: np.ndarray) -> np.ndarray:
    """Compute the output function of splitmix64 (Steele et al. 2014), a bijection."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MULTIPLY_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MULTIPLY_2)
    return values ^ (values >> np.uint64(31))


def derive(*numbers: int) -> int:
    """Return one 64-bit key from several integers of any size or sign."""
    key = 0
    for number in numbers:
        # Python integers: the same arithmetic without NumPy's overflow warnings.
        key = (key ^ (number & _MASK)) + GOLDEN & _MASK
        key = (key ^ (key >> 30)) * MULTIPLY_1 & _MASK
        key = (key ^ (key >> 27)) * MULTIPLY_2 & _MASK
        key ^= key >> 31
    return key


def permute(positions: np.ndarray, n: int, key: tuple[int, int]) -> np.ndarray:
    """Return the elements at the given positions of a shuffled ``range(n)``.

    Args:
        positions: int64, any shape, each in ``[0, n)``.
        n: Length of the permutation, 1 to 2**62.
        key: Two integers, as (seed, epoch). Each key has its own permutation.

    Returns:
        int64, shape of ``positions``: distinct for distinct positions, in ``[0, n)``.

    Raises:
        ValueError: If n or a position is out of range.
    """
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"cannot permute range({n}): n must be from 1 to 2**62")
    positions = np.asarray(positions, np.int64)
    if positions.size and not 0 <= positions.min() <= positions.max() < n:
        raise ValueError(f"a position lies outside range({n})")
    base = derive(*key)
    round_keys = [derive(base, number) for number in range(ROUNDS)]
    left_size = math.isqrt(n - 1) + 1
    right_size = -(-n // left_size)
    # Flat: for scalars, NumPy would warn of the overflow that we want.
    values = positions.astype(np.uint64).reshape(-1)
    values = _encipher(values, left_size, right_size, round_keys)
    # left_size * right_size < n + left_size: few are outside, and the walk is short.
    outside = values >= np.uint64(n)
    while outside.any():
        values[outside] = _encipher(values[outside], left_size, right_size, round_keys)
        outside = values >= np.uint64(n)
    return values.astype(np.int64).reshape(positions.shape)


def _encipher(
    values: np.ndarray, left_size: int, right_size: int, round_keys: list[int]
) -> np.ndarray:
    """Make one pass of the network: a bijection of ``range(left_size * right_size)``."""
    left = values % np.uint64(left_size)
    right = values // np.uint64(left_size)
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            left = _add_hash(left, right, left_size, key)
        else:
            right = _add_hash(right, left, right_size, key)
    return left + right * np.uint64(left_size)


def _add_hash(half: np.ndarray, other: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return ``half + hash(other) mod size``, for a size below 2**32."""
    hashed = hash64(other * np.uint64(GOLDEN) + np.uint64(key))
    # The high 32 bits scaled to [0, size): several times faster than a remainder.
    moved = half + ((hashed >> np.uint64(32)) * np.uint64(size) >> np.uint64(32))
    return np.where(moved >= np.uint64(size), moved - np.uint64(size), moved)
