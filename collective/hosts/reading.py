"""Reads hostfiles and ``-H``, whatever program they were written for."""

from __future__ import annotations

import re
from pathlib import Path

from collective.errors import UsageError
from collective.hosts import line as one_line
from collective.hosts import names, slurm
from collective.hosts.host import Host, HostError, merged

_VARIABLE = re.compile(r"(?:export\s+)?(SLURM_[A-Z_]+)=(.*)")


def read(file: str | Path) -> list[Host]:
    """The hosts of a file, each once, in the order of the file.

    Raises:
        UsageError: If the file cannot be read.
        HostError: At the first bad line: its number, and what was expected there.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"cannot read the hostfile {file}: {error.strerror}",
            hint="--hostfile FILE, with a line like 'node1 slots=4' for each host",
        ) from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise HostError(
            str(file), number, "not a text file", one_line.EXPECTED
        ) from None
    return parse(text, str(file))


def parse(text: str, source: str = "hostfile") -> list[Host]:
    """The hosts of a hostfile's text.

    Args:
        text: Lines in any dialect; ``#`` begins a comment.
        source: The file, for errors.

    Raises:
        HostError: At the first bad line; or if there is no host at all.
    """
    hosts: list[Host] = []
    variables: dict[str, str] = {}
    for number, whole in enumerate(text.splitlines(), start=1):
        line = " ".join(whole.partition("#")[0].split())
        if not line:
            continue
        variable = _VARIABLE.fullmatch(line)
        if variable:
            variables[variable[1]] = variable[2].strip().strip("\"'")
            if hosts:
                raise HostError(
                    source, number, f"{variable[1]} among lines of hosts", one_line.EXPECTED
                )  # fmt: skip
            continue
        if variables:
            raise HostError(
                source, number, f"{line!r} among Slurm's variables", "SLURM_NAME=value"
            )
        try:
            # After a blank there are options, which may have commas: "binding=user:0,1".
            hosts += one_line.parse(line) if " " in line else _items(line)
        except ValueError as error:
            raise HostError(source, number, str(error), one_line.EXPECTED) from None
    hosts = hosts or slurm.allocation(variables, source)
    if not hosts:
        raise HostError(source, 0, "no hosts in it", one_line.EXPECTED)
    return merged(hosts)


def parse_list(text: str, source: str = "-H") -> list[Host]:
    """The hosts of ``-H a:2,b:2``; Slurm's ``node[01-04]:2`` too.

    Raises:
        HostError: If an item is not a host.
    """
    try:
        hosts = _items(text)
    except ValueError as error:
        raise HostError(source, 0, str(error), "-H node1:2,node2:2") from None
    return merged(hosts)


def _items(text: str) -> list[Host]:
    hosts: list[Host] = []
    for item in names.split(text):
        if not item.strip():
            raise ValueError(f"{text!r} has an empty item")
        hosts += one_line.parse(item.strip())
    return hosts
