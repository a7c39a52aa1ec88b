"""What a step does besides computing: lines of text and summaries, clocks and draws."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session

from collective.training.partition import stateful
from collective.training.partition.plans import RULES
from tests.training.partition.meeting import on_two_ranks
from tests.training.partition.operands import generator
from tests.training.partition.partitioned import Partitioned, assert_same

ROWS = 5
COUNTS = [3, 2]


def _batch() -> np.ndarray:
    return generator(0).normal(size=(ROWS, 3))


# --- effects -------------------------------------------------------------------------


def _in_a_branch(x: tf.Tensor) -> tf.Tensor:
    def then() -> tf.Tensor:
        tf.print("branch", tf.shape(x)[0])
        return x * 2

    return tf.cond(tf.reduce_sum(x) < 1e9, then, lambda: x)


def _in_a_loop(x: tf.Tensor) -> tf.Tensor:
    def body(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tf.print("round", i, tf.reduce_sum(tf.ones_like(x)[:, 0]))
        return i + 1, x + 1

    return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


def _lines(x: tf.Tensor) -> list[tf.Tensor]:
    tf.print("rows", tf.shape(x))
    y = _in_a_branch(x)
    tf.print("mean", tf.round(tf.reduce_mean(y * 0 + 4)))
    y = _in_a_loop(y)
    z = tf.raw_ops.Print(input=y * 2, data=[tf.shape(y)], message="passed ")
    tf.print("last")
    return [y, z, tf.reduce_sum(z)]


@pytest.mark.parametrize("counts", [[5], [2, 3], [0, 4, 1]])
def test_lines_are_printed_once_and_in_order(counts, capfd):
    x = _batch()
    made = Partitioned(_lines, [x], [True], replicas=len(counts))
    want = made.whole([x])
    printed = capfd.readouterr().err
    assert_same(want, made(counts, [x]), ["y", "z", "sum"], 1e-12)
    expected = ["rows", "branch", "mean", "round", "round", "round", "passed", "last"]
    assert [line.split()[0] for line in printed.splitlines()] == expected
    assert capfd.readouterr().err == printed


def test_rank_zero_alone_prints(capfd):
    x = _batch()
    want = Partitioned(_lines, [x], [True], replicas=1).whole([x])
    printed = capfd.readouterr().err
    for got in on_two_ranks(_lines, x, COUNTS):
        assert_same(want, got, ["y", "z", "sum"], 1e-12)
    assert capfd.readouterr().err == printed


def test_rank_zero_alone_writes_files_and_summaries(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def written(x: tf.Tensor) -> list[tf.Tensor]:
        old = {"writer": writer._resource, "step": 2, "tag": "old"}
        with writer.as_default(step=1):
            tf.summary.scalar("mean", tf.reduce_mean(x))
            tf.summary.histogram("rows", x)
            tf.summary.image("image", tf.reshape(x, [1, -1, 3, 1]))
            tf.summary.text("text", tf.strings.as_string(tf.shape(x)[0]))
            tf.cond(
                tf.reduce_mean(x) < 1e9,
                lambda: tf.summary.scalar("branch", tf.reduce_sum(x)),
                lambda: False,
            )
            tf.raw_ops.WriteScalarSummary(value=tf.reduce_sum(x), **old)
            tf.raw_ops.WriteHistogramSummary(values=x, **old)
        writer.flush()
        tf.io.write_file(f"{tmp_path}/file", tf.strings.as_string(tf.shape(x)[0]))
        return [x]

    on_two_ranks(written, _batch(), COUNTS)
    (events,) = glob.glob(f"{tmp_path}/events*")
    tags = [
        value.tag
        for record in tf.data.TFRecordDataset(events)
        for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value
    ]
    assert " ".join(sorted(tags)) == "cond/branch image mean old old rows text"
    assert (tmp_path / "file").read_text() == str(ROWS)


def test_a_rule_that_makes_too_few_outputs_is_named(monkeypatch):
    rule = RULES["TopKV2"]

    def wrong(node: Any, layouts: Any, rows: Any) -> Any:
        plan = rule(node, layouts, rows)
        return type(plan)(plan.inputs, plan.outputs, lambda _, x: x[:1])

    monkeypatch.setitem(RULES, "TopKV2", wrong)
    with pytest.raises(ValueError, match=r"TopKV2 .* made 1 outputs, not 2"):
        Partitioned(lambda x: list(tf.math.top_k(x, 2)), [_batch()], [True], replicas=2)


# --- clocks and draws ----------------------------------------------------------------


def _python(x: tf.Tensor) -> list[tf.Tensor]:
    """Functions of Python, whose results have any shape."""
    count = itertools.count(1)
    more = tf.numpy_function(
        lambda x: x[: next(count)] + np.random.default_rng().normal(), [x], x.dtype
    )
    text = tf.py_function(lambda: [f"{id(object())} {next(count)}"], [], tf.string)
    return [more, text, tf.shape(more)]


def _candidates(x: tf.Tensor) -> list[tf.Tensor]:
    classes = tf.cast(tf.abs(x[:, :1]) * 3, tf.int64)
    return list(tf.random.log_uniform_candidate_sampler(classes, 1, 4, True, 50))


def _pooled(x: tf.Tensor) -> list[tf.Tensor]:
    images = tf.tile(x[:, :, None, None], [1, 7, 17, 2])
    with tf.GradientTape() as tape:
        tape.watch(images)
        pooled = tf.nn.fractional_max_pool(images, [1, 1.4, 1.4, 1])[0]
    return [pooled, tape.gradient(pooled, images)]


DIFFERENT: dict[str, Callable[[tf.Tensor], list[tf.Tensor]]] = {
    "clock": lambda x: [tf.timestamp(), x[:, 0] * tf.timestamp()],
    "numbers": lambda x: [tf.raw_ops.NonDeterministicInts(shape=[4])],
    "uniform": lambda x: [tf.random.uniform(tf.shape(x), dtype=x.dtype) * x],
    "raw": lambda x: [
        tf.raw_ops.RandomStandardNormal(shape=[3], dtype=tf.float32),
        tf.raw_ops.RandomPoissonV2(shape=[3], rate=5.0),
        tf.raw_ops.RandomGamma(shape=[3], alpha=tf.abs(x[:, 0])),
        tf.raw_ops.Multinomial(logits=x, num_samples=20),
    ],
    "shuffled": lambda x: [tf.random.shuffle(tf.concat([x, x, x], 0))],
    "candidates": _candidates,
    "box": lambda x: list(
        tf.image.sample_distorted_bounding_box(
            [90, 90, 3], tf.zeros([1, 0, 4]), use_image_if_no_bounding_boxes=True
        )
    ),
    "pool": _pooled,
    "python": _python,
    "branch": lambda x: [
        tf.cond(
            tf.math.floormod(tf.timestamp() * 1e6, 2.0) < 1,
            lambda: x - tf.reduce_mean(x, 0),
            lambda: x,
        ),
        tf.cond(
            tf.reduce_sum(x) < 1e9,
            lambda: x * tf.timestamp() + tf.random.normal([], dtype=x.dtype),
            lambda: x,
        ),
    ],
    "loop": lambda x: tf.while_loop(
        lambda i, *_: (i < 9) & (tf.timestamp() > 0),
        lambda i, t, x: (
            i + tf.random.uniform([], 1, 3, tf.int32),
            tf.timestamp(),
            x - tf.reduce_mean(x),
        ),
        (0, tf.zeros([], tf.float64), x),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_on_each_rank_is_that_of_rank_zero(name):
    first, second = on_two_ranks(DIFFERENT[name], _batch(), COUNTS)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_differs_is_still_drawn_anew():
    drawn = [on_two_ranks(DIFFERENT["raw"], _batch(), COUNTS)[0] for _ in range(2)]
    assert any(not np.array_equal(a, b) for a, b in zip(*drawn, strict=True))


# --- the table -----------------------------------------------------------------------


def _operations() -> dict[str, Any]:
    """All operations of this TensorFlow, by name."""
    buffer = pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList())
    return {op.name: op for op in op_def_pb2.OpList.FromString(buffer).op}


# These only hand on what they are given, or make what others fill.
_HAND_ON = (
    "CheckNumerics CheckNumericsV2 DebugIdentityV2 DebugIdentityV3 DeepCopy Empty "
    "GuaranteeConst SleepIdentityOp StatelessRandomGetAlg"
)


def test_the_table_of_stateful_operations():
    known = _operations()
    ours = stateful.EQUAL | stateful.SHOWN
    assert not [name for name in ours if not known[name].is_stateful]
    assert not stateful.EQUAL & stateful.SHOWN
    for name in stateful.EQUAL.difference(_HAND_ON.split()):
        handles = [a for a in known[name].input_arg if a.type == tf.resource]
        makes = [a for a in known[name].output_arg if a.type == tf.resource]
        assert handles or makes, f"{name} has no state that all ranks have"


class _Node:
    """As much of a node as the table is asked about."""

    def __init__(self, definition: Any):
        self.type, self.is_stateful = definition.name, definition.is_stateful


def test_what_is_not_in_the_table_is_that_of_rank_zero():
    """Each stateful operation of TensorFlow that gives numbers and has no rule."""
    sent = {
        name
        for name, definition in _operations().items()
        if name not in RULES
        and definition.is_stateful
        and stateful.may_differ(_Node(definition))
    }
    differ = (
        "Timestamp NonDeterministicInts RandomPoisson PyFunc EagerPyFunc "
        "UniformCandidateSampler LogUniformCandidateSampler SampleDistortedBoundingBoxV2 "
        "IteratorGetNext QueueDequeueV2 GlobalIterId"
    )
    assert set(differ.split()) <= sent
