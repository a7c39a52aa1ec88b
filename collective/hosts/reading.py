"""Reads hostfiles and ``-H``, for whatever program they were written.

All dialects but Slurm's fit one grammar, so a user need not name the dialect of a file::

    [user@]host[:slots] [slots=N] [max_slots=N] [user=NAME]

where host is a name, an IPv4 address, an IPv6 address with or without brackets, or
Slurm's short form of many names (``node[01-04,7]``).
"""

from __future__ import annotations

import re
from pathlib import Path

from collective.errors import UsageError
from collective.hosts import slurm
from collective.hosts.host import Host, HostError, is_ipv6, is_name, merged

MOST_BYTES = 16 << 20  # of a file
MOST_CHARACTERS = 1 << 17  # of a line: as many as one argument of a command may have
_VARIABLE = re.compile(r"(?:export\s+)?(SLURM_[A-Z_]+)=(.*)")
_KEYS = ("slots", "max_slots", "user")
# Options of MPICH that do not affect the placement of ranks.
_IGNORED = ("binding", "ifname")
_EXPECTED = (
    "a line like node1 slots=4 (Open MPI, DeepSpeed), node1:4 (MPICH, Intel MPI), "
    "[2001:db8::1]:4 or user@node1"
)


def read(file: str | Path) -> list[Host]:
    """Return the hosts of a file, each once, in the order of the file.

    Raises:
        UsageError: If the file cannot be read.
        HostError: A line is wrong; it names the first one and says what it should hold.
    """
    try:
        text = read_text(file)
    except OSError as error:
        raise UsageError(
            f"cannot read the hostfile {file}: {error.strerror}",
            hint="--hostfile FILE, with a line like 'node1 slots=4' for each host",
        ) from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise HostError(str(file), number, "not a text file", _EXPECTED) from None
    return parse(text, str(file))


def read_text(file: str | Path) -> str:
    """Return the text of a file of hosts.

    Raises:
        OSError: If it cannot be read.
        UnicodeDecodeError: If it is not text.
        HostError: If it is too long.
    """
    with open(file, "rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        what = f"it has more than {MOST_BYTES >> 20} MB"
        raise HostError(str(file), 0, what, _EXPECTED)
    return data.decode("utf-8-sig")


def parse(text: str, source: str = "hostfile") -> list[Host]:
    """Return the hosts of lines in any dialect; errors name the lines' ``source``.

    Raises:
        HostError: At the first bad line, or if there is no host at all.
    """
    hosts: list[Host] = []
    variables: dict[str, str] = {}
    for number, whole in enumerate(text.splitlines(), start=1):
        if len(whole) > MOST_CHARACTERS:
            what = f"it has over {MOST_CHARACTERS} characters"
            raise HostError(source, number, what, _EXPECTED)
        line = " ".join(whole.partition("#")[0].split())
        variable = _VARIABLE.fullmatch(line)
        if variable:
            variables[variable[1]] = variable[2].strip().strip("\"'")
            if hosts:
                what = f"{variable[1]} among lines of hosts"
                raise HostError(source, number, what, _EXPECTED)
        elif line and variables:
            what = f"{line!r} among Slurm's variables"
            raise HostError(source, number, what, "SLURM_NAME=value")
        elif line:
            try:
                # After a blank follow options, which may have commas.
                hosts += _line(line) if " " in line else _items(line)
                slurm.check_number(hosts)
            except ValueError as error:
                raise HostError(source, number, str(error), _EXPECTED) from None
    hosts = hosts or slurm.allocation(variables, source)
    if not hosts:
        raise HostError(source, 0, "no hosts in it", _EXPECTED)
    return merged(hosts)


def parse_list(text: str, source: str = "-H") -> list[Host]:
    """Return the hosts of ``-H a:2,b:2`` or ``node[01-04]:2``, or raise a HostError."""
    try:
        return merged(_items(text))
    except ValueError as error:
        raise HostError(source, 0, str(error), "-H node1:2,node2:2") from None


def _items(text: str) -> list[Host]:
    hosts: list[Host] = []
    for item in slurm.split(text):
        if not item.strip():
            raise ValueError(f"{text!r} has an empty item")
        hosts += _line(item.strip())
        slurm.check_number(hosts)
    return hosts


def _line(text: str) -> list[Host]:
    """Return the hosts of one line: several if it has a short form."""
    # Some users write "slots = 4", and Open MPI reads it.
    first, *rest = re.sub(r"\s*=\s*", "=", text).split()
    if "=" in first and "@" not in first.split("=")[0]:
        raise ValueError(f"no host before {first!r}")
    user, at, address = first.rpartition("@")
    if at and not user:
        raise ValueError(f"no user before the @ of {first!r}")
    address, slots = _cut_slots(address)
    options = {"slots": slots, "user": user}
    options = {key: value for key, value in options.items() if value}
    for option in rest:
        key, equals, value = option.partition("=")
        if equals and key in _IGNORED:
            continue
        key = key.replace("-", "_")
        if not equals or key not in _KEYS:
            raise ValueError(
                f"{option!r} is not one of slots=N, max_slots=N and user=NAME"
            )
        if key in options:
            raise ValueError(f"{key} is given twice")
        options[key] = value
    least, most = (_count(key, options) for key in ("slots", "max_slots"))
    if least is not None and most is not None and most < least:
        raise ValueError(f"max_slots={most} is less than slots={least}")
    names = [address] if is_ipv6(address) else slurm.expand(address)
    return [Host(name, least, most, options.get("user", "")) for name in names]


def _cut_slots(text: str) -> tuple[str, str]:
    """Cut ``host:4`` into host and number; an IPv6 address contains colons, too."""
    if is_ipv6(text):
        return text, ""
    inside, bracket, after = text.removeprefix("[").partition("]")
    if text[:1] == "[" and bracket and is_ipv6(inside) and after[:1] in ("", ":"):
        host, colon, number = inside, after[:1], after[1:]
    else:
        host, colon, number = text.partition(":")
        if ":" in number:
            raise ValueError(f"{text!r} is neither host:slots nor an IPv6 address")
        if not ("[" in host or is_name(host)):
            raise ValueError(f"{host!r} is not the name or address of a host")
    if colon and not number:
        raise ValueError(f"no number after the colon of {text!r}")
    return host, number


def _count(key: str, options: dict[str, str]) -> int | None:
    text = options.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise ValueError(f"{key}={text}: not a whole number from 1 up")
    return int(text)
