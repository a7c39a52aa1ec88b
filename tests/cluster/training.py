"""A training in a cluster whose ranks, actors, tasks and nodes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.nodes import Nodes, environment


class Training:
    """A driver on node 1, whose ranks run ``functions.trains`` until a test stops them."""

    def __init__(
        self, cluster: Nodes, folder: Path, words: Sequence[str], **variables: str
    ):
        self.cluster, self.folder = cluster, folder
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.driver = subprocess.Popen(
                cluster.on(1, words),
                env={**environment(), **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        """Return the output so far."""
        return self.output.read_text(errors="replace")

    def _lines(self) -> list[list[str]]:
        file = self.folder / "progress"
        return (
            [line.split() for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )

    def sizes(self) -> list[int]:
        """Return how many ranks each epoch had so far."""
        return [int(line[3]) for line in self._lines()]

    def epochs(self) -> list[int]:
        """Return the epochs, some of which may have been trained again."""
        return [int(line[1]) for line in self._lines()]

    def until(self, size: int, since: int = 0, seconds: float = 120) -> int:
        """Wait for an epoch of so many ranks; return how many epochs there are."""
        deadline = time.monotonic() + seconds
        while size not in self.sizes()[since:]:
            text = self.text()
            assert time.monotonic() < deadline, text
            assert self.driver.poll() is None, text
            time.sleep(0.2)
        return len(self.sizes())

    def kill(self, node: int, words: str, since: int = 0) -> None:
        """Kill processes of a node whose command line has these words."""
        mine = self.cluster.on_node(node)
        found = [pid for pid, line in mine.items() if words in line]
        assert found, mine
        for pid in found[since:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_losses(self, ranks: int) -> None:
        """Stop it; check that its losses equal one process."""
        (self.folder / "stop").touch()
        code = self.driver.wait(120)
        text = self.text()
        assert code == 0, text
        assert f"\nresults {ranks} " in text, text
