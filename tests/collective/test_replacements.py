"""Attributes that are replaced for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collective.replacements import replacing


class Plain:
    @staticmethod
    def method():
        return "plain"


class Derived(Plain):
    pass


def test_the_attribute_is_as_it_was():
    owner = SimpleNamespace(name=1)
    with replacing(owner, "name", 2), replacing(owner, "name", 3):
        assert owner.name == 3
    assert owner.name == 1
    with pytest.raises(ValueError), replacing(owner, "name", 2):
        raise ValueError
    assert owner.name == 1


def test_what_was_inherited_is_inherited_again():
    with replacing(Derived, "method", lambda: "other"):
        assert Derived.method() == "other" and Plain.method() == "plain"
    assert "method" not in vars(Derived) and Derived.method() == "plain"
    with replacing(Plain, "method", lambda: "other"):
        assert Derived.method() == "other"
    assert isinstance(vars(Plain)["method"], staticmethod)


def test_a_name_that_is_not_there_is_an_error():
    owner = SimpleNamespace()
    with pytest.raises(AttributeError, match="nmae"), replacing(owner, "nmae", 1):
        pass
    with replacing(owner, "name", 1, new=True):
        assert owner.name == 1
    assert not hasattr(owner, "name")
