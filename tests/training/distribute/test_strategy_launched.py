"""Starts the other tests of strategies on ranks, and programs that must name an error."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests import launch

pytestmark = launch.STARTS_RANKS
FILES = [f"test_strategy{part}.py" for part in ("", "_rows", "_variables")]
CASES = [str(Path(__file__).with_name(name)) for name in FILES]
MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("native", 2),
        pytest.param("native", 3, marks=MATRIX),
        pytest.param("mpi", 2, marks=MATRIX),
        pytest.param("mpi", 3, marks=MATRIX),
        pytest.param("horovod", 2, marks=MATRIX),
        pytest.param("tf-multiworker", 2, marks=MATRIX),
    ],
)
def test_cases(backend, ranks, tmp_path):
    needs = {"mpi": "mpi4py", "horovod": "horovod"}.get(backend, "numpy")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"no {needs}")
    done = launch.launch(backend, ranks, CASES, tmp_path, seconds=400)
    assert done.passed() > 30


BEGIN = """
import os
import sys
from collective.environment import detect
if detect().rank:  # whoever gives up first ends the job: rank 0, whose report names it
    os.environ["COLLECTIVE_TIMEOUT"] = "60"
import keras
import tensorflow as tf
from collective.distribute import Strategy
strategy = Strategy(sys.argv[1])
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    metric = keras.metrics.Mean(name="seen")
strategy.run(lambda: metric.update_state(1.0))
"""
TRAIN = """
def replica():
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tf.ones([3]))
step = tf.function(lambda: strategy.run(replica))
step()
"""
ONE_READS = BEGIN + "if rank == 0: print(metric.result())\n" + TRAIN
ONE_READS_AT_THE_END = BEGIN + TRAIN + "if rank == 0: print(metric.result())\n"
ONE_SAVES = (
    BEGIN
    + """
state = tf.train.Checkpoint(total=metric.variables[0].value)
if rank == 0: state.write(sys.argv[2])
"""
    + TRAIN
)
ONE_FAILS = (
    BEGIN
    + TRAIN
    + """
def fails():
    if rank == 1: raise RuntimeError("no rows today")
    return replica()
strategy.run(fails)
step()
"""
)


@pytest.mark.parametrize("backend", ["native", pytest.param("mpi", marks=MATRIX)])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (ONE_READS, "rank 0 reads variable 'seen"),
        pytest.param(ONE_READS_AT_THE_END, "rank 0 reads variable 'seen", marks=MATRIX),
        pytest.param(ONE_SAVES, "rank 0 reads variable 'seen", marks=MATRIX),
        (ONE_FAILS, "no rows today"),
    ],
    ids=["reads", "reads at the end", "saves", "fails"],
)
def test_what_one_rank_does_ends_by_name(backend, text, named, tmp_path):
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no MPI")
    program = tmp_path / "program.py"
    program.write_text(text)
    words = [*launch.command(backend, 2), sys.executable, str(program), backend]
    words.append(str(tmp_path / "state"))
    code, output = launch.run(
        words, launch.environment(forked=True, COLLECTIVE_TIMEOUT="12"), 120
    )
    assert code not in (0, None), output
    assert named in output


CHECKPOINTS = """
import sys
import keras
import numpy as np
import tensorflow as tf
folder, how = sys.argv[1:]
if how == "unedited":
    import collective
    collective.distribute_keras("native", output="all")
    strategy = tf.distribute.MirroredStrategy()
else:
    from collective.distribute import Strategy
    strategy = Strategy("native")
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    layers = [keras.layers.Dense(200), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((100,)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    rows = keras.metrics.Sum()
x = tf.fill([4, 100], rank + 1.0)

@tf.function
def step():
    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        rows.update_state(tf.ones([4]))
    strategy.run(replica)

state = tf.train.Checkpoint(model=model, optimizer=optimizer, rows=rows.variables[0].value)
manager = tf.train.CheckpointManager(state, folder + "/all", max_to_keep=2)
for number in range(8):
    step()
    assert manager.save() == f"{folder}/all/ckpt-{number + 1}"
kept = model.get_weights()
step()
state.restore(manager.latest_checkpoint)
for a, b in zip(model.get_weights(), kept):
    np.testing.assert_array_equal(a, b)
assert float(rows.result()) == 8 * 8
for number in range(3):
    step()
    model.save(folder + "/one.keras")
    model.save_weights(folder + "/one.weights.h5")
    kept = model.get_weights()
    copy = keras.models.load_model(folder + "/one.keras")
    copy.load_weights(folder + "/one.weights.h5")
    for saved in (copy, keras.models.load_model(folder + "/one.keras")):
        for a, b in zip(saved.get_weights(), kept):
            np.testing.assert_array_equal(a, b)
weights = tf.train.Checkpoint(kernel=model.layers[0].kernel.value)
if strategy.extended.should_checkpoint:
    weights.write(folder + "/one")
step()
"""


@pytest.mark.parametrize("how", ["unedited", pytest.param("written", marks=MATRIX)])
def test_all_ranks_write_checkpoints_to_one_path(how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CHECKPOINTS)
    words = [*launch.command("native", 2), sys.executable, str(program)]
    code, output = launch.run(
        [*words, str(tmp_path), how], launch.environment(forked=True), 120
    )
    assert code == 0, output
    files = {"checkpoint"} | {
        f"ckpt-{number}.{kind}"
        for number in (7, 8)
        for kind in ("index", "data-00000-of-00001")
    }
    assert {file.name for file in (tmp_path / "all").iterdir()} == files
    assert "NotFoundError" not in output  # for files that another rank has deleted
    assert (tmp_path / "one.index").exists()


UNEDITED = """
import collective
import tensorflow as tf
collective.distribute_keras("native", output="all")
distribute = tf.distribute
kinds = [
    lambda: distribute.MirroredStrategy(["CPU:0"]),
    lambda: distribute.OneDeviceStrategy("/cpu:0"),
    lambda: distribute.experimental.CentralStorageStrategy(),
    lambda: distribute.get_strategy(),
    lambda: distribute.MultiWorkerMirroredStrategy(),
]
for make in kinds:
    strategy = make()
    contexts = []
    def make_data(context):
        contexts.append(context)
        return tf.data.Dataset.range(8).batch(context.get_per_replica_batch_size(4))
    rows = []
    for batch in strategy.distribute_datasets_from_function(make_data):
        rows.append(strategy.experimental_local_results(batch)[0].numpy().tolist())
    c, r = contexts[0], strategy.cluster_resolver.task_id
    assert strategy.num_replicas_in_sync == c.num_replicas_in_sync == 2
    if make is kinds[-1]:
        assert (c.num_input_pipelines, c.input_pipeline_id) == (2, r)
        shard = tf.data.Dataset.range(4).shard(2, r)
        assert [int(i) for i in shard] == [r, r + 2]
        assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]], rows
    else:
        assert (c.num_input_pipelines, c.input_pipeline_id) == (1, 0)
        assert rows == ([[2, 3], [6, 7]] if r else [[0, 1], [4, 5]]), rows
    with strategy.scope():
        assert distribute.get_strategy() is strategy
for other in (distribute.TPUStrategy, distribute.experimental.ParameterServerStrategy):
    try:
        other(None)
    except collective.UsageError as error:
        assert other.__name__ in str(error)
    else:
        raise AssertionError(other)
"""


def test_strategies_of_a_script(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(UNEDITED)
    words = [*launch.command("native", 2), sys.executable, str(program)]
    env = launch.environment(forked=True, TF_CONFIG="{}")
    code, output = launch.run(words, env, 120)
    assert code == 0, output
