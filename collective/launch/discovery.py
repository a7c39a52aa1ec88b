"""``--host-discovery-script``: the present hosts, as a script prints them."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from collective import hosts
from collective.errors import UsageError
from collective.launch import processes
from collective.launch.output import print_message

EVERY_SECONDS = 1.0  # as horovodrun has it
SCRIPT_SECONDS = 60.0


class FixedHosts:
    """Hosts that stay as they are, in place of those that a script prints."""

    def __init__(self, found: Sequence[hosts.Host]):
        self.hosts = found

    def __enter__(self) -> FixedHosts:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Discovery:
    """Runs once a second a shell command that prints ``host:slots`` for each host.

    Args:
        slots_per_host: For hosts without slots in their line.
        seconds: How long the command may take.
    """

    def __init__(
        self,
        script: str,
        slots_per_host: int | None = None,
        seconds: float = SCRIPT_SECONDS,
    ):
        self.script, self._slots_per_host = script, slots_per_host
        self._seconds = seconds
        self.hosts: list[hosts.Host] = []  # the present hosts, with their slots
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._last_message = ""

    def __enter__(self) -> Discovery:
        """Run the script, and start a thread that runs it each second.

        Raises:
            UsageError: If the script fails.
        """
        self.hosts = self._run_script()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, and kill the script if it runs."""
        self._closed = True
        if self._process is not None:
            processes.signal_group(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(EVERY_SECONDS)
            try:
                self.hosts = self._run_script()
            except UsageError as error:  # the hosts stay as they were
                if not self._closed and str(error) != self._last_message:
                    self._last_message = str(error)
                    print_message(f"host discovery: {error}")

    def _run_script(self) -> list[hosts.Host]:
        text = self._output()
        found = hosts.parse(text, self.script) if text.strip() else []
        return [
            dataclasses.replace(host, slots=host.slots or self._slots_per_host or 1)
            for host in found
        ]

    def _output(self) -> str:
        with processes.in_memory() as output:
            try:
                self._process = process = subprocess.Popen(
                    ["sh", "-c", self.script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    start_new_session=True,  # so that the whole group can be killed
                )
            except OSError as error:
                raise self._failure(error.strerror or str(error)) from None
            if exceeded := processes.wait(process, self._seconds, [output]):
                processes.signal_group(process.pid, signal.SIGKILL)
                process.wait()
                raise self._failure(exceeded)
            if process.returncode:
                raise self._failure(f"exit code {process.returncode}")
            output.seek(0)
            return output.read()

    def _failure(self, why: str) -> UsageError:
        return UsageError(
            f"--host-discovery-script {self.script} failed: {why}",
            hint="a command that prints a line like 'localhost:4' for each host",
        )
