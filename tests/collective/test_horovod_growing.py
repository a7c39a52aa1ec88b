"""Jobs that grow while they train: scripts in the manner of Horovod Elastic."""

import ast
import sys

import pytest

from tests.launch import STARTS_RANKS, capture, environment

pytestmark = STARTS_RANKS

START = """
import os, sys
from pathlib import Path
import numpy as np
import tensorflow as tf
import keras
import collective.tensorflow.keras as hvd
import collective.tensorflow as hvdtf

slots, first = Path(sys.argv[1]), int(os.environ["COLLECTIVE_RANK"])

def ask_for(number):
    if hvd.rank() == 0:
        slots.with_suffix(".part").write_text(f"localhost:{number}")
        slots.with_suffix(".part").rename(slots)
"""


def run(tmp_path, script, slots, most):
    """Return the ranks' sorted output in a job that begins with so many slots."""
    pytest.importorskip("tensorflow")
    file = tmp_path / "slots"
    file.write_text(f"localhost:{slots}")
    command = [sys.executable, "-m", "collective.launch", "--min-np", "1"]
    command += ["--max-np", str(most), "--host-discovery-script", f"cat {file}"]
    ended = capture(
        [*command, sys.executable, "-c", START + script, str(file)],
        240,
        env=environment(forked=True, COLLECTIVE_TIMEOUT="240"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return sorted(line[4:] for line in ended.stdout.splitlines() if "] got" in line)


# A single rank traces everything. Each rank contributes 2 to the power of its rank, so
# that every sum shows which ranks took part.
FROM_ONE = """
hvd.init()
v = tf.Variable([0.0, 0.0])
table = tf.Variable(tf.zeros([3, 1]))
dense = keras.layers.Dense(1, use_bias=False)
dense.build([None, 1])
local = keras.Variable([0.0])
norm = hvdtf.SyncBatchNormalization(momentum=0.0)
norm.build([None, 1])
scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
scaler = hvd.DistributedOptimizer(scaler)
weight = keras.Variable([1.0])
scaler.build([weight])

def watched(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x)) * mine
    return tape.gradient(loss, x)

mine = tf.Variable(0.0)

@tf.function
def traced():
    x = tf.fill([2, 1], mine)
    with tf.GradientTape() as tape:
        loss = mine * (tf.reduce_sum(v) + tf.reduce_sum(tf.gather(table, [0, 0])))
        loss += mine * local.value[0]
    tape = hvdtf.DistributedGradientTape(tape, op=hvdtf.Sum)
    tape.register_local_source(local)
    of_v, of_table, of_local = tape.gradient(loss, [v, table, local])
    moments = norm(tf.fill([4, 1], mine), training=True)
    whole = tf.IndexedSlices(tf.cast(x, tf.int32) * 4, tf.constant([0, 1]))
    return {
        "dense": of_v[0],
        "sparse": tf.convert_to_tensor(of_table)[0, 0],
        "local": of_local[0],
        "whole": hvdtf.allreduce(whole).values[0, 0],
        "mean": norm.moving_mean.value[0] + 0 * moments[0, 0],
        "finite": tf.cast(scaler.check_finite([mine / (mine - 2)]), tf.float32),
        "adasum": hvdtf.allreduce(tf.stack([mine, mine]), op=hvdtf.Adasum)[0],
        "rows": tf.reduce_sum(hvdtf.allgather(x)),
        "of rows": watched(hvdtf.allgather, x)[0, 0],
        "of root": watched(lambda y: hvdtf.broadcast(y, 0), x)[0, 0],
        "moved": tf.reduce_sum(hvdtf.alltoall(tf.fill([2], mine))),
        "of part": watched(
            lambda y: hvdtf.reducescatter(y, op=hvdtf.Average), x)[0, 0],
        "ops": hvdtf.size_op() * 10 + hvdtf.rank_op(),
    }

def results():
    mine.assign(float(2 ** hvd.rank()))
    return {name: round(float(value), 4) for name, value in traced().items()}

@hvdtf.elastic.run
def train(state):
    while hvd.size() < 2:
        if not state.n:
            print("got", results(), flush=True)
            ask_for(2)
        state.n += 1
        state.commit()
    return results()

print("got", train(hvdtf.elastic.TensorFlowState([v], n=0)), flush=True)
"""


def test_what_one_rank_has_traced_sums_over_two(tmp_path):
    found = [ast.literal_eval(line[4:]) for line in run(tmp_path, FROM_ONE, 1, 2)]
    alone, first, second = sorted(found, key=lambda values: values["ops"])
    common = {"dense": 3.0, "sparse": 6.0, "rows": 6.0, "of rows": 1.5, "moved": 3.0}
    # The statistics of (1 and 2), and one overflow for both ranks.
    common |= {"mean": 1.5, "whole": 6.0, "finite": 0.0, "adasum": 1.5}
    assert {name: first[name] for name in common} == common
    assert {name: second[name] for name in common} == common
    places = {name: (first[name], second[name]) for name in first if name not in common}
    assert places == {
        "local": (0.5, 1.0),
        "of root": (1.5, 0.0),
        "of part": (1.0, 1.0),
        "ops": (20.0, 21.0),
    }
    assert (alone["dense"], alone["local"], alone["ops"]) == (1.0, 1.0, 10.0)
    assert alone["finite"] == 1.0 and alone["adasum"] == 1.0


# As in Horovod's example for Keras: a step of fit builds the optimizer before the state
# is made, and again in a reset callback, in which it meets a newcomer's step.
FITS_AT_RESET = """
hvd.init()
keras.utils.set_random_seed(first)
random = np.random.default_rng(first)
x = random.normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
data = data.repeat().shuffle(64).batch(8)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
rate = 0.01
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size()))
model.compile(optimizer, "mse")
model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
resets = []

def on_state_reset():
    state.model.optimizer.learning_rate = rate * hvd.size()
    state.model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)
    resets.append(hvd.size())

state.register_reset_callbacks([on_state_reset])

class Grow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        # Waits for the newcomer's step, however long it takes to start.
        if state.epoch == 1 and hvd.size() == 2:
            ask_for(3)
            while True:
                state.commit()

callbacks = [
    Grow(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]

@hvd.elastic.run
def train(state):
    state.model.fit(
        data,
        steps_per_epoch=12 // hvd.size(),
        epochs=3 - state.epoch,
        callbacks=callbacks,
        verbose=0,
    )

train(state)
weights = hvdtf.allgather_object(
    [w.tolist() for w in model.get_weights()]
    + [float(state.model.optimizer.learning_rate.numpy())]
)
same = all(one == weights[0] for one in weights)
updates = int(model.optimizer.iterations.numpy())
print("got", hvd.rank(), hvd.size(), state.epoch, resets, same, updates, flush=True)
"""


def test_a_fit_in_the_reset_callback_meets_the_first_fit_of_a_newcomer(tmp_path):
    lines = run(tmp_path, FITS_AT_RESET, 2, 3)
    # 1 step to build, 6 of the first epoch with 2 ranks, 1 at the reset, 4 + 4 with 3.
    assert lines == [
        "got 0 3 3 [3] True 16",
        "got 1 3 3 [3] True 16",
        "got 2 3 3 [] True 16",
    ]
