"""A script with ``keras.distribution.ModelParallel``; on one device stock Keras runs it.

``model_parallel_script.py FOLDER [CASE ...]`` writes the trained model of each case to
``FOLDER/CASE.RANK.npz``.
"""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

FOLDER, NAMES = sys.argv[1], sys.argv[2:]
WORDS, LENGTH, CLASSES, ROWS = 11, 5, 3, 26
keras.config.set_floatx("float64")

COLUMNS, ROW = (None, "model"), ("model", None)


def distribution(layouts):
    """Return a distribution with two devices for a replica if there are two."""
    distribution = keras.distribution
    count = len(distribution.list_devices())
    parts = 2 if count % 2 == 0 else 1
    mesh = distribution.DeviceMesh((count // parts, parts), ("batch", "model"))
    layout_map = distribution.LayoutMap(mesh)
    for pattern, axes in layouts.items():
        layout_map[pattern] = axes
    return distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def net(**of_hidden):
    """Return a Sequential without its input, which is not built before ``fit``."""
    return keras.Sequential(
        [
            keras.layers.Embedding(WORDS, 4, name="words"),
            keras.layers.Flatten(),
            keras.layers.Dense(8, "tanh", name="hidden", **of_hidden),
            keras.layers.Dropout(0.2, seed=5),
            keras.layers.Dense(6, "relu", name="second"),
            keras.layers.Dense(CLASSES, "softmax", name="out"),
        ]
    )


def built():
    made = net(kernel_regularizer="l2")
    made.build((None, LENGTH))
    return made


class Subclassed(keras.Model):
    """Calls its layers in Python."""

    def __init__(self):
        super().__init__()
        self.inner = net()

    def call(self, x):
        return self.inner(x)


# By name: the layouts, the model, the optimizer.
CASES = {
    "columns_then_rows": (
        {
            ".*words/embeddings": COLUMNS,
            ".*hidden/kernel": COLUMNS,
            ".*hidden/bias": ("model",),
            ".*second/kernel": ROW,
        },
        built,
        lambda: keras.optimizers.SGD(0.3, weight_decay=0.01, use_ema=True),
    ),
    "rows_of_words": (
        {".*words/embeddings": ROW, ".*second/kernel": COLUMNS},
        net,
        lambda: keras.optimizers.SGD(0.3),
    ),
    "subclassed": (
        {".*(hidden|second)/kernel": COLUMNS, ".*(hidden|second)/bias": ("model",)},
        Subclassed,
        lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5),
    ),
}


def data():
    draw = np.random.default_rng(3)
    x = draw.integers(0, WORDS, (ROWS, LENGTH))
    return x, draw.integers(0, CLASSES, ROWS)


def train(name):
    layouts, make, optimizer = CASES[name]
    keras.utils.set_random_seed(7)
    keras.distribution.set_distribution(distribution(layouts))
    x, y = data()
    model = make()
    model.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    path = os.path.join(FOLDER, name)
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{path}.{{epoch}}.keras"),
        keras.callbacks.EarlyStopping(
            "accuracy", patience=0, baseline=2.0, restore_best_weights=True
        ),
        Sampling(x[:2]),
    ]
    history = model.fit(
        x, y, batch_size=10, epochs=3, validation_split=0.25, callbacks=callbacks[::2]
    )
    found = {f"history {k}": np.array(v) for k, v in history.history.items()}
    weights = model.get_weights()
    found |= {f"trained {i}": w for i, w in enumerate(weights)}
    found["sampled"] = np.array(callbacks[2].samples)
    # Its best epoch is the first, so its weights are restored.
    model.fit(x, y, batch_size=10, epochs=2, callbacks=callbacks[1])
    found |= {f"best {i}": w for i, w in enumerate(model.get_weights())}
    found["evaluated"] = np.array(model.evaluate(x, y, batch_size=7))
    found["predicted"] = model.predict(x, batch_size=9)
    found["called"] = np.asarray(model(x[:3]))
    found["parameters"] = np.array(model.count_params())
    model.summary()
    model.set_weights([w / 2 for w in model.get_weights()])
    found |= {f"halved {i}": w for i, w in enumerate(model.get_weights())}
    model.save(f"{path}.keras")
    model.save_weights(f"{path}.weights.h5")
    model.set_weights(weights)
    model.load_weights(f"{path}.weights.h5")
    found |= {f"loaded {i}": w for i, w in enumerate(model.get_weights())}
    if name != "subclassed":
        again = keras.saving.load_model(f"{path}.keras", compile=False)
        found["of the file"] = again.predict(x)
    own = sum(int(np.prod(v.shape)) for v in model.weights)
    whole = sum(w.size for w in model.get_weights())
    current = keras.distribution.distribution()
    is_split = current.device_mesh.devices.size > 1
    assert (own < whole) == is_split, "every rank has all weights"
    np.savez(f"{path}.{current._process_id}.npz", **found)


class Sampling(keras.callbacks.Callback):
    """Predicts and reads weights after each epoch, like a script that watches a training."""

    def __init__(self, x):
        super().__init__()
        self.x, self.samples = tf.constant(x), []

    def on_epoch_end(self, epoch, logs=None):
        total = sum(np.abs(w).sum() for w in self.model.get_weights())
        outputs = np.asarray(self.model(self.x)).ravel()
        self.samples.append(np.concatenate([[total], outputs]))


if __name__ == "__main__":
    for case in NAMES or CASES:
        train(case)
