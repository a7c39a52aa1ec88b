"""Small functions that scripts written for Horovod import."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from collective import library
from collective.errors import CollectiveError

_Item = TypeVar("_Item")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Make sure that the native core can be loaded.

    Args:
        ext_name, ext_env_var, pkg_path, *args: Horovod's names of its extension; not
            used, because one core serves every framework.

    Raises:
        ImportError: If the core was not built.
    """
    try:
        library.load()
    except CollectiveError as error:
        raise ImportError(f"{ext_name}: {error}") from error


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the native core can be loaded.

    Args:
        ext_base_name: ``tensorflow``; no other framework has an interface here.
        verbose: Not used.
    """
    if ext_base_name != "tensorflow":
        return False
    try:
        check_extension(ext_base_name, "", "")
    except ImportError:
        return False
    return True


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU; arguments as of ``extension_available``."""
    if ext_base_name != "tensorflow":
        return False
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def mpi_built(verbose: bool = False) -> bool:
    """Return whether the native core was built: one build serves any MPI."""
    return library.path().exists()


def gloo_built(verbose: bool = False) -> bool:
    """Return False, like ``nccl_built`` etc.: the native core takes their place."""
    return False


nccl_built = ddl_built = ccl_built = gloo_built


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the context; None leaves one as it is."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether Adasum can be used on so many ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[_Item], n: int) -> list[Sequence[_Item]]:  # noqa: E741
    """Cut a sequence into ``n`` pieces; the first ones may be longer by one."""
    length, longer = divmod(len(l), n)
    starts = [i * length + min(i, longer) for i in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Return whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Compare versions as numbers.

    Raises:
        ValueError: If one is not a string, or ``target`` does not have three parts.
    """
    from packaging import version

    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are strings, not {ver!r} and {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"{target!r} is not of the form major.minor.patch")
    return version.parse(ver) >= version.parse(target)
