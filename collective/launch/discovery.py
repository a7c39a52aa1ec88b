"""``--host-discovery-script``: which hosts there are now, as a script tells."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time

from collective import hosts
from collective.errors import UsageError
from collective.launch.output import tell

EVERY_SECONDS = 1.0  # as horovodrun asks
_MOST_SECONDS = 60.0
PATIENCE_SECONDS = 600.0  # as horovodrun waits for enough slots


class Discovery:
    """Runs the script once a second.

    Args:
        script: A command; prints a line ``host:slots`` for each host.
        slots: Of a host whose line names none.

    Attributes:
        hosts: Those that there are now, each with its slots.
    """

    def __init__(self, script: str, slots: int | None = None):
        self.script = script
        self.hosts: list[hosts.Host] = []
        self._of_host = slots
        self._running: subprocess.Popen[str] | None = None
        self._told = ""

    def wait_for(self, least: int) -> None:
        """Returns when the hosts take so many ranks.

        Raises:
            UsageError: If the script fails, or not so many are there in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.hosts = self._ask()
            slots = sum(host.slots or 0 for host in self.hosts)
            if slots >= least:
                return
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{self.script} told of {slots} slots within "
                    f"{PATIENCE_SECONDS:.0f} s, and {least} ranks are asked for",
                    hint="a smaller -np or --min-np",
                )
            self._tell(f"{slots} slots; waiting for {least}")
            time.sleep(EVERY_SECONDS)

    def __enter__(self) -> Discovery:
        """From now on asks again and again."""
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the script, if it runs."""
        self.script = ""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while self.script:
            time.sleep(EVERY_SECONDS)
            try:
                self.hosts = self._ask()
            except UsageError as error:  # what it said before holds
                if self.script:
                    self._tell(str(error))

    def _ask(self) -> list[hosts.Host]:
        self._running = process = subprocess.Popen(
            self.script,
            shell=True,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode:
            raise UsageError(
                f"--host-discovery-script {self.script} ended with "
                f"{process.returncode}",
                hint="a command that prints a line like 'localhost:4' for each host",
            )
        found = hosts.parse(printed, self.script) if printed.strip() else []
        return [
            dataclasses.replace(host, slots=host.slots or self._of_host or 1)
            for host in found
        ]

    def _tell(self, what: str) -> None:
        """Tells it, but not again and again."""
        if what != self._told:
            tell(f"host discovery: {what}")
        self._told = what
