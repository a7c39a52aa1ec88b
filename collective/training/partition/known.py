"""Constants and sizes of one emitted graph, each made once and only when it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from collective.training.partition.sizes import AnySize, Symbol

_COMPARED = 1 << 12  # bytes; larger constants are not looked for by their value
_HOST = "/device:CPU:0"


def on_host() -> contextlib.AbstractContextManager[object]:
    """Surround arithmetic of sizes, which kernels want in the memory of the host.

    TensorFlow leaves int32 there, but would compute int64 on a GPU, and each size that is
    read would wait for all that the GPU has to do before.
    """
    if tf.config.list_logical_devices("GPU"):
        return tf.device(_HOST)
    return contextlib.nullcontext()


class Known:
    """Makes constants, and what sizes are in a step.

    Args:
        symbol: int64 scalar: what a symbol stands for in this step.
    """

    def __init__(self, symbol: Callable[[Symbol], tf.Tensor]):
        self._symbol = symbol
        self._graph = tf.compat.v1.get_default_graph()
        self._made: dict[Hashable, tf.Tensor] = {}
        self._device = ""  # constants are made again on each

    @contextlib.contextmanager
    def on(self, device: str) -> Iterator[None]:
        """Inside, what is made is made on a device."""
        before, self._device = self._device, device
        try:
            with tf.device(device):
                yield
        finally:
            self._device = before

    def constant(self, value: np.ndarray, dtype: tf.DType) -> tf.Tensor:
        """Return a constant; equal ones are one."""
        value = np.asarray(value)
        if value.nbytes > _COMPARED:
            return tf.constant(value, dtype)
        key = dtype, value.shape, value.tobytes()
        return self.once(key, lambda: tf.constant(value, dtype))

    def number(self, size: AnySize) -> tf.Tensor:
        """Return what a size is in this step: int64 scalar."""
        if isinstance(size, int):
            return self._size(np.array(size, np.int64), tf.int64)
        return self.once(size, lambda: self._sum(size), is_size=True)

    def vector(self, sizes: Sequence[AnySize], dtype: tf.DType) -> tf.Tensor:
        """Return what several sizes are in this step.

        Args:
            dtype: int32 or int64.
        """
        if all(isinstance(size, int) for size in sizes):
            return self._size(np.array(sizes, dtype.as_numpy_dtype), dtype)

        def stacked() -> tf.Tensor:
            return tf.cast(tf.stack([self.number(size) for size in sizes]), dtype)

        return self.once((dtype, *sizes), stacked, is_size=True)

    def scalar(self, size: AnySize, dtype: tf.DType) -> tf.Tensor:
        """Return what a size is in this step, of any dtype."""
        if isinstance(size, int):
            return self.constant(np.array(size, dtype.as_numpy_dtype), dtype)
        return self.once(
            (size, dtype), lambda: tf.cast(self.number(size), dtype), is_size=True
        )

    def _size(self, value: np.ndarray, dtype: tf.DType) -> tf.Tensor:
        key = dtype, value.shape, value.tobytes()
        return self.once(key, lambda: tf.constant(value, dtype), is_size=True)

    def _sum(self, size: AnySize) -> tf.Tensor:
        assert not isinstance(size, int)
        terms = []
        for monomial, factor in size.terms.items():
            factors = [self._symbol(symbol) for symbol in monomial]
            if factor != 1 or not factors:
                factors.append(self.number(factor))
            term = factors[0]
            for other in factors[1:]:
                term = term * other
            terms.append(term)
        return terms[0] if len(terms) == 1 else tf.add_n(terms)

    def once(
        self, key: Hashable, make: Callable[[], tf.Tensor], is_size: bool = False
    ) -> tf.Tensor:
        """Return what was made under a key, and make it in this object's graph the first time.

        Args:
            is_size: Whether it belongs on the host.
        """
        key = _HOST if is_size else self._device, key
        if key not in self._made:
            with self.outside(is_size):
                self._made[key] = make()
        return self._made[key]

    @contextlib.contextmanager
    def outside(self, is_size: bool = False) -> Iterator[None]:
        """Inside, what is made is made in this object's graph, whatever is made now.

        A rule may ask inside of a branch, whose tensors nothing outside can read.
        """
        with (
            self._graph.as_default(),
            tf.control_dependencies(None),
            on_host() if is_size else contextlib.nullcontext(),
        ):
            yield
