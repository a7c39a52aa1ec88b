"""What the doctor found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective.doctor.findings import Finding, usable


def machine(found: dict[str, Any]) -> str:
    """One machine, as lines of name and value."""
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


def backends(found: dict[str, Any] | None) -> str:
    """Each backend: usable or not, why, and the line to type."""
    if found is None:
        return "backends: not installed here (only the package collective is)"
    lines = []
    width = max(map(len, found)) + 2
    for name, backend in found.items():
        alone, launched = backend["alone"], backend["launched"]
        best = alone if alone["usable"] or not launched["usable"] else launched
        answer = "yes" if usable(backend) else "no "
        lines.append(f"{name:{width}}{answer}  {best['reason']}")
        # How to start the backend, or what to install for it.
        hint = alone["hint"] if not alone["usable"] else ""
        if not usable(backend):  # the hint that belongs to the reason shown
            hint = alone["hint"] or launched["hint"]
        if hint:
            lines.append(f"{'':{width}}     HINT: {hint}")
    return "\n".join(lines)


def hosts(machines: Sequence[dict[str, Any]]) -> str:
    """A line for each host."""
    return _table(
        ("host", "own name", "cores", "memory", "GPUs", "clock ahead by"),
        *(
            (
                *(found["name"], found["host"], str(found["cores"]["usable"])),
                *(_size(found["memory"]["all"]), str(len(found["gpus"]))),
                "{:.1f} to {:.1f} s".format(*found["clock_error"]),
            )
            for found in machines
        ),
    )


def wires(results: Sequence[dict[str, Any]]) -> str:
    """A line for each pair of hosts."""
    names = ("from", "to", "interface", "address")
    return _table(
        (*names, "latency", "bandwidth"),
        *(
            (
                *(result[name] for name in names),
                f"{result['latency'] * 1e6:.0f} us",
                f"{result['bandwidth'] / 1e9:.2f} GB/s",
            )
            for result in results
        ),
    )


def findings(found: Sequence[Finding]) -> str:
    """The findings, fatal ones first."""
    if not found:
        return "Nothing is wrong."
    ordered = sorted(found, key=lambda finding: not finding.fatal)
    return "\n".join(
        f"{'PROBLEM' if f.fatal else 'note'}: {f.what}\n  HINT: {f.hint}"
        for f in ordered
    )


def _table(*rows: Sequence[str]) -> str:
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return "\n".join(
        "".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
