"""Forks ranks off a process that has already imported TensorFlow and Keras.

Their import takes two seconds of processor time, and the tests start hundreds of ranks. Run
as a script, this file is the server: it imports them once, and forks for every client.
``hand_over``, which sitecustomize.py calls in a rank or a script that has just started, sends
the server this process' program, environment and open files, waits for the fork to end, and
ends in the same way; signals to one of them reach the other. The fork enters the hosts and
the file systems that the process may have of its own. It ends soon, so it does not collect
garbage: graphs are millions of objects that stay alive.

There are two servers, for even and for odd ranks: if ranks shared their seed for the order of
sets, this would hide a program that depends on this order. Ranks of an unedited script share
the seed, and those that are started with it have one server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

# The path of the sockets without the parity; if it is unset, each process imports by itself.
VARIABLE = "COLLECTIVE_TEST_FORKSERVER"
RANKS = ("COLLECTIVE_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
# Variables that TensorFlow, Keras and NumPy read at their import. A process whose values
# differ from the server's imports them itself.
READ_AT_IMPORT = ("TF_", "KERAS_", "XLA_", "OMP_", "OPENBLAS_", "MKL_", "PYTHON")
BUT = {"TF_CONFIG", "KERAS_HOME", "PYTHONHASHSEED", "PYTHONUNBUFFERED"}
# Seeds for the order of sets: collective.distribute's, and of the server of even ranks.
SHARED_SEED = "0"
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
FILES = 250  # a message takes 253 at most
# Namespaces of a process: its network, its host name, and its mounts.
NAMESPACES = ("net", "uts", "mnt")
# This program only supervises the rank; the rank is the process to fork.
SUPERVISOR = "collective.launch.rank"


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the part of an environment that must be the server's own."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in BUT
    }


def hand_over(path: str) -> None:
    """Have the server run this process' program, and end as it ends.

    It returns only if the server refuses: then this process runs the program itself.
    """
    if SUPERVISOR in sys.orig_argv:
        return
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
    if rank is None:
        if not sys.orig_argv[1].endswith(".py"):  # a launcher
            return
        rank = 0
    parity = 0 if os.environ.get("PYTHONHASHSEED") == SHARED_SEED else rank % 2
    connection = socket.socket(socket.AF_UNIX)
    with contextlib.closing(connection):
        if not _connect(connection, f"{path}.{parity}"):
            return
        os.environ.pop(VARIABLE)
        own = connection.fileno()
        files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != own]
        files = [number for number in files if _is_open(number)]
        program = {
            "arguments": sys.orig_argv[1:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
            "processors": sorted(os.sched_getaffinity(0)),
        }
        text = os.memfd_create("program")
        os.write(text, json.dumps(program).encode())
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        socket.send_fds(connection, [b"."], [text, *files])
        os.close(text)
        answer = connection.makefile()
        if not (process := int(answer.readline() or 0)):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return
        for number in SIGNALS:
            signal.signal(number, lambda number, _: _signal(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = int(answer.readline() or -signal.SIGKILL)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    time.sleep(60)


def _connect(connection: socket.socket, path: str) -> bool:
    """Connect to a server, which may still import; False if there is none."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            connection.connect(path)
            return True
        if not os.path.isdir(os.path.dirname(path)):
            return False
        time.sleep(0.1)
    return False


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


class Server:
    """Forks until the process for which it was started has ended."""

    def __init__(self, path: str, owner: int):
        self.owner = os.pidfd_open(owner)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        os.rename(f"{path}.new", path)
        self.selector = selectors.DefaultSelector()
        self._register(self.owner, self._end)
        self._register(self.listener, self._accept)
        # For each fork: its file for waiting, and the connection to its client.
        self.forks: dict[int, tuple[int, socket.socket]] = {}
        self.program: dict | None = None

    def run(self) -> dict:
        """Serve; in a fork, return the program that it must run."""
        while self.program is None:
            for key, _ in self.selector.select():
                key.data()
                if self.program is not None:
                    break
        return self.program

    def _end(self) -> None:
        for process in self.forks:
            _signal(process, signal.SIGKILL)
        os._exit(0)

    def _accept(self) -> None:
        connection = self.listener.accept()[0]
        _, files, _, _ = socket.recv_fds(connection, 1, FILES + 3)
        if not files:
            connection.close()
            return
        with os.fdopen(files[0], "rb") as text:
            text.seek(0)
            program = json.load(text)
        same = read_at_import(program["environment"]) == read_at_import(os.environ)
        process = os.fork() if same else 0
        if same and process == 0:
            self._become(program, files[1:], connection)
            return
        for number in files[1:]:
            os.close(number)
        with contextlib.suppress(OSError):
            connection.sendall(f"{process}\n".encode())
        if not same:
            connection.close()
            return
        waiting = os.pidfd_open(process)
        self.forks[process] = waiting, connection
        self._register(waiting, lambda: self._ended(process))
        self._register(connection, lambda: self._left(process))

    def _register(self, file: int | socket.socket, call: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, call)

    def _ended(self, process: int) -> None:
        waiting, connection = self.forks.pop(process)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        self.selector.unregister(waiting)
        os.close(waiting)
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(f"{code}\n".encode())
        connection.close()

    def _left(self, process: int) -> None:
        """End a fork after its client."""
        if process in self.forks:
            self.selector.unregister(self.forks[process][1])
            _signal(process, signal.SIGKILL)

    def _become(self, program: dict, files: list[int], connection) -> None:
        """Take over the client's files, cores, environment and namespaces."""
        asks, _, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        for kind in NAMESPACES:
            theirs = f"/proc/{asks}/ns/{kind}"
            if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
                file = os.open(theirs, os.O_RDONLY)
                if ctypes.CDLL(None, use_errno=True).setns(file, 0):
                    raise OSError(ctypes.get_errno(), f"setns({theirs})")
                os.close(file)
        files = [fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in files]
        os.closerange(3, 500)
        for number, target in zip(files, program["files"], strict=True):
            os.dup2(number, target)
            os.close(number)
        for kept in (connection, self.listener):
            kept.detach()
        os.environ.clear()
        os.environ.update(program["environment"])
        os.chdir(program["folder"])
        os.sched_setaffinity(0, program["processors"])
        self.program = program


def start(path: str, environment: dict[str, str]) -> None:
    """Start both servers, unless another process of the session has; do not wait for them.

    Args:
        path: Path of their sockets, without the parity, in a folder that exists; its name
            is the number of the process with which they end.
        environment: Their environment.
    """
    try:
        os.close(os.open(f"{path}.started", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    for parity, seed in enumerate((SHARED_SEED, str(os.getpid()))):
        subprocess.Popen(
            [sys.executable, __file__, f"{path}.{parity}", os.path.basename(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**environment, "PYTHONHASHSEED": seed},
        )


def configure_keras(folder: str) -> None:
    """Have Keras use another home, as if it had been imported with it."""
    keras.src.backend.config._KERAS_DIR = folder
    with open(os.path.join(folder, "keras.json")) as file:
        keras.config.set_floatx(json.load(file)["floatx"])


def run(program: dict) -> None:
    """Run the words after ``python``, in a fork, as ``python`` does."""
    words = program["arguments"]
    sys.orig_argv = [sys.executable, *words]
    buffered = "PYTHONUNBUFFERED" not in os.environ
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):
        buffered = buffered and words[0] != "-u"
        words = words[1:]
    for name, number in ("stdout", 1), ("stderr", 2):
        file = os.fdopen(number, "wb", -1 if buffered else 0, closefd=False)
        line = os.isatty(number) or number == 2
        text = io.TextIOWrapper(file, line_buffering=line, write_through=not buffered)
        setattr(sys, name, text)
    sys.stdin = os.fdopen(0, closefd=False)
    tempfile.tempdir = None
    if folder := os.environ.get("KERAS_HOME"):
        configure_keras(folder)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        main.__file__ = words[0]
        with open(words[0], "rb") as file:
            code = compile(file.read(), words[0], "exec")
    exec(code, main.__dict__)


def end(run: Callable[[dict], None], program: dict) -> None:
    """Run a program, and end without the slow destruction of TensorFlow's modules."""
    code = 0
    try:
        run(program)
    except SystemExit as error:
        code = (
            error.code if isinstance(error.code, int) else int(error.code is not None)
        )
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    # Python's end finalizes it, unless the program does so.
    mpi = sys.modules.get("mpi4py.MPI")
    finalizes = mpi is not None and sys.modules["mpi4py"].rc.finalize is not False
    if finalizes and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for file in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # the core finalizes MPI at the end of C
        ctypes.CDLL(None).exit(code & 255)
    os._exit(code & 255)


if __name__ == "__main__":
    import atexit
    import builtins
    import ctypes
    import gc
    import io
    import runpy
    import struct
    import tempfile
    import threading
    import types

    import keras
    import numpy as np
    import pytest  # noqa: F401
    import stacks
    import tensorflow  # noqa: F401

    stacks.forget()
    gc.disable()
    gc.freeze()
    # Kept, because its sockets would close files of a fork when they are collected.
    server = Server(sys.argv[1], int(sys.argv[2]))
    program = server.run()
    np.random.seed()
    end(run, program)
