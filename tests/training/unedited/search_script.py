"""Searches hyperparameters by each tuner of KerasTuner: ``search_script.py FOLDER KIND...``.

It prints trials, scores and what the best model gives, with all digits.
"""

import json
import sys

import keras
import keras_tuner
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(7)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 5))
Y = X[:, :1] * 2 + np.sin(X[:, 1:2])


def build(hp):
    # It asks for all of them: KerasTuner draws without a seed what a trial did not ask for.
    units = [hp.Int(f"units_{layer}", 4, 8, step=4) for layer in range(2)]
    activation = hp.Choice("activation", ["relu", "tanh"])
    drops, dropped = hp.Boolean("drops"), hp.Float("dropped", 0.1, 0.5)
    rate = hp.Float("learning_rate", 1e-3, 1e-1, sampling="log")
    model = keras.Sequential()
    for each in units[: hp.Int("layers", 1, 2)]:
        model.add(keras.layers.Dense(each, activation))
    if drops:
        model.add(keras.layers.Dropout(dropped))
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def tuner(kind, **more):
    words = dict(hypermodel=build, directory=sys.argv[1], project_name=kind, **more)
    if kind == "random":
        return keras_tuner.RandomSearch(
            max_trials=2, executions_per_trial=2, objective="val_loss", **words
        )
    if kind == "bayesian":
        return keras_tuner.BayesianOptimization(
            max_trials=3, num_initial_points=2, objective="val_loss", **words
        )
    if kind == "hyperband":
        return keras_tuner.Hyperband(
            max_epochs=2, factor=2, objective="val_loss", **words
        )
    return keras_tuner.GridSearch(max_trials=2, objective="val_loss", **words)


def search(kind, **more):
    found = tuner(kind, **more)
    found.search(X, Y, epochs=2, batch_size=8, validation_split=0.3, verbose=1)
    found.results_summary(2)
    # Those of a folder come in the order of its entries.
    trials = sorted(found.oracle.trials.values(), key=lambda trial: trial.trial_id)
    print(json.dumps([[t.score, t.status, t.hyperparameters.values] for t in trials]))
    return found


for kind in sys.argv[2:]:
    search(kind, overwrite=True)
    found = search(kind)  # of this folder: there is nothing left to search
    best = found.get_best_models()[0]
    print(kind, best.evaluate(X, Y, verbose=0))
    print(kind, found.get_best_hyperparameters()[0].values)
    again = build(found.get_best_hyperparameters()[0])
    print(kind, again.fit(X, Y, epochs=1, batch_size=8, verbose=0).history)
