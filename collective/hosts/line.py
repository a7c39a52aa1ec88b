"""One host of a hostfile or of ``-H``, in any dialect but Slurm's.

All these dialects fit one grammar, so a user need not say which one a file is in::

    [user@]host[:slots] [slots=N] [max_slots=N] [user=NAME]

where host is a name, an IPv4 address, an IPv6 address with or without brackets, or
Slurm's short form of many names (``node[01-04,7]``).
"""

from __future__ import annotations

import re

from collective.hosts import names
from collective.hosts.host import Host, is_ipv6, is_name

_KEYS = {
    "slots": "slots",
    "max_slots": "max_slots",
    "max-slots": "max_slots",
    "user": "user",
}
# MPICH's, which do not affect how many ranks run where.
_IGNORED = frozenset({"binding", "ifname"})
EXPECTED = (
    "a line like node1 slots=4 (Open MPI, DeepSpeed), node1:4 (MPICH, Intel MPI), "
    "[2001:db8::1]:4 or user@node1"
)


def parse(text: str) -> list[Host]:
    """The hosts of one line: several where it holds a short form.

    Args:
        text: Without comment and end of line; not blank.

    Raises:
        ValueError: With what is wrong.
    """
    # Some write "slots = 4", and Open MPI reads it.
    first, *rest = re.sub(r"\s*=\s*", "=", text).split()
    if "=" in first and "@" not in first.split("=")[0]:
        raise ValueError(f"no host before {first!r}")
    user, _, address = first.rpartition("@")
    if "@" in first and not user:
        raise ValueError(f"no user before the @ of {first!r}")
    address, colon_slots = _cut_slots(address)
    options: dict[str, str] = {"slots": colon_slots} if colon_slots else {}
    if user:
        options["user"] = user
    for option in rest:
        key, equals, value = option.partition("=")
        if key in _IGNORED and equals:
            continue
        if not equals or key not in _KEYS:
            raise ValueError(
                f"{option!r} is not one of slots=N, max_slots=N and user=NAME"
            )
        if _KEYS[key] in options:
            raise ValueError(f"{_KEYS[key]} is given twice")
        options[_KEYS[key]] = value
    slots, most = (_count(key, options) for key in ("slots", "max_slots"))
    if slots is not None and most is not None and most < slots:
        raise ValueError(f"max_slots={most} is less than slots={slots}")
    names_found = [address] if is_ipv6(address) else names.expand(address)
    return [Host(name, slots, most, options.get("user", "")) for name in names_found]


def _cut_slots(text: str) -> tuple[str, str]:
    """Cuts ``host:4`` into host and number; an address of IPv6 has colons itself."""
    if is_ipv6(text):
        return text, ""
    if text.startswith("["):
        inside, _, after = text[1:].partition("]")
        if is_ipv6(inside) and (not after or after.startswith(":")):
            if after == ":":
                raise ValueError(f"no number after the colon of {text!r}")
            return inside, after[1:]
    host, colon, number = text.partition(":")
    if ":" in number:
        raise ValueError(f"{text!r} is neither host:slots nor an IPv6 address")
    if colon and not number:
        raise ValueError(f"no number after the colon of {text!r}")
    if not host or not ("[" in host or is_name(host)):
        raise ValueError(f"{host!r} is not the name or address of a host")
    return host, number


def _count(key: str, options: dict[str, str]) -> int | None:
    text = options.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**6):
        raise ValueError(f"{key}={text}: not a whole number from 1 up")
    return int(text)
