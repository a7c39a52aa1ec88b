"""The description of a function has all that changes its results."""

from __future__ import annotations

import argparse
import sys
import types

import keras
import numpy as np

from collective.training.verification.descriptions import describe

args = argparse.Namespace(loss="mse", out="folder")


def reading_settings(y, p):
    return y if args.loss == "mse" else p


def closing_over(value):
    return lambda y, p: value.square(y - p)


def test_modules_are_named():
    """Their contents are not described, because they refer to everything."""
    assert "numpy" in describe(closing_over(np))
    assert describe(closing_over(keras)) != describe(closing_over(np))


def test_settings_count_as_far_as_they_are_read():
    before = describe(reading_settings)
    args.out = "another"
    assert describe(reading_settings) == before
    args.loss = "clip"
    try:
        assert describe(reading_settings) != before
    finally:
        args.loss, args.out = "mse", "folder"


def test_code_of_the_users_modules_counts():
    """A helper may be edited between two runs, or on one of the ranks."""

    def described(power):
        module = types.ModuleType("project_losses")
        exec(
            f"def square(x): return x ** {power}\ndef other(): return {power}",
            vars(module),
        )
        sys.modules["project_losses"] = module
        return describe(closing_over(module))

    try:
        assert described(2) == described(2) != described(3)
    finally:
        del sys.modules["project_losses"]


def test_an_attribute_is_not_the_global_variable_of_its_name():
    def reading(layer):
        return layer.started

    before = describe(reading)
    globals()["started"] = 5.0  # another number on each rank, as that of a clock
    try:
        assert describe(reading) == before
        assert describe(lambda: started) != before  # noqa: F821
    finally:
        del globals()["started"]
