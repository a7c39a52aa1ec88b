"""Errors that scripts written for Horovod catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed on every rank; the last committed state remains valid."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed; the present state remains valid.

    Args:
        skip_sync: Whether the ranks hold the same state already.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the one that was compiled against.

    The native core is compiled for no particular TensorFlow, so this error is never
    raised here.

    Args:
        name: The framework.
        version: The version that is imported.
        installed_version: The version that the extension was compiled against.
    """

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Return one line about two versions of a framework."""
    return f"{name} {version} is imported, but {installed_version} was compiled against"
