"""Lists the operations with a rule that no test emits: a plugin of pytest.

    python -m pytest tests/training/partition -p tests.training.partition.emitted

An operation counts if its rule has given a plan in a test. The list is only as complete as
the tests that were run.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import Any

import pytest

#: The tables of rules, and the operations whose rules have given plans.
TABLES = ("RULES", "AXIS_RULES", "OWNED_RULES", "HANDLE_RULES")
_emitted: dict[str, set[str]] = defaultdict(set)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note each use of a rule from now on."""
    from collective.training.partition import plans, rules

    assert rules.__all__  # the import declares all rules
    for name in TABLES:
        table = getattr(plans, name)
        for operation in [*table]:
            table[operation] = _noted(table[operation], _emitted[name], operation)


def _noted(rule: Any, emitted: set[str], operation: str) -> Any:
    def noting(*args: Any) -> Any:
        plan = rule(*args)
        if plan is not None and not plan.is_fallback:
            emitted.add(operation)
        return plan

    return noting


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the operations of each table that no test has emitted."""
    from collective.training.partition import plans

    for name in TABLES:
        table, emitted = getattr(plans, name), _emitted[name]
        title = f"{name}: {len(emitted)} of {len(table)} operations are emitted"
        terminalreporter.section(title)
        missing = ", ".join(sorted(set(table) - emitted))
        terminalreporter.line(textwrap.fill(f"by no test: {missing or 'none'}", 100))
