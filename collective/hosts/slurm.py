"""Hosts of a Slurm allocation: ``SLURM_JOB_NODELIST`` and the tasks on each node."""

from __future__ import annotations

import re
from collections.abc import Mapping

from collective.hosts import names
from collective.hosts.host import Host, HostError

LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
# On each node, and for all nodes: "2(x3),1" or "4".
TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


def allocation(
    variables: Mapping[str, str], source: str = "the environment"
) -> list[Host]:
    """The hosts that the variables name, with their tasks; none outside of Slurm.

    Args:
        variables: The environment, or what a file lists of it.
        source: Where they come from, for errors.

    Raises:
        HostError: If a variable is malformed, or two contradict each other.
    """
    given = next((name for name in LISTS if variables.get(name)), "")
    if not given:
        return []
    hosts = []
    try:
        for part in names.split(variables[given]):
            hosts += [Host(name) for name in names.expand(part.strip())]
    except ValueError as error:
        raise HostError(
            source, 0, f"{given}: {error}", f"{given}=node[01-04,7]"
        ) from None
    for name in TASKS:
        if variables.get(name):
            numbers = _of_each(variables[name], len(hosts), source, name)
            return [Host(h.name, n) for h, n in zip(hosts, numbers, strict=True)]
    return hosts


def _of_each(text: str, hosts: int, source: str, name: str) -> list[int]:
    try:
        numbers = counts(text)
    except ValueError as error:
        raise HostError(
            source, 0, f"{name}={text}: {error}", f"{name}=2(x3),1"
        ) from None
    if len(numbers) == 1:  # SLURM_NTASKS_PER_NODE: the same on every node
        numbers *= hosts
    if len(numbers) != hosts:
        raise HostError(
            source,
            0,
            f"{name}={text} is for {len(numbers)} hosts, the list has {hosts}",
            f"{name} with one number for each host, as in 2(x3),1 for four",
        )
    return numbers


def counts(text: str) -> list[int]:
    """The numbers that Slurm's short form stands for: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: If it is not well formed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None or int(found[1]) < 1:
            raise ValueError(f"{part!r} is not a number of tasks")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def tasks(numbers: list[int]) -> str:
    """Slurm's short form of numbers: ``2(x3),1``."""
    parts: list[tuple[int, int]] = []
    for count in numbers:
        if parts and parts[-1][0] == count:
            parts[-1] = (count, parts[-1][1] + 1)
        else:
            parts.append((count, 1))
    return ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in parts)
