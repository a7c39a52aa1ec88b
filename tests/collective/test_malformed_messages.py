"""Malformed messages from strangers: a listener drops them, or names the sender."""

import contextlib
import random
import socket
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import name_of_job, names_of, rank

from collective.launch import reachability
from collective.net import shared_secret
from tests.launch import NEEDS_CORE, NOT_ON_RANKS

pytestmark = NOT_ON_RANKS
SECRET = shared_secret.generate()
MAGIC = struct.pack("<I", 0xC011EC71)
REPLY_BYTES = 3 * 4 * 250 + 24 + 512  # JoinReply of local_socket.h: the text comes last
NOISE = st.binary(max_size=200)
few = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="module")
def probed():
    with reachability.listening(["lo"], SECRET) as addresses:
        yield addresses


@few
@given(NOISE)
def test_the_launcher_still_answers(probed, noise):
    host, _, port = probed[0].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(noise)
    assert reachability.why_cut_off(probed, SECRET) == ""


@few
@given(NOISE)
def test_a_caller_drops_who_is_no_listener(noise):
    with connected() as (here, there):
        there.sendall(noise)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError):
            shared_secret.verify_listener(here, SECRET)


@contextlib.contextmanager
def connected():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def packets(seed):
    """Yield packets that are not a request, or that only begin like one."""
    draw = random.Random(seed)
    for _ in range(40):
        # With our head, 28 bytes would be a request, which ends the job with an error.
        head = draw.choice([b"", MAGIC, MAGIC + struct.pack("<I", 6)])
        lengths = [1, 7, 15] if head else [1, 27, 28, 29, 4000]
        yield head + draw.randbytes(draw.choice(lengths))


def send_noise(name, seed):
    for packet in packets(seed):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + name)
            stranger.send(packet)


@NEEDS_CORE
@pytest.mark.launches
def test_ranks_meet_in_spite_of_it():
    job = shared_secret.generate()
    ranks = [rank(0, job)]
    while not (names := names_of(ranks[0].pid)):
        assert ranks[0].poll() is None
    send_noise(names[0], seed=1)
    ranks.append(rank(1, job))
    for one in ranks:
        printed = one.communicate(timeout=240)[0]
        assert printed.startswith("met"), printed


LETS_JOIN = """
    import collective, os, sys
    from collective import session
    collective.init()
    os.environ["COLLECTIVE_MAX_NP"] = "4"
    print(session.waiting(), flush=True)
    sys.stdin.readline()
    print(session.waiting())
"""


@NEEDS_CORE
@pytest.mark.launches
def test_it_is_no_newcomer():
    job = shared_secret.generate()
    ranks = [
        rank(number, job, program=LETS_JOIN, stdin=subprocess.PIPE) for number in (0, 1)
    ]
    assert [one.stdout.readline() for one in ranks] == ["0\n", "0\n"]
    (name,) = names_of(ranks[0].pid)
    send_noise(name, seed=2)
    assert [one.communicate("\n", timeout=240)[0] for one in ranks] == ["0\n", "0\n"]


@NEEDS_CORE
@pytest.mark.launches
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff" * REPLY_BYTES,
        MAGIC + b"\xff" * (REPLY_BYTES - 4),
        MAGIC + b"\xff" * (REPLY_BYTES - 4 - 512) + bytes(512),
        MAGIC + bytes(REPLY_BYTES - 4),
    ],
    ids=["nothing", "noise", "an endless refusal", "less than no ranks", "no ranks"],
)
def test_a_rank_names_who_is_no_coordinator(reply):
    job = shared_secret.generate()
    name = name_of_job(job)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind("\0" + name)
        impostor.listen(4)
        one = rank(1, job)
        caller, _ = impostor.accept()
        with caller:
            caller.recv(4096)
            if reply:
                caller.send(reply)
        printed = one.communicate(timeout=240)[0]
    assert printed.startswith("rank 1 of 2: ") and len(printed) < 700, printed
    assert one.returncode == 0  # the program has caught the error
