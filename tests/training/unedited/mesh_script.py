"""Trainings over a mesh; stock Keras runs them on one device.

``mesh_script.py FOLDER MESH [CASE ...]`` writes what each case gives to
``FOLDER/CASE.RANK.npz``. MESH has the ranks of the batch and of the model, as ``2x2``, or
those of two axes for the model, as ``1x2x2``; or it is ``none``: then the models are laid
out by an option, or not at all. The rank LATE_RANK is late when it first reads weights.
"""

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

FOLDER, MESH, NAMES = sys.argv[1], sys.argv[2], sys.argv[3:]
L, ROWS = keras.layers, 26
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")


def mlp():
    layers = [
        keras.Input((6,)),
        L.Dense(8, "relu", name="up", kernel_regularizer="l2"),
        L.Dropout(0.2, seed=5),
        L.Dense(4, name="down"),
        L.Dense(5, name="odd"),
        L.Dense(1, name="out"),
    ]
    return keras.Sequential(layers)


def compiled(make, optimizer, loss="mse", **more):
    model = make()
    model.compile(optimizer, loss, **more)
    return model


def cnn():
    layers = [
        keras.Input((6, 6, 3)),
        L.Conv2D(8, 3, name="one"),
        L.BatchNormalization(name="norm"),
        L.ReLU(),
        L.DepthwiseConv2D(3, padding="same", name="each"),
        L.MaxPooling2D(),
        L.Conv2D(4, 1, name="two"),
        L.GlobalAveragePooling2D(),
        L.Dense(1),
    ]
    return keras.Sequential(layers)


def residual():
    """A block of ResNet, whose channels are cut along both ways around."""
    inputs = keras.Input((6, 6, 4))
    h = L.Conv2D(8, 3, padding="same", use_bias=False, name="one")(inputs)
    h = L.ReLU()(L.BatchNormalization(name="norm")(h))
    h = L.Conv2D(4, 3, padding="same", use_bias=False, name="two")(h)
    h = L.ReLU()(L.Add()([L.BatchNormalization()(h), inputs]))
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(h)))


class Experts(L.Layer):
    """A mixture: the rows of each are weighed by a gate, of which the two best count."""

    def build(self, shape):
        self.gate = self.add_weight((shape[-1], 4), name="gate")
        self.first = self.add_weight((4, shape[-1], 8), name="first")
        self.second = self.add_weight((4, 8, shape[-1]), name="second")

    def call(self, x):
        scores = keras.ops.softmax(x @ self.gate)
        best = keras.ops.top_k(scores, 2)[0][:, -1:]
        scores = keras.ops.where(scores >= best, scores, 0.0)
        h = keras.ops.relu(keras.ops.einsum("ri,eij->erj", x, self.first))
        found = keras.ops.einsum("erj,ejk->erk", h, self.second)
        return keras.ops.einsum("re,erk->rk", scores, found)


def experts():
    layers = [keras.Input((6,)), Experts(name="experts"), L.Dense(1)]
    return keras.Sequential(layers)


def lstm():
    layers = [
        keras.Input((4, 3)),
        L.LSTM(8, name="long", return_sequences=True, use_cudnn=False),
        L.GRU(4, name="gated", use_cudnn=False),
        L.Dense(1),
    ]
    return keras.Sequential(layers)


class Head(L.Layer):
    """The embedding, once more."""

    def __init__(self, words, **more):
        super().__init__(**more)
        self.words = words

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.words.embeddings))


def transformer():
    inputs = keras.Input((5,), dtype="int32")
    words = L.Embedding(20, 8, name="words")
    h = words(inputs)
    n = L.LayerNormalization()(h)
    h = h + L.MultiHeadAttention(4, 2, name="heads")(n, n, use_causal_mask=True)
    n = L.LayerNormalization()(h)
    h = h + L.Dense(8, name="down")(L.Dense(16, activation="gelu", name="up")(n))
    return keras.Model(inputs, Head(words)(h))


def normed(h, branch):
    return L.LayerNormalization()(L.Add()([h, branch]))


def translator():
    """An encoder and a decoder with one embedding; 0 is padding, and is masked."""
    inputs = keras.Input((5,), dtype="int32")
    words = L.Embedding(20, 8, mask_zero=True, name="words")
    h = words(inputs[:, :3])
    h = normed(h, L.MultiHeadAttention(4, 2, name="heads")(h, h))
    up = L.Dense(16, activation="relu", name="encoder_up")
    source = normed(h, L.Dense(8, name="encoder_down")(up(h)))
    h = words(inputs)
    grouped = L.GroupQueryAttention(2, 4, 2, name="grouped")
    h = normed(h, grouped(h, h, use_causal_mask=True))
    h = normed(h, L.MultiHeadAttention(4, 2, name="cross")(h, source))
    gated = L.Multiply()(
        [L.Dense(16, "silu", name="gate_up")(h), L.Dense(16, name="decoder_up")(h)]
    )
    h = normed(h, L.Dense(8, name="decoder_down")(gated))
    return keras.Model(inputs, Head(words)(h))


class Own(keras.Model):
    """Calls its layers in Python, and has a step of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = L.Dense(8, "tanh", name="up"), L.Dense(4, name="down")
        self.out = L.Dense(1)

    def call(self, x):
        return self.out(self.down(self.up(x)))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss, "norm": norm}


class Gan(keras.Model):
    """Two models, two optimizers, one step."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), L.Dense(8, "tanh", name="up"), L.Dense(6, name="down")]
        )
        self.critic = keras.Sequential(
            [keras.Input((6,)), L.Dense(8, "relu", name="up"), L.Dense(1)]
        )
        self.second = keras.optimizers.Adam(0.01, beta_1=0.5)
        self.built = True

    def call(self, x):
        return self.critic(x)

    def train_step(self, data):
        x = data[0]
        noise = x[:, :3] * 0.5
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(noise))) - tf.reduce_mean(
                self.critic(x)
            )
        found = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(loss, found), found)
        with tf.GradientTape() as tape:
            other = -tf.reduce_mean(self.critic(self.generator(noise)))
        found = self.generator.trainable_variables
        self.second.apply(tape.gradient(other, found), found)
        return {"loss": loss, "generator": other}


COLUMNS, ROW = (None, "model"), ("model", None)
LAYOUTS = {
    ".*up/kernel": COLUMNS,
    ".*up/bias": ("model",),
    ".*down/kernel": ROW,
    ".*odd/kernel": COLUMNS,
    ".*one/kernel": (None, None, None, "model"),
    ".*(one|each)/bias": ("model",),
    ".*norm/.*": ("model",),
    ".*each/kernel": (None, None, "model", None),
    ".*two/kernel": (None, None, "model", None),
    ".*(long|gated)/.*kernel": COLUMNS,
    ".*long/.*bias": ("model",),
    ".*gated/.*bias": COLUMNS,
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*(query|key|value)/bias": ROW,
    ".*attention_output/kernel": ("model", None, None),
    ".*words/.*": ("model", "batch"),
    ".*experts/first": ("model", None, None),
    ".*experts/second": ("model", None, None),
}
# Of a mesh with two axes for the model: other layouts.
BOTH = {
    ".*up/kernel": ("other", "model"),
    ".*down/kernel": ("model", "other"),
    ".*experts/first": ("other", None, "model"),
    ".*experts/second": ("other", "model", None),
    ".*two/kernel": (None, None, "model", "other"),
    ".*words/.*": ("model", "other"),
}
DRAW = np.random.default_rng(3)
BLOCKS = DRAW.normal(size=(ROWS, 6, 6, 4)), DRAW.normal(size=(ROWS, 1))
FLAT = DRAW.normal(size=(ROWS, 6)), DRAW.normal(size=(ROWS, 1))
IMAGES = DRAW.normal(size=(ROWS, 6, 6, 3)), DRAW.normal(size=(ROWS, 1))
SERIES = DRAW.normal(size=(ROWS, 4, 3)), DRAW.normal(size=(ROWS, 1))
WORDS = DRAW.integers(0, 20, (ROWS, 5)).astype("int32")
OPT = keras.optimizers
ADAMW = {"learning_rate": 0.01, "global_clipnorm": 0.1}
# The bias of an attention's keys has no gradient but its rounding, which Adafactor would
# make as large as any other.
OPTIMIZERS = {
    "sgd": lambda: OPT.SGD(0.01, momentum=0.9),
    "adamw": lambda: OPT.AdamW(**ADAMW),
    "adafactor": lambda: OPT.Adafactor(0.01, epsilon_1=1e-18),
}
WORD_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "mlp": (mlp, FLAT),
    "cnn": (cnn, IMAGES),
    "residual": (residual, BLOCKS),
    "lstm": (lstm, SERIES),
    "transformer": (transformer, (WORDS, WORDS)),
    "translator": (translator, (WORDS, WORDS)),
    "experts": (experts, FLAT),
}


def of_model(make, name, optimizer):
    if name in ("transformer", "translator"):
        words = ["sparse_categorical_accuracy"]
        return compiled(make, optimizer, WORD_LOSS, metrics=words)
    return compiled(make, optimizer)


def gan(kind):
    model = compiled(Gan, OPTIMIZERS[kind]())
    if kind != "sgd":
        model.second = OPTIMIZERS[kind]()
    return model


# By name: what makes the compiled model, and its data.
CASES = {
    f"{name}_{kind}": (
        lambda make=make, name=name, optimizer=optimizer: of_model(
            make, name, optimizer()
        ),
        data,
    )
    for name, (make, data) in MODELS.items()
    for kind, optimizer in OPTIMIZERS.items()
}
CASES |= {
    "mlp_adamw": (lambda: compiled(mlp, OPT.AdamW(**ADAMW, use_ema=True)), FLAT),
    "own_adam": (lambda: compiled(Own, OPT.Adam(0.02)), FLAT),
    **{f"gan_{kind}": (lambda kind=kind: gan(kind), FLAT) for kind in OPTIMIZERS},
}


def distribution():
    """Return what lays the models out, on several ranks."""
    devices = keras.distribution.list_devices()
    if MESH == "none" or len(devices) == 1:
        return None
    shape = tuple(map(int, MESH.split("x")))
    names = ("batch", "model", "other")[: len(shape)]
    mesh = keras.distribution.DeviceMesh(shape, names, devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, axes in (LAYOUTS | (BOTH if len(shape) > 2 else {})).items():
        layout_map[pattern] = axes
    return keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )


class Sampling(keras.callbacks.Callback):
    """Reads weights after each epoch, like a script that watches a training."""

    def __init__(self):
        super().__init__()
        self.samples = []

    def on_epoch_end(self, epoch, logs=None):
        rank = os.environ.get("COLLECTIVE_RANK", "none")
        if epoch == 0 and rank == os.environ.get("LATE_RANK"):
            time.sleep(3)
        self.samples.append(sum(np.abs(w).sum() for w in self.model.get_weights()))


def train(name):
    keras.utils.set_random_seed(7)
    make, (x, y) = CASES[name]
    model = make()
    path = os.path.join(FOLDER, name)
    sampling = Sampling()
    best = keras.callbacks.ModelCheckpoint(
        f"{path}.best.weights.h5",
        save_weights_only=True,
        save_best_only=True,
        monitor="loss",
    )
    history = model.fit(
        x, y, batch_size=10, epochs=3, verbose=0, callbacks=[sampling, best]
    )
    found = {f"history {k}": np.array(v) for k, v in history.history.items()}
    weights = model.get_weights()
    found |= {f"trained {i}": w for i, w in enumerate(weights)}
    optimizers = [model.optimizer, *([model.second] if name.startswith("gan") else [])]
    state = [np.array(v) for o in optimizers for v in o.variables]
    found |= {f"state {i}": w for i, w in enumerate(state)}
    found["sampled"] = np.array(sampling.samples)
    if name != "own_adam" and not name.startswith("gan"):
        found["evaluated"] = np.array(model.evaluate(x, y, batch_size=7, verbose=0))
    found["predicted"] = model.predict(x, batch_size=9, verbose=0)
    found["on a batch"] = np.array(model.train_on_batch(x, y))
    found["called"] = np.asarray(model(x[:3]))
    found["parameters"] = np.array(model.count_params())
    model.set_weights([w / 2 for w in model.get_weights()])
    found |= {f"halved {i}": w for i, w in enumerate(model.get_weights())}
    model.save_weights(f"{path}.weights.h5")
    model.set_weights(weights)
    model.load_weights(f"{path}.weights.h5")
    found |= {f"loaded {i}": w for i, w in enumerate(model.get_weights())}
    model.load_weights(f"{path}.best.weights.h5")
    found |= {f"best {i}": w for i, w in enumerate(model.get_weights())}
    if name.startswith("mlp"):
        model.save(f"{path}.keras")
        again = keras.saving.load_model(f"{path}.keras")
        found["of the file"] = again.predict(x, verbose=0)
        again.fit(x, y, batch_size=10, epochs=1, verbose=0)
        found |= {f"continued {i}": w for i, w in enumerate(again.get_weights())}
        saved = tf.train.Checkpoint(model=model).write(f"{path}.checkpoint")
        model.set_weights(weights)
        tf.train.Checkpoint(model=model).read(saved)
        found |= {f"read {i}": w for i, w in enumerate(model.get_weights())}
    if name == "mlp_sgd":
        model.export(f"{path}.exported", verbose=False)
        served = tf.saved_model.load(f"{path}.exported")
        found["exported"] = np.array(served.serve(x))
    np.savez(f"{path}.{os.environ.get('COLLECTIVE_RANK', 0)}.npz", **found)
    return model


def held(model):
    """Return the bytes of this rank's parts, and of the whole variables."""
    stand_ins = [v._value for v in model.variables]
    kept = [v.holder.bytes for v in stand_ins if hasattr(v, "holder")]
    return sum(own for _, own in kept), sum(whole for whole, _ in kept)


if __name__ == "__main__":
    keras.distribution.set_distribution(distribution())
    for case in NAMES or CASES:
        trained = train(case)
        own, whole = held(trained)
        print(f"{case}: {own} of {whole} bytes", flush=True)
        if whole:
            (program, *_) = trained.train_function.programs
            for axis, of_axis in program.mesh.passes.items():
                traffic = of_axis.traffic
                sums, gathers = len(traffic.sums), len(traffic.gathers)
                print(f"{case}: {sums} sums, {gathers} gathers along {axis}")
