"""Random numbers that nobody has seeded: those of rank 0, on every rank.

A generator without a seed asks the system for one, and each rank would get another:
``np.random.RandomState()``, ``random.Random()``, ``os.urandom``, ``uuid.uuid4``, the name
of a temporary folder. Data drawn with them would differ, and so would folders that rank 0
makes and all ranks read. Here what the script or a library asks for follows from one seed
that rank 0 has sent, from the line that asks, and from how often it has asked. What Python
itself asks for stays as it is: names of its sockets and locks must differ. So stays what a
library asks for but seeds of generators: names of its temporary files must differ, too.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from collective.training.keras_compat import random_modules
from collective.training.unedited.script import is_library, is_own, is_standard_library
from collective.training.unedited.script_job import ScriptJob

# Modules that ask on behalf of their caller.
_BETWEEN = tuple(
    getattr(module, "__file__", "") or ""
    for module in (
        random,
        tempfile,
        sys.modules.get("uuid"),
        sys.modules.get("secrets"),
    )
)


def share_entropy(job: ScriptJob, seed: int) -> None:
    """Replace what asks the system for random bytes, until the distribution is undone.

    Args:
        seed: The same number on every rank.
    """
    entropy = _Entropy(seed)
    stock_bytes = os.urandom

    @functools.wraps(stock_bytes)
    def urandom(size: int, /) -> bytes:
        return entropy.bytes(size, script_alone=True) or stock_bytes(size)

    job.replace(os, "urandom", urandom)
    job.replace(random, "_urandom", urandom)
    stock_seed = random.Random.seed

    @functools.wraps(stock_seed)
    def seed_random(self: random.Random, a: Any = None, version: int = 2) -> None:
        found = entropy.bytes(32) if a is None else None
        stock_seed(self, int.from_bytes(found, "big") if found else a, version)

    job.replace(random.Random, "seed", seed_random)
    owner, name = random_modules.numpy_entropy()
    stock_bits = getattr(owner, name)

    def randbits(bits: int) -> int:
        found = entropy.bytes(-(-bits // 8))
        if found is None:
            return int(stock_bits(bits))
        return int.from_bytes(found, "big") >> (-bits % 8)

    job.replace(owner, name, randbits)
    stock_names = tempfile._get_candidate_names  # type: ignore[attr-defined]

    def names() -> Iterator[str]:
        """Return names for files and folders that the script makes."""
        if entropy.asking(script_alone=True) is None:
            return stock_names()
        return iter(shared_name, "")

    def shared_name() -> str:
        name = entropy.name()
        job.shared_names.add(name)
        return name

    job.replace(tempfile, "_get_candidate_names", names)


class _Entropy:
    """Bytes that follow from a seed, from the line that asks, and from how often."""

    def __init__(self, seed: int):
        self._seed = seed
        self._counts: dict[Any, Callable[[], int]] = defaultdict(
            lambda: itertools.count().__next__
        )
        self._lock = threading.Lock()

    def bytes(self, size: int, script_alone: bool = False) -> bytes | None:
        """Return so many bytes, or None if Python itself or this package asks.

        Args:
            script_alone: Whether None is for libraries, too.
        """
        place = self.asking(script_alone)
        if place is None:
            return None
        with self._lock:
            count = self._counts[place]()
        file, line = place
        text = f"{self._seed} {os.path.basename(file)} {line} {count}".encode()
        return hashlib.shake_256(text).digest(size)

    def name(self) -> str:
        """Return eight letters."""
        found = self.bytes(8) or os.urandom(8)
        return "".join(chr(ord("a") + byte % 26) for byte in found)

    @staticmethod
    def asking(script_alone: bool = False) -> tuple[str, int] | None:
        """Return the file and line that ask, or None for Python and this package."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if is_own(file):
                if frame.f_code.co_filename != __file__:
                    return None
            elif file == tempfile.__file__ and not script_alone:
                return None  # a seed for the names that libraries ask for
            elif file not in _BETWEEN:
                if is_standard_library(file) or (script_alone and is_library(file)):
                    return None
                return file, frame.f_lineno
            frame = frame.f_back
        return None
