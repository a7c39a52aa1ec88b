"""Replacements inside Keras for distributed optimizers end with the last of these."""

from __future__ import annotations

import gc

import keras
import pytest

from collective.tensorflow import keras_methods


class Optimizer:
    """Stands for an optimizer."""


class Base:
    def inherited(self):
        return "stock"


class Owner(Base):
    def own(self):
        return "stock"


def louder(stock):
    return lambda self: stock(self).upper()


REPLACED = [(Owner, "own", louder), (Owner, "inherited", louder)]


def test_methods_are_stock_again_without_an_optimizer(monkeypatch):
    monkeypatch.setattr(keras_methods, "_living", set())
    one, other = Optimizer(), Optimizer()
    keras_methods.replace_for(one, REPLACED)
    keras_methods.replace_for(other, REPLACED)
    assert Owner().own() == Owner().inherited() == "STOCK"
    del one
    gc.collect()
    assert Owner().own() == "STOCK"
    del other
    gc.collect()
    assert Owner().own() == Owner().inherited() == "stock"
    assert "inherited" not in vars(Owner)


def test_what_another_has_put_over_it_stays(monkeypatch):
    monkeypatch.setattr(keras_methods, "_living", set())
    one, stock = Optimizer(), Owner.own
    keras_methods.replace_for(one, REPLACED[:1])
    monkeypatch.setattr(Owner, "own", lambda self: "another's")
    del one
    gc.collect()
    assert Owner().own() == "another's"
    monkeypatch.undo()
    Owner.own = stock


def test_of_keras_itself():
    import collective.tensorflow.keras as hvd

    gc.collect()
    if keras_methods._living:
        pytest.skip("another test has left a distributed optimizer")
    stock = keras.optimizers.LossScaleOptimizer.check_finite
    own = keras.Model.make_train_function
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    assert keras.optimizers.LossScaleOptimizer.check_finite is not stock
    assert keras.Model.make_train_function is not own
    del optimizer
    gc.collect()
    assert keras.optimizers.LossScaleOptimizer.check_finite is stock
    assert keras.Model.make_train_function is own
