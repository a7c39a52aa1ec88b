"""Searches by AutoKeras in a folder, and prints what the best model gives."""

import sys

import autokeras
import keras
import numpy as np

keras.utils.set_random_seed(7)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, 8, 8, 1)).astype("float32")
Y = (X.mean((1, 2, 3)) > 0).astype("int64")


class Head(autokeras.ClassificationHead):
    """Of AutoKeras 3.0, whose own gives Keras 3.15 a number of NumPy's, which refuses it."""

    def build(self, hp, inputs=None):
        self.shape = [*map(int, self.shape)]
        return super().build(hp, inputs)


given = autokeras.ImageInput()
result = Head()(autokeras.ConvBlock()(given))
words = dict(max_trials=2, directory=sys.argv[1], overwrite=True, seed=3)
search = autokeras.AutoModel(given, result, project_name="auto", **words)
search.fit(X, Y, epochs=2, batch_size=16, validation_split=0.25, verbose=2)
print(search.evaluate(X, Y, verbose=0))
print(search.predict(X[:3], verbose=0).ravel().tolist())
search.export_model().summary()
