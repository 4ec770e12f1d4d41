"""Where Loopline keeps what it can always make again: digests of checkpoints, compiled kernels.

Called by those who cache; it only names the folder, and each of them keeps a folder of its own inside.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$LOOPLINE_CACHE`, else `$XDG_CACHE_HOME/loopline`, else `~/.cache/loopline`; it may not exist yet.

    Raises OSError if none of them can be told: a caller then goes without a cache.
    """
    if own := os.environ.get("LOOPLINE_CACHE"):
        return Path(own)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # the XDG specification has relative ones ignored
        return shared / "loopline"
    try:
        return Path.home() / ".cache" / "loopline"
    except RuntimeError as error:
        raise OSError(f"no cache folder: {error}; LOOPLINE_CACHE names one") from error
