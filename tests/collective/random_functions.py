"""Random nests of ``tf.function`` with collectives in them, and their results in NumPy.

A program turns a vector ``[rows]`` into another; rows differ between ranks. It is a tree
of steps, each linear in the vectors of all ranks, so that its gradient is known, too.
"""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from collective import Sum, tensorflow_ops

KINDS = ("call", "branch", "loop", "map", "beside", "site")


class Program:
    """A tree of steps, the same on every rank.

    Args:
        seed: Seed of the tree.
        rank: Rank of this process, for the delays.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.random = np.random.default_rng(seed)
        self.delays = np.random.default_rng([seed, rank])
        self.variable = tf.Variable(1.0, dtype=tf.float64)
        # Innermost first: each may call the earlier ones.
        self.functions: list = []
        for most in (3, 8, 24):
            steps: list = []
            while not most / 4 <= self.cost(steps) <= most:
                steps = [self.step(2) for _ in range(self.random.integers(1, 3))]
            self.functions.append((steps, tf.function(self.runner(steps))))
        self.steps = self.functions[-1][0]
        self.run = self.functions[-1][1]

    def step(self, depth: int) -> tuple:
        kind = "site"
        if depth:
            kind = str(self.random.choice(KINDS))
        if kind == "site" or (kind == "call" and not self.functions):
            return "site", float(self.random.integers(1, 9)) / 8, self.random.random()
        if kind == "call":
            callee = int(self.random.integers(len(self.functions)))
            return "call", callee, int(self.random.integers(4))
        inner = [self.step(depth - 1) for _ in range(self.random.integers(1, 3))]
        return kind, inner, [self.step(depth - 1)]

    def cost(self, steps) -> int:
        """Return how many collectives the steps run, at most."""
        cost = 0
        for kind, one, other in steps:
            if kind == "site":
                cost += 1
            elif kind == "call":
                cost += other * self.cost(self.functions[one][0])
            elif kind == "branch":
                cost += max(self.cost(one), self.cost(other))
            elif kind == "beside":
                cost += self.cost(one) + self.cost(other)
            else:
                cost += self.cost(one) * (2 if kind == "loop" else 3)
        return cost

    def runner(self, steps):
        def nest(x, turn):
            return self.traced(steps, x, turn)

        return nest

    def traced(self, steps, x, turn):
        """Return the result of the steps in TensorFlow."""
        for kind, one, other in steps:
            if kind == "site":
                mean = self.delayed(one * tf.reduce_mean(x))
                if other < 0.4:
                    mean *= self.variable
                (total,) = tensorflow_ops.all_reduce([mean], Sum)
                x = x * 0.5 + total * 0.25
            elif kind == "call":
                # Not one after another: only their order distinguishes them.
                calls = [
                    self.functions[one][1](x * (i + 1.0), turn) for i in range(other)
                ]
                x = tf.add_n([x, *calls]) / 4.0
            elif kind == "branch":
                x = tf.cond(
                    turn % 2 == 0,
                    lambda x=x, steps=one: self.traced(steps, x, turn),
                    lambda x=x, steps=other: self.traced(steps, x, turn),
                )
            elif kind == "loop":
                _, x = tf.while_loop(
                    lambda i, _: i < 2,
                    lambda i, x, steps=one: (i + 1, self.traced(steps, x, turn)),
                    (0, x),
                )
            elif kind == "map":
                x = tf.reduce_mean(
                    tf.map_fn(
                        lambda y, steps=one: self.traced(steps, y, turn),
                        tf.stack([x, 2.0 * x, 3.0 * x]),
                    ),
                    0,
                )
            else:
                x = self.traced(one, x, turn) + 0.5 * self.traced(other, x, turn)
        return x

    def delayed(self, x):
        """Return the same value, late on this rank; delay its gradient, too."""

        def wait(value):
            if self.delays.random() < 0.3:
                time.sleep(self.delays.random() * 0.01)
            return value

        @tf.custom_gradient
        def later(x):
            y = tf.numpy_function(wait, [x], x.dtype, stateful=False)
            y.set_shape(x.shape)
            return y, lambda dy: later(dy)

        return later(x)

    def wanted(self, xs, turn, steps=None):
        """Return the result of the steps in NumPy, from the vectors of all ranks."""
        for kind, one, other in self.steps if steps is None else steps:
            if kind == "site":
                total = sum(one * x.mean() for x in xs)
                xs = [x * 0.5 + total * 0.25 for x in xs]
            elif kind == "call":
                callee = self.functions[one][0]
                calls = [xs] + [
                    self.wanted([x * (i + 1.0) for x in xs], turn, callee)
                    for i in range(other)
                ]
                xs = [sum(each) / 4 for each in zip(*calls, strict=True)]
            elif kind == "branch":
                xs = self.wanted(xs, turn, one if turn % 2 == 0 else other)
            elif kind == "loop":
                xs = self.wanted(self.wanted(xs, turn, one), turn, one)
            elif kind == "map":
                every = [
                    self.wanted([x * (i + 1.0) for x in xs], turn, one)
                    for i in range(3)
                ]
                xs = [sum(each) / 3 for each in zip(*every, strict=True)]
            else:
                first, second = (self.wanted(xs, turn, s) for s in (one, other))
                xs = [a + 0.5 * b for a, b in zip(first, second, strict=True)]
        return xs

    def gradient_wanted(self, xs, turn, rank):
        """Return the gradient of the sum over ranks of (rank + 1) times its result's sum."""
        gradient = np.zeros_like(xs[rank])
        for i in range(len(gradient)):
            units = [np.zeros_like(x) for x in xs]
            units[rank][i] = 1.0
            results = self.wanted(units, turn)
            gradient[i] = sum((r + 1) * y.sum() for r, y in enumerate(results))
        return gradient
