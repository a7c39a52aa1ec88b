"""The doctor's findings, as text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from collective.doctor.findings import Finding


def machine_text(found: dict[str, Any]) -> str:
    """Return one machine, as lines of name and value."""
    mpi, native, horovod = found["mpi"], found["native"], found["horovod"]
    across = f"; between hosts by {native['mpi'] or 'no MPI'}"
    memory, shm, cores = found["memory"], found["shm"], found["cores"]
    rows = {
        "host": found["host"],
        **found["versions"],
        "mpirun": f"{mpi['family']} ({mpi['mpirun']})" if mpi["mpirun"] else "none",
        "mpi4py loads": mpi["mpi4py"] or "nothing",
        "Horovod built for": (", ".join(horovod["built_for"]) or "nothing known")
        if horovod["installed"]
        else "not installed",
        "native core": ("loads" if native["loads"] else "does not load") + across
        if native["built"]
        else "not built",
        "GPUs": "; ".join(found["gpus"]) or "none",
        "NCCL": found["nccl"] or "none",
        "cores": f"{cores['usable']} of {cores['all']}",
        "memory": f"{_size(memory['free'])} of {_size(memory['all'])} free",
        "/dev/shm": f"{_size(shm['free'])} of {_size(shm['all'])} free",
        "interfaces": ", ".join(
            f"{i['name']} {i['address']}" for i in found["interfaces"]
        )
        or "none",
    }
    width = max(map(len, rows)) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in rows.items())


def backends_text(found: dict[str, Any] | None) -> str:
    """Return the backends in three groups, why, and what to type, to fit the terminal.

    Args:
        found: The result of ``collective.backends.registry.describe_backends``; None without it.
    """
    if found is None:
        return "backends: not installed here (only the package collective is)"
    width = min(max(shutil.get_terminal_size().columns, 60), 100)
    here = "Can be used in this process:"
    started = "Can be used here when started so:"
    missing = "Cannot be used on this machine:"
    groups: dict[str, list[str]] = {here: [], started: [], missing: []}
    for name, backend in found.items():
        alone, launched = backend["alone"], backend["launched"]
        if alone["usable"]:
            group, how = here, alone["reason"]
        elif launched["usable"]:
            group, how = started, f"{alone['hint']} (this is {alone['reason']})"
        else:
            group, how = missing, f"{launched['reason']}; HINT: {launched['hint']}"
        for first, text in ((name, backend["summary"]), ("", how)):
            groups[group] += textwrap.wrap(
                text,
                width,
                initial_indent=f"  {first:<21}",
                subsequent_indent=" " * 23,
                break_on_hyphens=False,
            )
    return "\n\n".join("\n".join([g, *lines]) for g, lines in groups.items() if lines)


def hosts_text(machines: Sequence[dict[str, Any]]) -> str:
    """Return a line for each host, and how to measure their network."""
    rows = [("host", "own name", "cores", "memory", "GPUs", "clock ahead by")]
    for found in machines:
        memory, clock = _size(found["memory"]["all"]), found["clock_error"]
        rows.append(
            (
                *(found["name"], found["host"], str(found["cores"]["usable"]), memory),
                *(str(len(found["gpus"])), "{:.1f} to {:.1f} s".format(*clock)),
            )
        )
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    lines = [
        "".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    names = ",".join(found["name"] for found in machines)
    bench = f"collectiverun -H {names} python -m collective.bench --sizes 4,16M"
    return "\n".join([*lines, f"latency and bandwidth between them: {bench}"])


def findings_text(found: Sequence[Finding]) -> str:
    """Return the findings, fatal ones first."""
    if not found:
        return "Nothing is wrong."
    ordered = sorted(found, key=lambda finding: not finding.fatal)
    return "\n".join(
        f"{'PROBLEM' if f.fatal else 'note'}: {f.what}\n  HINT: {f.hint}"
        for f in ordered
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
