"""Shows the output of the ranks as whole lines, prefixed on the screen, or in files."""

from __future__ import annotations

import codecs
import collections
import contextlib
import datetime
import errno
import os
import queue
import re
import resource
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from collective.errors import printable
from collective.launch import likeness
from collective.launch.screen import Screen, label
from collective.running_time import Deadline

KEPT_LINES = 200
KEPT_CHARACTERS = 4096  # most characters of each kept line
_SHOWN_LINES = 60
_NEAR_LINES = 20  # a message above so few lines is not repeated below them
_SHOWN_WITHOUT_TRACEBACK = 12
_BLOCK_SECONDS = 1.0  # limit for a message to wait for the reader of stderr
_KEPT_MESSAGES = 1000
_HINTS = {
    "SIGBUS": "\nHINT: `df -h /dev/shm /tmp` shows whether the memory that ranks share, or "
    "a mapped file, has no room left; a data file that became shorter while it was read "
    "has the same effect"
}
# How programs end that cannot handle it if they get no memory.
_WITHOUT_MEMORY = ("by SIGABRT", "by SIGSEGV")
# Errors of a full disk, or of a limit of this user or process. All other errors are those
# from a closed screen.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TRACEBACK = "Traceback (most recent call last)"
# Characters that may change a terminal for longer than their line (ECMA-48): a colour, a set
# of characters, or a string such as a title, which hides everything until its end.
_LASTS = re.compile("[\x0e\x1b\x90\x98\x9b\x9d-\x9f]")
_NORMAL = "\x1b\\\x1b[0m\x1b(B\x0f"
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Lines that TensorFlow writes at its import, before it has read the level.
_AT_IMPORT = re.compile(
    r"^(\[\d+\] ?)?(WARNING: All log messages before absl::InitializeLog"
    r"|I0000 .*port\.cc:\d+\] oneDNN custom operations are on)"
)


def log_variables() -> dict[str, str]:
    """Return variables that have TensorFlow log errors only, unless the user set a level."""
    if LOG_LEVEL in os.environ:
        return {}
    return {LOG_LEVEL: "2", "COLLECTIVE_QUIET": "1"}


@dataclass(frozen=True)
class OutputStyle:
    """The form in which the output of ranks is shown."""

    prefix: bool = True  # each line begins with the number of its rank
    timestamp: bool = False  # it begins with the time, too
    # Folder for rank.NN/stdout and stderr, instead of the screen.
    directory: Path | None = None
    appends: bool = False  # to files that earlier generations have written
    # Ranks write directly to our own standard output: one rank alone writes there, and
    # draws bars if it is a terminal.
    plain_stdout: bool = False

    @property
    def one_program(self) -> bool:
        """Return whether all ranks run one program, of which rank 0's output is shown."""
        return self.plain_stdout

    @property
    def captures(self) -> bool:
        """Return whether output passes through the launcher at all."""
        return self.prefix or self.timestamp or self.directory is not None


class RankOutput:
    """The two streams of one of ``size`` ranks.

    Args:
        screen: Shared with other ranks; None: this rank prints its own lines.

    Raises:
        OSError: If its files cannot be written.
    """

    on_screen = 0  # lines that all ranks together have on the screen
    error_at: ClassVar[dict[int, int]] = {}  # last line of stderr by rank

    def __init__(
        self, rank: int, size: int, style: OutputStyle, screen: Screen | None = None
    ):
        self.rank, self.style, self._screen = rank, style, screen
        self._process = 0
        # The last lines of its error stream.
        self.last_errors: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._threads: list[threading.Thread] = []
        self._files: list[IO[str]] = []
        if style.directory is not None:
            width = len(str(max(size - 1, 0)))
            folder = style.directory / f"rank.{rank:0{width}}"
            self._files = _files_in(folder, ("stdout", "stderr"), style.appends)

    def attach(
        self, stdout: IO[bytes] | None, stderr: IO[bytes] | None, process: int = 0
    ) -> None:
        """Take the pipes of the rank's process; ``start`` begins to read them.

        Args:
            process: Its number.
        """
        self._process = process
        screens = (sys.stdout, sys.stderr)
        for pipe, target in zip((stdout, stderr), self._files or screens, strict=True):
            if pipe is not None:
                args = (pipe, target, pipe is stderr)
                copy = threading.Thread(target=self._copy, args=args, daemon=True)
                self._threads.append(copy)

    def start(self) -> None:
        """Start the threads that copy the output."""
        if self._screen is not None:
            self._screen.open(self.rank, self._show)
        for thread in self._threads:
            thread.start()

    def finish(self, deadline: Deadline) -> None:
        """Wait for the rest of the output.

        Args:
            deadline: It is needed because a process that outlives its rank, as after
                ``setsid``, may hold a pipe open for ever.
        """
        for thread in self._threads:
            while thread.is_alive() and not deadline.passed():
                thread.join(deadline.pause())
        for file in self._files:
            with contextlib.suppress(OSError):
                file.flush()

    def _copy(self, pipe: IO[bytes], target: IO[str], is_error: bool) -> None:
        quiet = LOG_LEVEL not in os.environ
        read = lines(pipe)
        if is_error and self.rank and self.style.one_program:
            read = likeness.messages(read)  # rank 0 draws the bars of all
        for line in read:
            if quiet and _AT_IMPORT.match(line):
                continue
            if is_error and not self._is_shown(line):
                continue
            if self._screen is not None:
                self._screen.put(self.rank, line, is_error, self._process)
            elif self._files:
                self._write(target, line)
            else:
                self._show([self.rank], line, is_error)
        if is_error and self._screen is not None:
            self._screen.close(self.rank)

    def _show(self, ranks: Sequence[int], line: str, is_error: bool) -> None:
        """Print a line of these ranks on the screen."""
        prefix = label(ranks) if self.style.prefix else ""
        if self._write(sys.stderr if is_error else sys.stdout, prefix + line):
            RankOutput.on_screen += 1
            for rank in ranks if is_error else ():
                RankOutput.error_at[rank] = RankOutput.on_screen

    def _write(self, target: IO[str], line: str) -> bool:
        # A closed screen or a full disk must not end the job.
        try:
            if _LASTS.search(line) and target.isatty():
                line = _back_to_normal(line)
            target.write(self._time() + line)
            target.flush()
            return True
        except OSError as error:
            if error.errno in _NO_ROOM:
                _note_lost(target, error)
        except ValueError:
            pass
        return False

    @property
    def unseen_errors(self) -> list[str]:
        """Return the kept errors, or none if the screen still shows them near its end."""
        at = RankOutput.error_at.get(self.rank)
        if at is None or RankOutput.on_screen - at >= _NEAR_LINES:
            return list(self.last_errors)
        repeated = self._screen.repeated[self.rank] if self._screen is not None else ()
        shown = last_error_lines(list(self.last_errors)[-_NEAR_LINES:])
        is_left_out = any(line.rstrip("\r\n") in shown for line in repeated)
        return list(self.last_errors) if is_left_out else []

    def _is_shown(self, line: str) -> bool:
        """Keep a line of stderr; return whether it is shown."""
        self.last_errors.append(line[:KEPT_CHARACTERS])
        return True

    def _time(self) -> str:
        if not self.style.timestamp:
            return ""
        now = datetime.datetime.now().astimezone()
        return now.isoformat(" ", "milliseconds") + " "


def _files_in(folder: Path, names: Sequence[str], appends: bool) -> list[IO[str]]:
    """Open files for writing, even if others can write in the parent folder.

    Raises:
        OSError: The folder or a file is a link, the folder belongs to another user, or a
            file cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    inside = os.open(folder, os.O_DIRECTORY | flags)
    try:
        if os.fstat(inside).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's", str(folder))
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND
        flags |= 0 if appends else os.O_TRUNC
        files: list[IO[str]] = []
        for name in names:
            try:
                opened = os.open(name, flags, 0o666, dir_fd=inside)
            except OSError as error:
                error.filename = str(folder / name)
                raise
            files.append(os.fdopen(opened, "w", encoding="utf-8"))
        return files
    finally:
        os.close(inside)


def lines(pipe: IO[bytes]) -> Iterator[str]:
    """Yield whole lines of a pipe, ended by newline or return; the last gets a newline.

    This takes time linear in the length of a line.
    """
    pieces: list[str] = []  # parts of a line whose end has not arrived
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(pipe.fileno(), 1 << 16):
        for piece in decoder.decode(data).splitlines(keepends=True):
            pieces.append(piece)
            if piece.endswith(("\n", "\r")):
                yield "".join(pieces)
                pieces.clear()
    if pieces:
        yield "".join(pieces) + "\n"


def _back_to_normal(line: str) -> str:
    """Return the line with an end that undoes its changes to a terminal."""
    text = line.rstrip("\r\n")
    return text + _NORMAL + line[len(text) :]


def last_error_lines(errors: Iterable[str]) -> list[str]:
    """Return the last traceback of a rank's stderr, or its last lines if there is none."""
    kept = [line.rstrip("\r\n") for line in errors]
    kept = [line for line in kept if line.strip()]
    starts = [i for i, line in enumerate(kept) if _TRACEBACK in line]
    if not starts:
        return kept[-_SHOWN_WITHOUT_TRACEBACK:]
    found = kept[starts[-1] :]
    # A traceback may contain a second one ("During handling of the above exception"): its
    # beginning and its end say most.
    if len(found) > _SHOWN_LINES:
        half = _SHOWN_LINES // 2
        found = [*found[:half], "  ...", *found[-half:]]
    return found


def print_message(text: str) -> None:
    """Print a message of the launcher's own to stderr."""
    line = f"collective.launch: {printable(text)}"
    if _messages is None:
        _print(line)
    else:
        _messages.put(line)


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


class _Messages:
    """Messages printed by a thread, so that a reader who stands still blocks only the thread.

    The caller waits for each message, until one has taken too long.
    """

    def __init__(self) -> None:
        self._blocked = False
        self._queue: queue.Queue[tuple[str, threading.Event]] = queue.Queue(
            _KEPT_MESSAGES
        )
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, line: str) -> None:
        printed = threading.Event()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((line, printed))
            if not self._blocked:
                self._blocked = not printed.wait(_BLOCK_SECONDS)

    def _work(self) -> None:
        while True:
            line, printed = self._queue.get()
            _print(line)
            printed.set()
            self._blocked = False


_messages: _Messages | None = None
_lost: dict[str, bool] = {}  # files that lack lines: whether this fails the job


def _note_lost(target: IO[str], error: OSError) -> None:
    """Report once for each file that lines of ranks are missing in it."""
    path = os.readlink(f"/proc/self/fd/{target.fileno()}")
    if path in _lost:
        return
    _lost[path] = fails = target is not sys.stderr
    then = ", and ends with exit code 1" if fails else ""
    print_message(
        f"what ranks print is lost: {path}: {error.strerror}; the job continues{then}\n"
        "HINT: free some space there, or write to another disk"
    )


def never_block() -> None:
    """Have a thread print messages, so that none waits long for a reader of stderr.

    The caller has started its processes: a process with threads cannot start any safely.
    """
    global _messages
    _messages = _messages or _Messages()


def settled(code: int) -> int:
    """Return an exit code, or end the process with it if our output is not read.

    It is not 0 if standard output, or a file of a rank, lacks lines that ranks have printed.
    """
    code = code or int(any(_lost.values()))

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(_BLOCK_SECONDS)
    if thread.is_alive():  # Python would wait for it
        os._exit(code)
    return code


def report_failure(rank: str, how: str, errors: Iterable[str], hint: str = "") -> None:
    """Print, as the last thing on the screen, which rank failed, and its traceback.

    Args:
        how: How it ended, as ``supervisor.how_ended`` says it.
        errors: The last lines of its stderr; none if the screen shows them already.
        hint: The HINT; by default the one for such an end, if there is one.
    """
    shown = last_error_lines(errors)
    if shown:
        print_message("\n".join([f"the last lines of {rank} on stderr:", *shown]))
    hint = f"\nHINT: {hint}" if hint else _hint(how)
    print_message(f"{rank} failed: it ended {how}{hint}")


def _hint(how: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if how in _WITHOUT_MEMORY and limit != resource.RLIM_INFINITY:
        return (
            f"\nHINT: ulimit -v unlimited: each process may have {limit >> 20} MB of "
            "address space here, and TensorFlow ends so if it gets no more"
        )
    return _HINTS.get(how.removeprefix("by "), "")
