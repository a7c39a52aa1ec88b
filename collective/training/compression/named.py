"""Finds hooks by the names that ``--hook`` accepts."""

from __future__ import annotations

from collective.errors import UsageError
from collective.training.compression.hook import CommunicationHook
from collective.training.compression.power_sgd import PowerSGD


def make(hook: str | CommunicationHook) -> CommunicationHook:
    """Return the hook named ``powersgd`` or ``powersgd:RANK``; else raise a UsageError."""
    if isinstance(hook, CommunicationHook):
        return hook
    if isinstance(hook, str):
        name, colon, rank = hook.partition(":")
        if name == "powersgd" and (rank.isdecimal() or not colon):
            return PowerSGD(int(rank)) if colon else PowerSGD()
    raise UsageError(
        f"unknown communication hook {hook!r}",
        hint="--hook powersgd:4; hook=collective.training.compression.PowerSGD(rank=4)",
    )
