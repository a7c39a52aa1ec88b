"""A strategy on N ranks; R is the number of this rank."""

from __future__ import annotations

import os

import pytest

from tests import launch


@pytest.fixture(scope="session")
def strategy(backends_by_name):
    from collective.distribute import Strategy

    return Strategy(backends_by_name(os.environ[launch.BACKEND]))


@pytest.fixture
def N(strategy):
    return strategy.num_replicas_in_sync


@pytest.fixture
def R(strategy):
    return strategy.cluster_resolver.task_id
