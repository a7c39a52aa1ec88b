"""Rare cases of the core: its threads, their arithmetic, and calls within callbacks."""

import platform
import subprocess
import sys
import textwrap

import pytest

from tests.collective.unlaunched_ranks import Ranks
from tests.launch import STARTS_RANKS

pytestmark = STARTS_RANKS


# Rank 0 flushes denormals to zero in its thread, as TensorFlow does in its threads;
# glibc's fesetenv sets the register of the mode. The thread that it starts inherits it.
DENORMALS = """
    import ctypes, numpy as np, collective

    collective.init()
    rank = collective.rank()
    tiny = np.float32(1e-40)
    if rank == 0:
        mode = (ctypes.c_uint32 * 8)()
        libm = ctypes.CDLL("libm.so.6")
        libm.fegetenv(mode)
        mode[7] |= 0x8040
        libm.fesetenv(mode)
        assert np.add(tiny, tiny) == 0

    def bits(summed):
        return [*map(hex, np.unique(np.asarray(summed).view(np.uint32)))]

    for count in (3, 100_000):  # within the posts, and through slots
        mine = np.full(2 * count, 71362 * (1 + rank), np.uint32).view(np.float32)
        print(bits(collective.allreduce(mine, collective.Sum, name="now")))
        print(bits(collective.allreduce_async(mine, collective.Sum, name="later").wait()))
        print(bits(collective.reducescatter(mine, op=collective.Sum)))
    if rank == 0:
        assert np.add(tiny, tiny) == 0  # the caller's mode is back
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets an x86 register")
def test_sums_keep_denormals_in_a_thread_that_flushes_them():
    ended = Ranks(2, DENORMALS).finish()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1] == f"['{3 * 71362:#x}']\n" * 6


# The address space has no room for the stack of the thread that runs the first
# collective. Its arrays are freed when the next is called.
NO_THREAD = """
    import gc, resource, time
    import numpy as np, collective

    collective.init()
    big = np.ones(8_000_000) * (1 + collective.rank())
    out = np.empty_like(big)
    collective.barrier()
    if collective.rank() == 0:
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), hard))
    for name in ("first", "second"):
        try:
            collective.allreduce_async(big, collective.Sum, out=out, name=name).wait()
        except collective.CollectiveError as error:
            print(name, error.message)
        if collective.rank() == 0:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        big = out = None
        gc.collect()
        big, out = np.ones(2), np.empty(2)
"""


def test_a_thread_that_cannot_start_breaks_the_job(tmp_path):
    ended = Ranks(2, NO_THREAD, COLLECTIVE_RECORDER=str(tmp_path)).finish()
    assert [code for code, _, _ in ended] == [0, 0], ended
    for _, out, _ in ended:
        first, second = out.splitlines()
        assert first.startswith("first rank 0 cannot start a thread for all-reduce")
        assert second.startswith("second rank 0 cannot start a thread for all-reduce")


# A job of one rank, whose worker thread runs callbacks. All threads must end.
CALLBACKS = """
    import ctypes, os, threading, time
    from collective import library

    core = library.load()

    class Request(ctypes.Structure):  # collective_request
        _fields_ = [
            *[(f"number_{i}", ctypes.c_int32) for i in range(8)],
            *[(f"pointer_{i}", ctypes.c_void_p) for i in range(3)],
            ("name", ctypes.c_char_p),
            *[(f"rest_{i}", ctypes.c_int64) for i in range(3)],
        ]

    # kind: barrier; transport: none; order: by name
    by_name = Request(number_0=5, number_4=-1, number_6=1, name=b"barrier")
    DONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p)
    ended = threading.Event()

    def submit(done):
        return core.collective_submit(ctypes.byref(by_name), done, None)

    @DONE
    def shuts_down(argument, code, message):
        if code or core.collective_shutdown():
            os._exit(3)
        ended.set()

    @DONE
    def submits_again(argument, code, message):
        if code or submit(submits_again):
            ended.set()

    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    for number in range(100):
        for done in (shuts_down, submits_again):
            ended.clear()
            assert core.collective_init(0, 1, 0, 1, b"callbacks %d" % os.getpid()) == 0
            assert submit(done) == 0
            if done is submits_again:
                time.sleep(0.001)
                assert core.collective_shutdown() == 0
            assert ended.wait(120)
    end = time.monotonic() + 120
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    print(threads() - before)
"""


def test_a_callback_may_shut_down_and_submit_while_another_does():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALLBACKS)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


LIMITED = r"""
    import resource, sys, collective
    hard = {hard}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        collective.init()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        line = f"{{collective.size()}} {{limit}}"
    except collective.CollectiveError as error:
        line = str(error).splitlines()[-1]
    sys.stdout.write(line + "\n")  # one write: both ranks have the same pipe
"""


@pytest.mark.parametrize(
    ("hard", "printed"),
    [
        ("resource.RLIM_INFINITY", ["2 1048576"]),
        (
            "1 << 20",
            ["HINT: raise the hard limit on the size of files: ulimit -H -f"],
        ),
    ],
)
def test_a_limit_on_the_size_of_files(hard, printed):
    code = textwrap.dedent(LIMITED).format(hard=hard)
    alone = [sys.executable, "-c", code]
    command = [sys.executable, "-m", "collective.launch", "--no-prefix", "-np", "2"]
    done = subprocess.run(
        [*command, *alone], capture_output=True, text=True, timeout=240
    )
    assert set(printed) <= set(done.stdout.splitlines()), done.stdout + done.stderr


# So many ranks of a host, as processes of one program, because Python alone would take
# minutes to start them. With a membership file the rendezvous is a different one.
MANY = """
    import ctypes, os, sys
    from collective import library
    from collective.elastic.membership_file import MembershipFile

    size, with_file = int(sys.argv[1]), sys.argv[2] == "file"
    if with_file:
        board = MembershipFile(size)
        os.environ["COLLECTIVE_BOARD"] = board.path
    core, job = library.load(), b"many %d" % os.getpid()
    children = []
    for rank in range(size):
        children.append(os.fork())
        if children[-1] == 0:
            code = core.collective_init(rank, size, rank, size, job)
            if code and rank == size - 1:
                os.write(1, core.collective_error() + b"\\n")
            os._exit(bool(code))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print({code: codes.count(code) for code in codes})
"""


@pytest.mark.parametrize("how", ["file", "no file"])
def test_a_limit_on_the_ranks_of_a_host(how):
    def start(size):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(MANY), str(size), how],
            capture_output=True,
            text=True,
            timeout=400,
        )
        return done.stdout.splitlines()

    assert start(150) == ["{0: 150}"]
    text, _, codes = start(251)
    assert text == "251 ranks on one host, and the core allows 250"
    assert codes == "{1: 251}"


# Rank 1 dies in its own PID namespace; both ranks are process 1 in theirs.
SEPARATE = """
    import os
    import numpy as np, collective
    collective.init()
    for step in range(2):
        if step and collective.rank():
            os._exit(3)
        collective.allreduce(np.ones(2), collective.Sum)
"""


def _may_unshare():
    try:
        return not subprocess.run(["unshare", "--pid", "--fork", "true"]).returncode
    except OSError:
        return False


@pytest.mark.skipif(not _may_unshare(), reason="PID namespaces are not permitted")
def test_a_death_in_another_pid_namespace_is_noticed():
    ranks = Ranks(2, SEPARATE, before=["unshare", "--pid", "--fork", "--kill-child"])
    (code, _, err), _ = ranks.finish()
    assert code != 0 and "PeerLost: rank 1 (process" in err and "died" in err, err
