"""Where the user's files are kept that took long to make, and can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Ours in the user's folder for such files; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "collective")
