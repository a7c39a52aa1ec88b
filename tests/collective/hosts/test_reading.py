"""Hostfiles: every sample, bad lines, and round trips through every dialect."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.errors import UsageError
from collective.hosts import Host, HostError, parse, parse_list, read, write

SAMPLES = Path(__file__).parents[3] / "hostfiles"


def hosts(*names: str, slots: int | None = None) -> list[Host]:
    return [Host(name, slots) for name in names]


NODES = [f"node{i}.example.com" for i in (1, 2, 3)]
CONTENTS = {
    "two-hosts": hosts(*NODES[:2], slots=2),
    "openmpi": [Host(NODES[0], 4, 8), Host(NODES[1], 4), Host(NODES[2])],
    "mpich": [*hosts(*NODES[:2], slots=4), Host(NODES[2], 1, user="ada")],
    "intel": hosts(*NODES[:2], slots=4),
    "deepspeed": hosts("worker-1", "worker-2", slots=4),
    "mpi-operator": hosts(
        *(f"digits-worker-{i}.digits.default.svc" for i in range(2)), slots=2
    ),
    "slurm": [
        *hosts("node01", "node02", "node03", slots=4),
        *hosts("node04", "node7", slots=2),
    ],
    "list": [*hosts(*NODES[:2], slots=2), *hosts("node03", "node04", slots=1)],
    "users-and-ipv6": [
        Host(NODES[0], 2, user="ada"),
        Host(NODES[1], 2, user="ada"),
        Host("2001:db8::2", 1),
        Host("2001:db8::3", 1),
    ],
}


def test_there_is_a_sample_of_every_dialect_and_no_other():
    samples = {file.name for file in SAMPLES.iterdir()} - {"README.md"}
    assert samples == set(CONTENTS)


@pytest.mark.parametrize("name", CONTENTS)
def test_sample(name):
    assert read(SAMPLES / name) == CONTENTS[name]
    assert (SAMPLES / name).read_text().startswith("# ")


GOOD = {
    "a slots = 2": [Host("a", 2)],
    "a max-slots=3": [Host("a", None, 3)],
    "a:2\tbinding=user:0,1": [Host("a", 2)],
    "a\na\n": [Host("a", 2)],  # mpirun counts the same
    "a:2\nb\na slots=1": [Host("a", 3), Host("b")],
    "a slots=2 max_slots=4\na": [Host("a", 3, 4)],
    "a slots=2 max_slots=2\na": [Host("a", 3, 3)],
    "joe@a:2\na:1": [Host("a", 2, user="joe"), Host("a", 1)],
    "\ufeffa\r\n\r\n  b  # c\r\n": hosts("a", "b"),
    "[fe80::1%eth0]:2": [Host("fe80::1%eth0", 2)],
    "joe@[::1]": [Host("::1", user="joe")],
    "::1": hosts("::1"),
    "r[1-2]n[01-02,10]:3": hosts(
        "r1n01", "r1n02", "r1n10", "r2n01", "r2n02", "r2n10", slots=3
    ),
    "n[9-11]": hosts("n9", "n10", "n11"),
    "export SLURM_JOB_NODELIST='a,n[1-2]'\nSLURM_NTASKS_PER_NODE=3": hosts(
        "a", "n1", "n2", slots=3
    ),
    "SLURM_NODELIST=a\nSLURM_JOB_ID=7": hosts("a"),
}


@pytest.mark.parametrize("text", GOOD)
def test_good(text, tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(text.encode())
    assert read(file) == GOOD[text]


# The text; the wrong line (0: the whole text); a part of the message.
MALFORMED = [
    ("", 0, "no hosts in it"),
    ("# only\n\n   # comments\n", 0, "no hosts in it"),
    ("a\nb slots=\n", 2, "slots="),
    ("a slots=0", 1, "not a whole number from 1 up"),
    ("a slots=-1", 1, "not a whole number"),
    ("a slots=two", 1, "slots=two"),
    ("a slots=4 max_slots=2", 1, "max_slots=2 is less than slots=4"),
    ("a:2 slots=2", 1, "slots is given twice"),
    ("a slots=1 slots=1", 1, "slots is given twice"),
    ("a slot=4", 1, "'slot=4' is not one of slots=N"),
    ("a 4", 1, "'4' is not one of"),
    ("ok\n\n# c\na:", 4, "no number after the colon"),
    ("a:b", 1, "slots=b"),
    ("a:1:2", 1, "neither host:slots nor an IPv6 address"),
    ("slots=4", 1, "no host before"),
    ("@a", 1, "no user before the @"),
    ("j&k@a", 1, "is not a user name"),
    ("no_de!", 1, "is not the name or address of a host"),
    ("-oProxyCommand=x", 1, "no host before"),
    ("-x", 1, "is not the name or address of a host"),
    ("[::1", 1, "brackets"),
    ("[fe80::1%$(touch-x)]:1", 1, "neither host:slots nor an IPv6 address"),
    ("fe80::1%a;b", 1, "neither host:slots nor an IPv6 address"),
    ("[::1]:", 1, "no number after the colon"),
    ("[2001:db8::g]:2", 1, "no"),
    ("n[01-", 1, "brackets"),
    ("n[3-1]", 1, "runs backwards"),
    ("n[a]", 1, "is not a list of numbers"),
    ("n[]", 1, "is not a list of numbers"),
    ("n[0-999999999999]", 1, "over 100000"),
    ("n[1-999]x[1-999]", 1, "over 100000"),
    ("a,,b", 1, "empty item"),
    ("a,b slots=2", 1, "is not the name or address"),
    ("SLURM_JOB_NODELIST=n[1-", 0, "brackets"),
    ("SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=2(x2)", 0, "is for 2 hosts"),
    ("SLURM_JOB_NODELIST=n[1-3]\nSLURM_TASKS_PER_NODE=2,x", 0, "'x'"),
    ("SLURM_JOB_NODELIST=a\nb slots=2", 2, "among Slurm's variables"),
    ("b slots=2\nSLURM_JOB_NODELIST=a", 2, "among lines of hosts"),
    ("a\n" + "b," * 100_000, 2, "it has over 131072 characters"),
    ("n[0-99999],m[0-99999]," * 99 + "a", 1, "over 100000 hosts"),
    ("n[0-99999]\nm", 2, "over 100000 hosts"),
    ("SLURM_JOB_NODELIST=n[0-99999],m[0-99999]", 0, "over 100000 hosts"),
    ("SLURM_JOB_NODELIST=a\nSLURM_TASKS_PER_NODE=1(x999999),1", 0, "over 100000 hosts"),
    ("a" * 100_000, 1, "aaa' is not the name or address of a host"),
]


@pytest.mark.parametrize("text, line, message", MALFORMED)
def test_malformed(text, line, message, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(HostError) as caught:
        read(file)
    error = caught.value
    assert error.message.startswith(f"{file}, line {line}: " if line else f"{file}: ")
    assert message in error.message and len(error.message) < 1000
    assert error.hint and error.exit_code == 2


def test_what_is_no_text_and_what_is_not_there(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"a\nb\xff\xfe\n")
    with pytest.raises(HostError, match="line 2: not a text file"):
        read(binary)
    with pytest.raises(HostError, match="it has more than 16 MB"):
        read("/dev/zero")
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        read(tmp_path)


STEMS = ["a", "n", "node", "node0", "gpu-a", "x.example", "rack_2-n"]
names = st.builds("{}{}".format, st.sampled_from(STEMS), st.integers(0, 1200))
addresses = st.one_of(
    names,
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
counts = st.one_of(st.none(), st.integers(1, 999))


@st.composite
def a_host(draw, address=addresses, user=True, most=True, slots=counts):
    n = draw(slots)
    limit = draw(st.one_of(st.none(), st.integers(n or 1, 1000))) if most else None
    who = draw(st.one_of(st.just(""), st.sampled_from(["joe", "a_b"])))
    return Host(draw(address), n, limit, who if user else "")


def lists(**options):
    return st.lists(
        a_host(**options), min_size=1, max_size=6, unique_by=lambda h: (h.user, h.name)
    )


v4 = st.one_of(names, st.ip_addresses(v=4).map(str))
HOLDS = {
    "openmpi": lists(),
    "mpich": lists(most=False, address=v4),
    "list": lists(most=False),
}


@pytest.mark.parametrize("dialect", HOLDS)
def test_what_was_written_is_read_back(dialect):
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(HOLDS[dialect])
    def round_trip(original):
        text = write(original, dialect)
        assert parse(text) == original
        if dialect == "list":
            assert parse_list(text) == original

    round_trip()


ranges = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 9)), min_size=1, max_size=6
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(["n", "rack-", "n0"]), ranges, st.integers(1, 4))
def test_slurms_short_form_of_numbered_names(prefix, ranges, width):
    items, wanted = [], []
    for first, more in ranges:
        numbers = [str(n).zfill(width) for n in range(first, first + more + 1)]
        items.append(f"{numbers[0]}-{numbers[-1]}" if more else numbers[0])
        wanted += [prefix + number for number in numbers]
    text = f"SLURM_JOB_NODELIST={prefix}[{','.join(items)}]"
    assert [host.name for host in parse(text)] == list(dict.fromkeys(wanted))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(alphabet="ab[]-,:@=# \n019.%s", max_size=40))
def test_any_text_is_read_or_refused_with_a_reason(text):
    try:
        assert parse(text)
    except HostError as error:
        assert error.hint


def test_what_a_dialect_cannot_say_is_refused():
    with pytest.raises(UsageError) as caught:
        write([Host("::1", 2)], "mpich")
    assert caught.value.hint
