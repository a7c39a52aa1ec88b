"""Horovod's tape and optimizers on data that differ between ranks, against NumPy."""

import numpy as np
import pytest
from rank_data import values

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

RATE = 0.5


def everyone(size, shape=(3,), seed=0):
    return np.stack([values(rank, shape, "float32", seed) for rank in range(size)])


def variables(*shapes):
    """Return variables with the same values on every rank."""
    generator = np.random.default_rng(1)
    return [
        keras.Variable(generator.normal(size=shape).astype("float32"))
        for shape in shapes
    ]


def number(variable):
    return int(keras.ops.convert_to_numpy(variable))


def gradients_of(tape, sources, factors):
    """Return the gradients of the loss Σ factor · source."""
    with tape:
        loss = tf.add_n(
            [
                tf.reduce_sum(tf.convert_to_tensor(v) * f)
                for v, f in zip(sources, factors, strict=True)
            ]
        )
    return loss


def adasum(arrays, axis=0):
    """Combine ranks in pairs by the formula of Maleki et al. (2020)."""
    if len(arrays) == 1:
        return arrays[0]
    half = len(arrays) // 2
    a, b = (adasum(part).astype("float64") for part in (arrays[:half], arrays[half:]))
    dot = (a * b).sum()
    return a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": "Sum"},
        {"op": "Max"},
        {"op": "Adasum"},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": "lists"},
        {"num_groups": 1},
        {"compression": "fp16"},
    ],
    ids=str,
)
def test_tape(hvd, rank, size, options):
    sources = variables((3,), (2, 2), (1,))
    factors = [everyone(size, shape, i) for i, shape in enumerate([(3,), (2, 2), (1,)])]
    options = dict(options)
    if options.get("groups") == "lists":
        options["groups"] = [[sources[2], sources[0]]]
    if "compression" in options:
        options["compression"] = hvd.Compression.fp16
    name = options.pop("op", "Average")
    options["op"] = getattr(hvd, name)
    if name == "Adasum" and size & (size - 1):
        pytest.skip("Adasum is of 2, 4, 8 ... ranks")
    reduce = {"Average": np.mean, "Sum": np.sum, "Max": np.max, "Adasum": adasum}[name]

    def step():
        tape = tf.GradientTape()
        loss = gradients_of(tape, sources, [f[rank] for f in factors])
        tape = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, sources)

    for found in step(), tf.function(step)():
        for gradient, factor in zip(found, factors, strict=True):
            np.testing.assert_allclose(gradient, reduce(factor, 0), rtol=1e-3)


def test_tape_of_any_structure_and_before_it_records(hvd, rank, size):
    first, second, unused = variables((3,), (3,), (3,))
    factors = everyone(size)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_sum(tf.convert_to_tensor(first) * factors[rank])
    found = tape.gradient(loss, {"a": first, "b": [unused, first]})
    np.testing.assert_allclose(found["a"], factors.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["b"][1], factors.mean(0), rtol=1e-6)
    assert found["b"][0] is None
    np.testing.assert_allclose(tape.gradient(loss, first), found["a"])
    del second


def test_local_sources(hvd, rank, size):
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    for layer in layers:
        layer.build((1, 3))
    sources = [layer.kernel for layer in layers]
    factors = everyone(size, (3, 1))
    for scaled in True, False:
        tape = tf.GradientTape()
        loss = gradients_of(tape, sources, [factors[rank]] * 2)
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=layers[1], scale_local_gradients=scaled
        )
        local, others = tape.get_local_and_global_gradients(loss, sources)
        assert local[0][0] is sources[1] and others[0][0] is sources[0]
        mine = factors[rank] / (size if scaled else 1)
        np.testing.assert_allclose(local[0][1], mine, rtol=1e-6)
        np.testing.assert_allclose(others[0][1], factors.mean(0), rtol=1e-6)
    with pytest.raises(ValueError, match="Layer"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["x"])
    with pytest.raises(ValueError, match="build the model"):
        hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=keras.layers.Dense(1)
        )


def test_sparse_gradients_combine_repeated_rows(hvd, rank, size):
    # Every rank looks up row 1 twice, and one row of its own.
    table = tf.Variable(tf.ones([size + 2, 2]))
    dense = np.zeros([size + 2, 2])
    for other in range(size):
        np.add.at(dense, [1, other + 2, 1], other + 1.0)
    for as_dense in False, True:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [1, rank + 2, 1])
            loss = tf.reduce_sum(rows) * float(rank + 1)
        tape = hvd.DistributedGradientTape(
            tape, sparse_as_dense=as_dense, gradient_predivide_factor=4.0
        )
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) != as_dense
        if not as_dense:
            np.testing.assert_array_equal(gradient.indices, range(1, size + 2))
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), dense / size)


def test_optimizer_clips_the_sum(hvd, rank, size):
    """It does not clip the parts of each rank: their clipped mean is another vector."""
    (variable,) = variables((3,))
    start, factors = np.array(variable.value), 5 * everyone(size)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, clipnorm=1.0))
    optimizer.apply_gradients([(tf.constant(factors[rank]), variable)])
    mean = factors.mean(0)
    clipped = mean / max(1.0, np.linalg.norm(mean))
    np.testing.assert_allclose(variable.value, start - RATE * clipped, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizer_applies_every_pass(hvd, rank, size, compiled):
    first, second = variables((3,), (2,))
    start = [np.array(v.value) for v in (first, second)]
    rounds = [everyone(size, (3,), seed) for seed in range(5)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(RATE),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
        op=hvd.Sum,
    )

    def step(gradient):
        optimizer.apply_gradients([(gradient, first), (None, second)])

    step = tf.function(step) if compiled else step
    wanted = start[0].copy()
    for turn, round_ in enumerate(rounds):
        step(tf.constant(round_[rank]))
        if turn % 2:
            wanted -= RATE * (rounds[turn - 1] + round_).sum(0) / 2
        np.testing.assert_allclose(first.value, wanted, rtol=1e-5, atol=1e-6)
        assert number(optimizer.iterations) == (turn + 1) // 2
    optimizer.finalize_variable_values([first, second])  # as fit does at its end
    wanted -= RATE * rounds[4].sum(0)  # the mean of one pass
    np.testing.assert_allclose(first.value, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(second.value, start[1])
    assert number(optimizer.iterations) == 3
    optimizer.flush()
    np.testing.assert_allclose(first.value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of, to", [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_of_another_dtype(hvd, rank, size, of, to, passes):
    """Their dtype differs from their variables': Keras casts them when it applies them."""
    dense, sparse = (keras.Variable(np.ones([2, 1], to), dtype=to) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=passes, op=hvd.Sum
    )
    rows = tf.IndexedSlices(tf.fill([1, 1], tf.cast(rank + 1, of)), [1], [2, 1])

    @tf.function
    def step():
        whole = tf.fill([2, 1], tf.cast(rank + 1, of))
        optimizer.apply_gradients([(whole, dense), (rows, sparse)])

    for _ in range(passes):
        step()
    total = passes * size * (size + 1) / 2
    np.testing.assert_array_equal(dense.numpy(), [[1 - total], [1 - total]])
    np.testing.assert_array_equal(sparse.numpy(), [[1], [1 - total]])


@pytest.mark.parametrize(
    "name", ["allreduce", "allgather", "reducescatter", "alltoall"]
)
def test_gradients_into_collectives_of_another_dtype(hvd, rank, size, name):
    """A custom gradient may have any dtype, and keeps it."""

    @tf.custom_gradient
    def wider(x):
        return x, lambda upstream: tf.cast(upstream, tf.float64)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(wider(getattr(hvd, name)(x)))
        return tape.gradient(loss, x)

    x = tf.ones([size])
    found = gradient(x)
    assert found.dtype == tf.float64
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(getattr(hvd, name)(x))
    np.testing.assert_array_equal(found, tape.gradient(loss, x))


def test_optimizer_leaves_local_variables_alone(hvd, rank, size):
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((1, 3))
    (shared,) = variables((3, 1))
    factors, start = everyone(size, (3, 1)), np.array(layer.kernel.value)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(RATE), local_layers=[layer]
    )
    before = np.array(shared.value)
    gradient = tf.constant(factors[rank])
    optimizer.apply([gradient, gradient], [layer.kernel, shared])
    np.testing.assert_allclose(
        layer.kernel.value, start - RATE * factors[rank] / size, rtol=1e-5
    )
    np.testing.assert_allclose(shared.value, before - RATE * factors.mean(0), rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_aggregation_for_an_optimizer_of_ones_own(hvd, rank, size, compiled):
    shared, local = variables((3,), (3,))
    factors, applied = everyone(size), tf.Variable(0)

    def reduce(gradients, of):
        return [None if g is None else hvd.allreduce(g) for g in gradients]

    helper = hvd.LocalGradientAggregationHelper(2, reduce, False, True, rank, 0)
    helper.register_local_var(local)
    optimizer = keras.optimizers.SGD(RATE)

    def step(gradient):
        found = helper.compute_gradients(
            [gradient, None, gradient], [shared, applied, local]
        )
        helper.apply_gradients(lambda: applied.assign_add(1), optimizer)
        return found

    step = tf.function(step) if compiled else step
    first, missing, _ = step(tf.constant(factors[rank]))
    assert missing is None and not first.numpy().any() and int(applied) == 0
    mean, _, own = step(tf.constant(3 * factors[rank]))
    np.testing.assert_allclose(mean, 2 * factors.mean(0), rtol=1e-6)
    np.testing.assert_allclose(own, 2 * factors[rank] / size, rtol=1e-6)
    assert (int(applied), number(optimizer.iterations)) == (1, 1)


def test_optimizer_within_a_process_set(hvd, rank, size):
    if size < 3:
        pytest.skip("a set of some of the ranks, of which two sum")
    process_set = hvd.add_process_set([0, size - 1])
    (variable,) = variables((3,))
    start, factors = np.array(variable.value), everyone(size)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(RATE), process_set=process_set
    )
    optimizer.apply([tf.constant(factors[rank])], [variable])
    mine = factors[[0, -1]].mean(0) if process_set.included() else factors[rank]
    np.testing.assert_allclose(variable.value, start - RATE * mine, rtol=1e-5)
    hvd.remove_process_set(process_set)


def test_optimizer_keeps_class_name_and_state(hvd, rank):
    plain = keras.optimizers.Adam(0.125, beta_1=0.5, weight_decay=0.25)
    (variable,) = variables((3,))
    plain.apply([tf.ones([3])], [variable])
    optimizer = hvd.DistributedOptimizer(plain, name="mine")
    assert isinstance(optimizer, keras.optimizers.Adam) and optimizer.name == "mine"
    assert type(optimizer).__name__ == "Adam" and number(optimizer.iterations) == 1
    assert optimizer.get_config() == plain.get_config() | {"name": "mine"}
    for mine, theirs in zip(optimizer.variables(), plain.variables, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    saved = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(saved) is keras.optimizers.Adam


def test_nothing_trains_without_summing(hvd, monkeypatch):
    (variable,) = variables((3,))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE))
    optimizer.build([variable])

    def around(self, pairs):
        """Stand for a Keras that calls something other than apply."""
        gradients, found = zip(*pairs, strict=True)
        self._backend_apply_gradients(gradients, found)

    monkeypatch.setattr(type(optimizer), "apply_gradients", around)
    with pytest.raises(Exception, match="not summed over the ranks"):
        optimizer.apply_gradients([(tf.ones([3]), variable)])
    missing = hvd.ProcessSet([0])  # was never added
    unset = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), process_set=missing)
    with pytest.raises(ValueError, match="was not added"):
        unset.apply([tf.ones([3])], [variable])
    old = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    with pytest.raises(Exception, match="not summed over the ranks"):
        old.apply_gradients([(tf.ones([3]), tf.Variable(tf.ones([3])))])


def test_options_that_cannot_be(hvd):
    sgd = keras.optimizers.SGD(RATE)
    for options, message in (
        ({"op": hvd.Max}, "only supports Average and Sum"),
        ({"op": hvd.Adasum}, "only supports Average and Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op != Average"),
        ({"groups": 0}, "groups should be"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(sgd, **options)
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(\) got an unexpected"):
        hvd.DistributedOptimizer(sgd, learning_rate=1.0)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))
    with pytest.raises(ValueError, match="not an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")
    old = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    for options in {"backward_passes_per_step": 2}, {"op": hvd.Adasum}:
        with pytest.raises(NotImplementedError, match="HINT"):
            hvd.DistributedOptimizer(old, **options)
