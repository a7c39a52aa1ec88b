"""Searches with scikit-learn around ``keras.wrappers``, and prints the scores."""

import keras
import numpy as np
from sklearn.model_selection import GridSearchCV, cross_val_score

keras.config.set_floatx("float64")
keras.utils.set_random_seed(7)
X = np.random.default_rng(0).normal(size=(41, 5))
Y = np.argmax(X[:, :3], axis=1)


def make(X, y, units=4):
    layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.05), "categorical_crossentropy")
    return model


classifier = keras.wrappers.SKLearnClassifier(
    make, model_kwargs={"units": 4}, fit_kwargs=dict(epochs=2, batch_size=8, verbose=0)
)
print(cross_val_score(classifier, X, Y, cv=2).tolist())
search = GridSearchCV(classifier, {"model_kwargs": [{"units": 4}, {"units": 8}]}, cv=2)
search.fit(X, Y)
print(search.best_params_, search.cv_results_["mean_test_score"].tolist())
print([float(abs(w).sum()) for w in search.best_estimator_.model_.get_weights()])
