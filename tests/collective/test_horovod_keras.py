"""Horovod's Keras interface: fit with every callback, saved models, elastic state."""

import numpy as np
import pytest
from rank_data import values

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

ROWS, BATCH, RATE = 12, 4, 0.25


@pytest.fixture(scope="module")
def hvdk(hvd):
    import collective.tensorflow.keras as hvdk

    return hvdk


def data(rank):
    """Return x [ROWS, 3] and y [ROWS, 1] of a rank."""
    x = values(rank, (ROWS, 3), "float32", 1) / 8
    return x, (x @ [[1.0], [-2.0], [0.5]] + rank).astype("float32")


def linear(rank):
    """Return a model y = x w, whose w differs between ranks."""
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer=keras.initializers.Constant(rank + 1.0)
    )
    return keras.Sequential([keras.Input((3,)), layer])


def number(variable):
    return int(keras.ops.convert_to_numpy(variable))


def compiled_step(optimizer, variable):
    return tf.function(lambda gradient: optimizer.apply([gradient], [variable]))


class Watch(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.weights, self.rates, self.means = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0].copy())
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def on_epoch_end(self, epoch, logs=None):
        self.means.append(logs["loss"])


def test_fit_with_callbacks_trains_what_numpy_trains(hvdk, rank, size):
    root, epochs, momentum = size - 1, 3, 0.5
    model, watch, verbose = linear(rank), Watch(), int(rank == 0)
    model.compile(
        hvdk.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=momentum)), "mse"
    )
    history = model.fit(
        *data(rank),
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvdk.callbacks.BroadcastGlobalVariablesCallback(root),
            hvdk.callbacks.MetricAverageCallback(),
            hvdk.callbacks.LearningRateWarmupCallback(
                RATE, warmup_epochs=2, verbose=verbose
            ),
            hvdk.callbacks.LearningRateScheduleCallback(RATE, 0.5, start_epoch=2),
            watch,
        ],
    )
    # The same in NumPy, on the batches of all ranks.
    weight, velocity, rate = np.full((3, 1), root + 1.0), np.zeros((3, 1)), RATE
    steps, losses = ROWS // BATCH, []
    for step in range(epochs * steps):
        epoch, before = step / steps, rate
        if epoch < 2:
            rate = RATE / size * ((epoch + 1 / steps) * (size - 1) / 2 + 1)
        elif step % steps == 0:
            rate = RATE * 0.5 ** (epoch - 2)
        # Horovod's correction of the momentum for this batch.
        corrected = momentum * rate / before
        np.testing.assert_allclose(watch.rates[step], rate, rtol=1e-5)
        # Equal on all ranks before the first step, too.
        np.testing.assert_allclose(watch.weights[step], weight, rtol=1e-4)
        gradient, loss = np.zeros((3, 1)), 0.0
        for other in range(size):
            x, y = (part[step % steps * BATCH :][:BATCH] for part in data(other))
            off = x @ weight - y
            gradient += 2 * x.T @ off / BATCH / size
            loss += (off**2).mean() / size
        velocity = corrected * velocity - rate * gradient
        weight = weight + velocity
        losses.append(loss)
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-4)
    means = np.reshape(losses, (epochs, steps)).mean(1)
    np.testing.assert_allclose(watch.means, means, rtol=1e-4)
    np.testing.assert_allclose(history.history["loss"], means, rtol=1e-4)
    assert history.history["lr"][-1] == pytest.approx(RATE)


def test_broadcast_callback_leaves_local_variables(hvdk, rank, size):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=rank)]
    )
    model.compile(keras.optimizers.Adam(0.5 + rank), "mse")
    model.set_weights([np.full((3, 2), rank), np.full(2, rank)])
    seed = np.array(model.layers[1].seed_generator.state)
    kernel = model.layers[0].kernel
    callback = hvdk.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[kernel.value]
    )
    callback.set_model(model)
    callback.on_train_begin()
    assert (kernel.numpy() == rank).all()
    assert not model.get_weights()[1].any()
    assert float(model.optimizer.learning_rate.numpy()) == 0.5
    np.testing.assert_array_equal(model.layers[1].seed_generator.state, seed)
    with pytest.raises(ValueError, match="Variable"):
        hvdk.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["x"])
    callback = hvdk.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="no variables yet"):
        callback.on_train_begin()


@pytest.mark.parametrize("eager", [False, True])
def test_broadcast_callback_builds_what_has_no_shape_yet(hvdk, rank, size, eager):
    class Own(keras.Model):
        """Makes its variables at its first call, and has a step of its own."""

        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(
                1, use_bias=False, kernel_initializer=keras.initializers.Constant(rank)
            )

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    model, root = Own(), size - 1
    model.compile(
        hvdk.DistributedOptimizer(keras.optimizers.SGD(RATE)), run_eagerly=eager
    )
    model.fit(
        *(part[:BATCH] for part in data(rank)),
        batch_size=BATCH,
        verbose=0,
        callbacks=[hvdk.callbacks.BroadcastGlobalVariablesCallback(root)],
    )
    start, gradient = np.full((3, 1), float(root)), np.zeros((3, 1))
    for other in range(size):
        x, y = (part[:BATCH] for part in data(other))
        gradient += 2 * x.T @ (x @ start - y) / BATCH / size
    np.testing.assert_allclose(
        model.get_weights()[0], start - RATE * gradient, rtol=1e-4
    )


def test_mixed_precision_skips_the_step_on_all_ranks(hvdk, rank, size):
    def inside(optimizer):
        # model.compile does the same under the policy mixed_float16.
        optimizer = hvdk.DistributedOptimizer(optimizer)
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)

    def outside(optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        return hvdk.DistributedOptimizer(optimizer)

    for wrap in inside, outside:
        optimizer = wrap(keras.optimizers.SGD(RATE))
        variable = keras.Variable(tf.zeros([3]))
        step = compiled_step(optimizer, variable)
        bad = np.inf if rank == size - 1 else 1.0  # on one rank only
        step(tf.constant([bad, 1.0, 1.0]))
        assert not variable.numpy().any() and number(optimizer.iterations) == 0
        assert float(optimizer.dynamic_scale.numpy()) == 4.0
        step(tf.fill([3], 4.0 * rank))
        np.testing.assert_allclose(variable, np.full(3, -RATE * (size - 1) / 2))
        assert float(optimizer.dynamic_scale.numpy()) == 4.0


def test_fit_applies_a_short_tail_and_is_compiled_around_sums(hvdk, rank, size):
    marked = []

    class Marks(keras.losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            loss = super().call(y_true, y_pred)
            marked.append(loss.op.get_attr("_XlaCompile"))
            return loss

    model = linear(0)
    model.compile(
        hvdk.DistributedOptimizer(
            keras.optimizers.SGD(RATE), backward_passes_per_step=2
        ),
        Marks(),
        jit_compile=True,
    )
    model.fit(*data(rank), batch_size=BATCH, shuffle=False, verbose=0)
    assert marked and all(marked)
    weight = np.ones((3, 1))
    for steps in [0, 1], [2]:
        gradient = np.zeros((3, 1))
        for other in range(size):
            for step in steps:
                x, y = (part[step * BATCH :][:BATCH] for part in data(other))
                gradient += 2 * x.T @ (x @ weight - y) / BATCH / size
        weight = weight - RATE * gradient
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-4)


def test_a_saved_model_goes_on_over_all_ranks(hvdk, rank, size, tmp_path):
    model = linear(0)
    model.compile(hvdk.DistributedOptimizer(keras.optimizers.Adam(RATE)), "mse")
    model.train_on_batch(*(part[:BATCH] for part in data(rank)))
    file = tmp_path / "model.keras"
    model.save(file)
    plain = keras.models.load_model(file)
    assert type(plain.optimizer) is keras.optimizers.Adam
    loaded = hvdk.load_model(file, compression=hvdk.Compression.fp16)
    for mine, theirs in zip(
        loaded.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    for each in model, loaded:
        each.train_on_batch(*(part[BATCH : 2 * BATCH] for part in data(rank)))
    np.testing.assert_allclose(
        loaded.get_weights()[0], model.get_weights()[0], rtol=1e-3
    )
    everyone = np.array(hvdk.allgather(loaded.get_weights()[0][None]))
    assert (everyone == everyone[0]).all()
    with pytest.raises(NotImplementedError, match="legacy"):
        hvdk.load_model(file, legacy_opts=True)


def test_what_is_excluded_from_weight_decay_stays_so(hvdk):
    kernel, bias, scale = (
        keras.Variable([2.0], name=name) for name in ("kernel", "bias", "scale")
    )
    plain = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    plain.exclude_from_weight_decay(var_list=[scale], var_names=["bias"])
    for optimizer in (
        hvdk.DistributedOptimizer(plain),
        hvdk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(plain)),
    ):
        optimizer.apply([tf.zeros([1])] * 3, [kernel, bias, scale])
    assert float(bias[0]) == float(scale[0]) == 2
    assert float(kernel[0]) == pytest.approx(2 * 0.95**2)


def test_best_model_checkpoint(hvdk, tmp_path):
    callback = hvdk.callbacks.BestModelCheckpoint(monitor="loss")
    assert callback.save_best_only
    with pytest.raises(ValueError, match="no file"):
        callback.on_train_begin()
    callback.filepath = str(tmp_path / "best.keras")
    model = linear(0)
    model.compile("sgd", "mse")
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {"loss": 1.0})
    callback.on_epoch_end(1, {"loss": 2.0})
    assert callback.best == 1.0 and (tmp_path / "best.keras").exists()


def test_schedule_needs_what_it_cannot_know(hvdk):
    with pytest.raises(ValueError, match="initial_lr"):
        hvdk.callbacks.LearningRateScheduleCallback(None, 1.0)
    callback = hvdk.callbacks.LearningRateWarmupCallback(RATE)
    callback.set_params({})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_begin()


def test_values_of_any_kind(hvdk, rank, size):
    import collective.keras as hvd_keras

    for face in hvdk, hvd_keras:
        assert float(face.allreduce(float(rank))) == (size - 1) / 2
        assert float(face.allreduce(float(rank), op=face.Sum)) == sum(range(size))
        np.testing.assert_array_equal(face.allgather([rank]), range(size))
        np.testing.assert_array_equal(
            face.broadcast([rank, 1], size - 1), [size - 1, 1]
        )
        rows = np.arange(size, dtype="float32") * (rank + 1)
        part = face.reducescatter(rows, op=face.Sum)
        np.testing.assert_allclose(part, [rank * size * (size + 1) / 2])


@pytest.mark.parametrize("masked", [False, True])
def test_sync_batch_normalization(hvd, rank, size, masked):
    def rows(other):  # their number differs, too
        return values(other, (other + 2, 4, 3), "float32", 9) / 4 + other

    def mask(other):
        return values(other, (other + 2, 4), "uint8", 9) % 3 > 0

    layer = hvd.SyncBatchNormalization(momentum=0.5, epsilon=1e-3)
    x, which = tf.constant(rows(rank)), tf.constant(mask(rank)) if masked else None
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=which)
        loss = tf.reduce_sum(y**3) * (rank + 1.0)
    gradient = tape.gradient(loss, x)
    everyone = np.concatenate([rows(r) for r in range(size)]).astype("float64")
    masks = np.concatenate([mask(r) for r in range(size)])
    kept = everyone[masks] if masked else everyone.reshape(-1, 3)
    mean, variance = kept.mean(0), kept.var(0)
    np.testing.assert_allclose(
        y, (rows(rank) - mean) / np.sqrt(variance + 1e-3), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(layer.moving_mean, mean / 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, variance / 2 + 0.5, rtol=1e-4)
    # The gradient in one process with all rows.
    alone = keras.layers.BatchNormalization(momentum=0.5, epsilon=1e-3)
    whole = tf.constant(everyone.astype("float32"))
    weights = np.concatenate([np.full((r + 2, 1, 1), r + 1.0) for r in range(size)])
    with tf.GradientTape() as tape:
        tape.watch(whole)
        y = alone(whole, training=True, mask=tf.constant(masks) if masked else None)
        loss = tf.reduce_sum(y**3 * weights.astype("float32"))
    start = sum(r + 2 for r in range(rank))
    wanted = tape.gradient(loss, whole)[start : start + rank + 2]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        layer(x),
        (x - mean / 2) / np.sqrt(variance / 2 + 0.5 + 1e-3),
        rtol=1e-3,
        atol=1e-3,
    )
    assert type(layer).from_config(layer.get_config()).momentum == 0.5
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    # The layers have names of their own, which a functional model needs.
    first, second = (hvd.SyncBatchNormalization() for _ in range(2))
    assert first.name != second.name
    layers = [keras.Input((3,)), first, second]
    assert keras.Sequential(layers).output_shape == (None, 3)


def test_elastic_state_of_a_model(hvdk, rank, size):
    model = linear(rank)
    model.compile(hvdk.DistributedOptimizer(keras.optimizers.SGD(RATE)), "mse")
    state = hvdk.elastic.KerasState(model, batch=rank, epoch=0)
    weights = []

    @hvdk.elastic.run
    def train(state):
        weights.append(model.get_weights()[0][0, 0])
        assert (state.batch, state.epoch) == (0, 0)
        model.fit(
            *data(rank),
            batch_size=BATCH,
            epochs=2,
            verbose=0,
            callbacks=[
                hvdk.elastic.CommitStateCallback(state, batches_per_commit=2),
                hvdk.elastic.UpdateBatchStateCallback(state),
                hvdk.elastic.UpdateEpochStateCallback(state),
            ],
        )
        return "done"

    assert train(state) == "done"
    assert weights == [1.0]  # rank 0's, on every rank
    assert (state.batch, state.epoch) == (0, 2)
    trained = model.get_weights()[0]
    model.set_weights([trained + 1])
    state.batch = 7
    state.restore()  # to the last commit, which callbacks saw before the epoch's end
    np.testing.assert_array_equal(model.get_weights()[0], trained)
    assert state.batch != 7
    with pytest.raises(ValueError, match="built first"):
        hvdk.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_elastic_state_of_variables_begins_anew(hvd, rank, size):
    variable = tf.Variable([float(rank), 5.0])
    state = hvd.elastic.TensorFlowState([variable], turn=rank)
    resets, seen = [], []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @hvd.elastic.run
    def train(state, limit):
        seen.append((float(variable[0]), state.turn))
        variable.assign_add([1.0, 0.0])
        state.turn += 1
        if state.turn == 1:
            state.commit()
            variable.assign([9.0, 9.0])
            raise hvd.elastic.HorovodInternalError("on every rank")
        if state.turn < limit:
            state.commit()
            raise hvd.elastic.HostsUpdatedInterrupt(skip_sync=True)
        return float(hvd.allreduce(variable, op=hvd.Sum)[0])

    assert train(state, 3) == 3.0 * size
    assert seen == [(0.0, 0), (1.0, 1), (2.0, 2)] and len(resets) == 2
    with pytest.raises(ValueError, match="no variables"):
        hvd.elastic.TensorFlowState()


def test_a_rank_that_hears_of_other_hosts_interrupts_all(hvd, rank, monkeypatch):
    from collective.common.exceptions import HostsUpdatedInterrupt

    state = hvd.elastic.ObjectState(step=rank)
    monkeypatch.setenv("COLLECTIVE_MIN_NP", "1")
    state.commit()
    if rank == 0:
        state.on_hosts_updated(0.0, 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.commit()  # it is notified once


def test_a_lost_worker_is_a_clear_error(hvd, rank):
    from collective.errors import CollectiveError

    @hvd.elastic.run
    def train(state):
        raise tf.errors.AbortedError(None, None, "rank 1 died\nHINT: look there")

    with pytest.raises(CollectiveError, match="a worker was lost: rank 1 died"):
        train(hvd.elastic.ObjectState(step=rank))
