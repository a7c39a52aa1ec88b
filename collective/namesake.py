"""Finds another distribution whose files lie in this package's folder.

PyPI's ``collective`` is another project, and installs a package of the same import name:
pip overwrites files of one with files of the other, without a word.
"""

from __future__ import annotations

import os

_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def warn_of_namesake(folder: str | os.PathLike[str] = _FOLDER) -> None:
    """Warn if PyPI's distribution ``collective`` is installed in this folder, too.

    Args:
        folder: The folder that holds this package: ``site-packages``, or a checkout.
    """
    names = os.listdir(folder)
    ours = any(name.startswith("keras_collective-") for name in names)
    theirs = [
        name
        for name in names
        if name.startswith("collective-") and name.endswith(".dist-info")
    ]
    if ours and theirs:
        from collective.log import log  # each import of the package comes by here

        version = theirs[0].removesuffix(".dist-info").partition("-")[2]
        log.warning(
            f"another project named collective ({version}) is installed in {folder}, and "
            "its files may have replaced some of this package\n"
            "HINT: pip uninstall collective, then "
            "pip install --force-reinstall keras-collective"
        )
