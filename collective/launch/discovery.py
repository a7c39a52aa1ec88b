"""``--host-discovery-script``: which hosts there are now, as a script prints them."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
import time

from collective import hosts
from collective.errors import UsageError
from collective.launch import processes
from collective.launch.output import print_message
from collective.running_time import Deadline

EVERY_SECONDS = 1.0  # as horovodrun
_SCRIPT_SECONDS = 60.0


class Discovery:
    """Runs once a second a shell command that prints ``host:slots`` for each host.

    ``slots_per_host`` is for hosts without slots in their line.
    """

    def __init__(self, script: str, slots_per_host: int | None = None):
        self.script, self._slots_per_host = script, slots_per_host
        self.hosts: list[hosts.Host] = []  # those that there are now, with their slots
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._last_message = ""

    def wait_for(self, least: int, seconds: float) -> None:
        """Returns when the hosts have slots for so many ranks.

        Raises:
            UsageError: If the script fails, or there are not so many slots in time.
        """
        deadline = Deadline(seconds, longest=_SCRIPT_SECONDS)
        while True:
            self.hosts = self._run_script()
            slots = hosts.slots_of(self.hosts)
            if slots >= least:
                return
            if deadline.passed():
                raise UsageError(
                    f"{self.script} printed hosts with {slots} slots within "
                    f"{seconds:g} s; {least} ranks need {least}",
                    hint="a smaller -np or --min-np, or a longer --elastic-timeout",
                )
            self._print_once(f"{slots} slots; waiting for {least}")
            time.sleep(EVERY_SECONDS)

    def __enter__(self) -> None:
        """Starts a thread that runs the script each second."""
        threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        """Ends the thread, and kills the script if it runs."""
        self._closed = True
        if self._process is not None:
            processes.signal_group(self._process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        while not self._closed:
            time.sleep(EVERY_SECONDS)
            try:
                self.hosts = self._run_script()
            except UsageError as error:  # the hosts stay as they were
                if not self._closed:
                    self._print_once(str(error))

    def _run_script(self) -> list[hosts.Host]:
        with processes.in_memory() as output:
            self._process = process = subprocess.Popen(
                ["sh", "-c", self.script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                start_new_session=True,  # with a process group, to be killed as a whole
            )
            if processes.wait(process, _SCRIPT_SECONDS) is None:
                processes.signal_group(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read()
        if process.returncode:
            raise UsageError(
                f"--host-discovery-script {self.script} failed: exit code "
                f"{process.returncode}",
                hint="a command that prints a line like 'localhost:4' for each host",
            )
        found = hosts.parse(text, self.script) if text.strip() else []
        return [
            dataclasses.replace(host, slots=host.slots or self._slots_per_host or 1)
            for host in found
        ]

    def _print_once(self, message: str) -> None:
        """Prints a message, unless it was the last one printed, too."""
        if message != self._last_message:
            print_message(f"host discovery: {message}")
        self._last_message = message
