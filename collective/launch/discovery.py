"""``--host-discovery-script``: how many ranks this host takes now, as a script tells."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

from collective import hosts
from collective.errors import UsageError
from collective.launch import here
from collective.launch.output import tell

EVERY_SECONDS = 1.0  # as horovodrun asks
_MOST_SECONDS = 60.0
_PATIENCE_SECONDS = 600.0  # as horovodrun waits for enough slots


class Discovery:
    """Runs the script once a second.

    Args:
        script: A command; prints a line ``host:slots`` for each host.
        slots: Of a host whose line names none.

    Attributes:
        slots: How many ranks this host takes now.
    """

    def __init__(self, script: str, slots: int | None = None):
        self.script = script
        self.slots = 0
        self._of_host = slots
        self._running: subprocess.Popen[str] | None = None
        self._told = ""

    def wait_for(self, least: int) -> None:
        """Returns when the host takes so many ranks.

        Raises:
            UsageError: If the script fails, or not so many are there in time.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self.slots = self._ask()
            if self.slots >= least:
                return
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{self.script} told of {self.slots} slots within "
                    f"{_PATIENCE_SECONDS:.0f} s, and {least} ranks are asked for",
                    hint="a smaller -np or --min-np",
                )
            self._tell(f"{self.slots} slots; waiting for {least}")
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
                self.slots = self._ask()
            except UsageError as error:  # what it said before holds
                if self.script:
                    self._tell(str(error))

    def _ask(self) -> int:
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
        slots = 0
        for host in hosts.parse(printed, self.script) if printed.strip() else []:
            if here.is_here(host):
                slots += host.slots or self._of_host or 1
            else:
                self._tell(f"{host.name} is left out: ranks come on this host only")
        return slots

    def _tell(self, what: str) -> None:
        """Tells it, but not again and again."""
        if what != self._told:
            tell(f"host discovery: {what}")
        self._told = what
