"""A job with a fault: it is started, disturbed, watched to its end, and searched.

It has a ``/dev/shm`` of its own if mounting is permitted, so that the files that it leaves
there are visible in spite of other programs on this machine. Its processes carry a mark in
their environment, so that none escapes by leaving its group or its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests import launch
from tests.hosts.lab import Lab

# Seconds until a job counts as hanging; more on a busy machine.
PATIENCE = float(os.environ.get("FAULT_PATIENCE", "400"))
MARK = "FAULT_FOLDER"


class Job:
    """A running job.

    Args:
        command: The command that starts it.
        folder: Its own folder, for all that it writes.
        variables: Variables added to its environment.
        memory: The folder of its ``/dev/shm``; None: the machine's.
        hosts: Hosts of the lab, if it runs on them.
        forked: As for ``launch.environment``.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        memory: Path | None,
        hosts: Lab | None,
        forked: bool,
    ):
        self.command = command
        self.folder = folder
        self.memory = memory
        self.hosts = hosts
        self.forked = forked
        self.struck_at: float | None = None
        self._undo = contextlib.ExitStack()
        self._mark = f"{MARK}={folder}".encode()
        self._printed = folder / "printed"
        self.began = time.monotonic()
        # The check before the first step reads rows and runs the model several times, and
        # faults count these actions.
        always = {MARK: str(folder), "FAULT_SECONDS": "3", "COLLECTIVE_VERIFY": "0"}
        self.variables = {**always, **variables}
        environment = launch.environment(forked=forked, **self.variables)
        if memory is not None:
            inside = f'mount --bind {memory} /dev/shm && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", inside, "sh", *command]
            environment.pop(launch.SEGMENTS, None)
        if not forked:  # the test reads the output
            del environment["TF_CPP_MIN_LOG_LEVEL"]
        with self._printed.open("w") as file:
            self.launcher = subprocess.Popen(
                command,
                cwd=launch.ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def another(self, *options: str, **variables: str) -> Iterator[Job]:
        """Start the same job again, with more options, and the same ``/dev/shm``."""
        command, changed = [*self.command, *options], {**self.variables, **variables}
        other = Job(command, self.folder, changed, self.memory, self.hosts, self.forked)
        try:
            yield other
        finally:
            other.end()

    @property
    def text(self) -> str:
        """Return its output so far."""
        return self._printed.read_text(errors="replace")

    def wait_for(self, name: str) -> Path:
        """Wait for a file that the job writes into its folder; return its path."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / name).exists():
            assert self.launcher.poll() is None, f"it ended before:\n{self.text}"
            assert time.monotonic() < deadline, f"it never came:\n{self.text}"
            time.sleep(0.01)
        return self.folder / name

    def struck(self, rank: int) -> int:
        """Return the process of a rank, as soon as the fault has happened there."""
        return int(self.wait_for(f"struck-{rank}").read_text().split()[1])

    def strikes(self, deed: Callable[[], object]) -> None:
        """Inject a fault, and record the time."""
        self.struck_at = time.monotonic()
        deed()

    def until_end(self, state: contextlib.AbstractContextManager) -> None:
        """Enter a state that lasts until the job has ended."""
        self._undo.enter_context(state)

    @property
    def fault_at(self) -> float:
        """Return the time of the first fault, or of the job's start without one."""
        notes = [p.read_text().split() for p in self.folder.glob("struck-?")]
        times = [float(at) for at, _ in notes]
        if self.struck_at is not None:
            times = [self.struck_at]
        return min(times, default=self.began)

    def processes(self) -> list[int]:
        """Return its live processes, without zombies."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    if self._mark in (process / "environ").read_bytes().split(b"\0"):
                        found.append(int(process.name))
        return found

    def wait(self) -> tuple[int | None, float]:
        """Wait until none of its processes is alive.

        Returns:
            The launcher's exit code, negative for a signal, None if it still hangs; and the
            time when the last process had gone, by the monotonic clock.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            code = self.launcher.poll()
            if code is not None and not self.processes():
                return code, time.monotonic()
            time.sleep(0.02)
        return self.launcher.poll(), time.monotonic()

    def end(self) -> None:
        """Kill its remaining processes."""
        self._undo.close()
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.launcher.wait(PATIENCE)

    def left(self) -> list[str]:
        """Return the known files that it has left in ``/dev/shm``."""
        return sorted(os.listdir(self.memory)) if self.memory else []


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of so many bytes ("2m") in the folder."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(folder)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@functools.cache
def why_no_mounts() -> str:
    """Return why mounting is impossible here; empty if it is possible."""
    if os.geteuid():
        return "only root may mount a small disk"
    made = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "faults", "/mnt"],
        capture_output=True,
        text=True,
    )
    return made.stderr.strip()


@contextlib.contextmanager
def running(
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    *,
    shm: str = "1g",
    disk: str = "",
    hosts: Lab | None = None,
    forked: bool = False,
) -> Iterator[Job]:
    """Start a job; at the end, kill all of its processes.

    Args:
        command: The command that starts it.
        folder: Its own folder.
        variables: Variables added to its environment.
        shm: Size of its ``/dev/shm``.
        disk: Size of the disk in ``folder/disk``, if it has one.
        hosts: Hosts of the lab.
        forked: As for ``launch.environment``.
    """
    with contextlib.ExitStack() as stack:
        memory = None
        if not why_no_mounts():
            memory = stack.enter_context(small_disk(folder / "shm", shm))
        if disk:
            stack.enter_context(small_disk(folder / "disk", disk))
        job = Job(command, folder, variables, memory, hosts, forked)
        stack.callback(job.end)
        yield job
