"""What the tests of the check of the step share."""

import pytest

from collective.training.verification import verify


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Nothing is known of earlier checks, as in a process of another user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verify, "_known", {})
