"""Errors use the names of the caller's interface."""

from __future__ import annotations

from collective.training.process.names import in_arguments


def test_options_in_messages_become_arguments():
    message = (
        "drop --shard-optimizer, or --checkpoint-every 100; --accumulate K, --steps"
    )
    assert in_arguments(message) == (
        "drop shard_optimizer=True, or Checkpoint(folder, every=100); accumulate=K, steps"
    )
    assert in_arguments("--steps-more") == "--steps-more"
