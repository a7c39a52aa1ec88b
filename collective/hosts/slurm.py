"""Slurm's allocation: ``SLURM_JOB_NODELIST`` and the tasks on each node.

``node[01-04,7]`` is short for node01 to node04 and node7. The package python-hostlist
reads it, too; its licence is the GPL, which does not fit this project's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from collective.hosts.host import Host, HostError

MOST_NAMES = 100_000
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
# The tasks on each node, and on every node: "2(x3),1" or "4".
_TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def allocation(
    variables: Mapping[str, str], source: str = "the environment"
) -> list[Host]:
    """Return the hosts that the variables name, with their tasks; none without Slurm.

    Errors name the ``source`` of the variables.

    Raises:
        HostError: If a variable is malformed, or two contradict each other.
    """
    given = next((name for name in _LISTS if variables.get(name)), "")
    if not given:
        return []
    try:
        hosts: list[Host] = []
        for part in split(variables[given]):
            hosts += map(Host, expand(part.strip()))
            check_number(hosts)
    except ValueError as error:
        example = f"{given}=node[01-04,7]"
        raise HostError(source, 0, f"{given}: {error}", example) from None
    name = next((name for name in _TASKS if variables.get(name)), "")
    if not name:
        return hosts
    text = variables[name]
    try:
        numbers = counts(text)
    except ValueError as error:
        what = f"{name}={text}: {error}"
        raise HostError(source, 0, what, f"{name}=2(x3),1") from None
    if len(numbers) == 1:  # SLURM_NTASKS_PER_NODE: the same on every node
        numbers *= len(hosts)
    if len(numbers) != len(hosts):
        raise HostError(
            source,
            0,
            f"{name}={text} is for {len(numbers)} hosts, the list has {len(hosts)}",
            f"{name} with one number for each host, as in 2(x3),1 for four",
        )
    return [Host(host.name, n) for host, n in zip(hosts, numbers, strict=True)]


def counts(text: str) -> list[int]:
    """Return the numbers of ``2(x3),1``: 2, 2, 2, 1; ValueError if it is malformed."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None or int(found[1]) < 1:
            raise ValueError(f"{part!r} is not a number of tasks")
        numbers += [int(found[1])] * int(found[2] or 1)
        check_number(numbers)
    return numbers


def check_number(found: Sequence[object]) -> None:
    """Raise ValueError if there are more hosts than any job has."""
    if len(found) > MOST_NAMES:
        raise ValueError(f"over {MOST_NAMES} hosts")


def tasks(hosts: Sequence[Host]) -> str:
    """Return Slurm's short form of the slots of hosts: ``2(x3),1``."""
    runs = [(n, len(list(run))) for n, run in itertools.groupby(h.slots for h in hosts)]
    return ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in runs)


def split(text: str) -> list[str]:
    """Split at commas outside brackets; ValueError if the brackets do not match."""
    parts: list[str] = []
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    if depth:
        raise ValueError(f"the brackets of {text!r} do not match")
    return [*parts, text[start:]]


def expand(text: str) -> list[str]:
    """Return the names of a short form or of one name; ValueError if it is malformed."""
    # Text and the contents of brackets take turns.
    pieces = _BRACKETS.split(text)
    if any(set("[]") & set(plain) for plain in pieces[::2]):
        raise ValueError(f"the brackets of {text!r} do not match")
    choices, count = [], 1
    for place, piece in enumerate(pieces):
        choices.append(_numbers(piece) if place % 2 else [piece])
        count *= len(choices[-1])
        if count > MOST_NAMES:
            raise ValueError(f"{text!r} stands for over {MOST_NAMES} names")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"[{text}] is not a list of numbers like [01-04,7]")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"the range {part} runs backwards")
        if int(last) - int(first) >= MOST_NAMES:
            raise ValueError(f"the range {part} holds over {MOST_NAMES} numbers")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
