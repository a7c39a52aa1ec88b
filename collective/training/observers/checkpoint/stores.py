"""The places of checkpoints: a folder, or a URL that fsspec can reach.

With a URL, checkpoints are written to and read from a folder of this host as always, and a
store copies them. An object store cannot rename, so a checkpoint there is whole when its
manifest is there, which is copied last and removed first. The checksums in the manifest
reveal a mixture of two checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.net import private_files
from collective.training.observers.checkpoint import storage

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_WRITER = (
    ".writer"  # names the writer; writing it shows at the start that one may write
)


def make(place: str | os.PathLike[str]) -> FolderStore:
    """Return the store of a folder or URL."""
    name = os.fspath(place)
    return UrlStore(name.rstrip("/")) if _URL.match(name) else FolderStore(Path(name))


class FolderStore:
    """A folder of this host, or one that hosts share."""

    def __init__(self, folder: Path):
        self.folder = folder  # in it, checkpoints are written and read

    def shown(self, path: Path) -> str:
        """Return the name of a checkpoint, or of the folder, for users."""
        return str(path)

    def open(self) -> None:
        """Prepare the folder, which this process has locked."""
        storage.remove_parts(self.folder)

    def fetch(self, path: Path) -> None:
        """Prepare a checkpoint to be read."""

    def publish(self, path: Path) -> None:
        """Keep a checkpoint that has just been written."""

    def remove(self, path: Path) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End the use of the folder."""


class UrlStore(FolderStore):
    """A URL, ``s3://bucket/run``, with a folder of this host in the user's cache."""

    def __init__(self, url: str):
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        super().__init__(private_files.cache_folder() / "checkpoints" / digest)
        self.url = url
        self._files: Any = None
        self._root = ""

    def shown(self, path: Path) -> str:
        """Return the URL of a checkpoint, or of all."""
        return self.url if path == self.folder else f"{self.url}/{path.name}"

    def open(self) -> None:
        """List the checkpoints at the URL: copy their manifests to the folder.

        Raises:
            UsageError: The URL cannot be read or written.
        """
        for left in self.folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
        self._connect()
        try:
            self._files.makedirs(self._root, exist_ok=True)
            writer = f"{socket.gethostname()} {os.getpid()}\n"
            self._files.pipe_file(f"{self._root}/{_WRITER}", writer.encode())
            self._files.invalidate_cache()
            for found in self._files.ls(self._root, detail=False):
                name = found.rstrip("/").rpartition("/")[2]
                if storage.NAME.fullmatch(name):
                    self._list(name)
        except Exception as error:
            raise UsageError(
                f"checkpoints cannot be written to {self.url}: {_said(error)}",
                hint="the bucket must be there, and credentials: AWS_PROFILE, "
                "AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS",
                everywhere=False,
            ) from None

    def _connect(self) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{self.url}: {_said(error)}",
                hint="pip install 'keras-collective[url]' for s3:// and gs://; fsspec has "
                "packages for more",
                everywhere=False,
            ) from None

    def _list(self, name: str) -> None:
        """Copy a manifest; without one, a writer was killed, and the rest is removed."""
        remote = f"{self._root}/{name}"
        if not self._files.exists(f"{remote}/{storage.MANIFEST}"):
            self._files.rm(remote, recursive=True)
            return
        (self.folder / name).mkdir()
        self._get(self.folder / name, storage.MANIFEST)

    def fetch(self, path: Path) -> None:
        """Copy a checkpoint's files from the URL; raise Unusable if that fails."""
        for name in (storage.WEIGHTS, storage.ARRAYS):
            try:
                if not (path / name).exists():
                    self._get(path, name)
            except Exception as error:
                raise storage.Unusable(f"{name}: {_said(error)}") from None

    def publish(self, path: Path) -> None:
        """Copy a checkpoint to the URL, its manifest last.

        Raises:
            CollectiveError: It cannot be written there.
        """
        remote = f"{self._root}/{path.name}"
        manifest = f"{remote}/{storage.MANIFEST}"
        try:
            self._files.makedirs(remote, exist_ok=True)
            if self._files.exists(manifest):
                self._files.rm_file(manifest)
            for name in (storage.WEIGHTS, storage.ARRAYS, storage.MANIFEST):
                self._files.put_file(str(path / name), f"{remote}/{name}")
        except Exception as error:
            shutil.rmtree(path, ignore_errors=True)  # so that it counts nowhere
            raise CollectiveError(
                f"{self.shown(path)}: {_said(error)}",
                hint="see whether the bucket can be reached, and written to",
            ) from None

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, its manifest first; a remaining rest does no harm."""
        super().remove(path)
        remote = f"{self._root}/{path.name}"
        try:
            self._files.rm_file(f"{remote}/{storage.MANIFEST}")
            self._files.rm(remote, recursive=True)
        except Exception:
            return  # it is tried again when the next training begins, if half removed

    def close(self) -> None:
        """Remove the folder of this host."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _get(self, path: Path, name: str) -> None:
        """Copy one file; a killed copy has another name."""
        part = path / f"{storage.PART}{name}"
        self._files.get_file(f"{self._root}/{path.name}/{name}", str(part))
        part.rename(path / name)


def _said(error: Exception) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]
