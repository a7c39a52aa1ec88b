"""Which ranks may begin a training in a job that grows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collective.errors import CollectiveError
from collective.training.observers.elastic import fit_membership


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("joined", [False, True])
def test_ranks_that_joined_repeat_no_training_of_others(rank, joined, monkeypatch):
    """Ranks that began the job have the lowest numbers, so rank 0 is one while any is left."""
    monkeypatch.setattr(fit_membership, "_has_joined", joined)
    backend = SimpleNamespace(rank=rank)
    if not joined or rank:
        fit_membership.check_trainings(backend)
        return
    with pytest.raises(CollectiveError, match="repeat trainings") as refused:
        fit_membership.check_trainings(backend)
    assert "one collective.fit" in refused.value.hint


def test_a_rank_that_joins_is_known_as_one(monkeypatch):
    monkeypatch.setattr(fit_membership, "_has_joined", False)
    monkeypatch.setattr(fit_membership, "Elastic", SimpleNamespace)
    fit_membership._join(SimpleNamespace(enter=lambda: [0, -1]))
    assert fit_membership._has_joined
