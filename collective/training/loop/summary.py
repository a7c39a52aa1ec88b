"""The summary of a training: a table for people, a JSON file for programs."""

from __future__ import annotations

import dataclasses
import platform
import resource
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from collective import json_file
from collective.fit_options import NOT_EQUAL
from collective.streams import is_terminal
from collective.training.loop.result import Result

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Summary:
    """The summary of a run; the documentation of ``--json`` describes each field.

    Times are seconds, memory bytes; see ``collective.training.loop.times``
    for what they include.
    """

    schema: int
    backend: str
    chosen_because: str
    processes: int
    replicas: int
    parameters: int
    rows: int
    gradient_bytes: int
    steps: int
    samples_per_second: float
    seconds_per_step: dict[str, float]
    peak_memory: int
    step_seconds: list[float]
    losses: list[float]
    history: dict[str, list[float]]
    test: dict[str, float]
    state_sha256: str | None
    not_equal_to_one_process: str | None
    options: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        options: dict[str, Any],
        result: Result,
        test: dict[str, float],
        parameters: int,
        rows: int,
    ) -> Summary:
        """Summarize a training.

        Args:
            test: Loss and metrics on the test data; may be empty.
            rows: Rows of the training data.
        """
        backend = result.backend
        return cls(
            schema=SCHEMA,
            backend=backend.name,
            chosen_because=backend.chosen_because,
            processes=backend.processes,
            replicas=getattr(backend, "workers", backend.replicas),
            parameters=parameters,
            rows=rows,
            gradient_bytes=result.gradient_bytes,
            steps=len(result.losses),
            samples_per_second=result.timing.samples_per_second,
            seconds_per_step=result.timing.per_step(),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            step_seconds=result.timing.seconds().tolist(),
            losses=result.losses,
            history=result.history,
            test=test,
            state_sha256=result.state_sha256,
            not_equal_to_one_process=result.not_equal_to_one_process,
            options=options,
            versions={
                "python": platform.python_version(),
                "tensorflow": tf.__version__,
                "keras": keras.__version__,
                "numpy": np.__version__,
            },
        )

    def write_json(self, path: str) -> None:
        """Write the JSON file; floats are exact, or null if they are not finite.

        Raises:
            CollectiveError: It cannot be written; no partial file remains.
        """
        json_file.write_json(path, dataclasses.asdict(self))

    def print(self, console: Console | None = None) -> None:
        """Print the table."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("backend", f"{self.backend} ({self.chosen_because})")
        processes = f"{self.processes} process" + "es" * (self.processes > 1)
        table.add_row("replicas", f"{self.replicas} in {processes}")
        if self.options.get("per_replica"):
            table.add_row("", "each trains on batches of its own (per_replica)")
        if why := self.not_equal_to_one_process:
            table.add_row("model", f"{NOT_EQUAL}: {why}")
        for name, value in self.test.items():
            form = ".2%" if "accuracy" in name else ".4f"
            # A metric may have several values, such as one for each class.
            text = " ".join(format(v, form) for v in np.ravel(value))
            table.add_row(f"test {name}", text)
        table.add_row("samples per second", f"{self.samples_per_second:,.0f}")
        total = sum(self.seconds_per_step.values())
        table.add_row("time per step", f"{1e3 * total:.2f} ms")
        for name, seconds in self.seconds_per_step.items():
            part = f"{1e3 * seconds:.2f} ms, {seconds / (total or 1.0):.0%}"
            table.add_row(f"  {name.replace('_', '-')}", part)
        console = console or Console(
            highlight=False,
            markup=False,
            emoji=False,
            force_terminal=None if is_terminal() else False,
        )
        console.print()
        console.print(table)
