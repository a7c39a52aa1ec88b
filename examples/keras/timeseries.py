"""Forecasting: windows of a series by timeseries_dataset_from_array."""

import sys

import keras
import numpy as np
from keras import layers

LENGTH, AHEAD = 24, 3


def make_series(steps=700):
    """Return two related measurements with a daily and a slow wave."""
    rng = np.random.default_rng(0)
    time = np.arange(steps)
    daily = np.sin(2 * np.pi * time / 24)
    slow = np.sin(2 * np.pi * time / 311)
    series = np.stack([daily + slow, 0.5 * np.roll(daily, 4) - slow], axis=1)
    return (series + 0.1 * rng.normal(size=series.shape)).astype("float32")


def windows(series, start, end):
    """Return windows that begin in a range; the target is the first column, later."""
    return keras.utils.timeseries_dataset_from_array(
        series[: -LENGTH - AHEAD],
        series[LENGTH + AHEAD :, 0],
        sequence_length=LENGTH,
        start_index=start,
        end_index=end,
        batch_size=48,
        shuffle=False,
    )


def main():
    keras.utils.set_random_seed(1)
    series = make_series()
    inputs = keras.Input((LENGTH, 2))
    hidden = layers.GRU(16)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, clipvalue=0.5), "mse", metrics=["mae"]
    )
    history = model.fit(
        windows(series, 0, 520),
        epochs=3,
        validation_data=windows(series, 520, None),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)
        ],
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    forecast = model.predict(windows(series, 520, None), verbose=0)
    print(f"forecasts: {len(forecast)}")
    print(f"last_forecast: {forecast[-1, 0]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
