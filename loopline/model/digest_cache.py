"""Digests of large files kept between starts of an engine, so that a checkpoint is read through once and not each time.

One small JSON file per checkpoint folder under `cache_folder() / "digests"`. It is only ever a shortcut: content that
is not what this module wrote counts as absent, and a folder that cannot be written costs the caching alone. Called by
`loopline.model.weights`.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loopline.cache import cache_folder

logger = logging.getLogger(__name__)

_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago could change again and keep its times: file systems count in steps of up to 2 s."""


@dataclass(frozen=True)
class _Stamp:
    """What tells one state of a file from another without reading it. A program can set `mtime_ns` back, and not
    `ctime_ns`.
    """

    name: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> "_Stamp":
        found = path.stat()
        return cls(str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def cached_digest(
    folder: Path,
    files: Sequence[Path],
    kind: str,
    compute: Callable[[], str],
    wall_ns: Callable[[], int] = time.time_ns,
) -> str:
    """`compute()`, or what it gave before for the same states of `files`, at least one, in the checkpoint `folder`.

    `kind` names how `compute` makes a digest: after a change of kind nothing cached fits. `wall_ns`: the clock that the
    files' times are read off. Raises what `compute` does, and OSError for a file that is not there.
    """
    stamps = [_Stamp.of(path) for path in files]
    states = [asdict(stamp) for stamp in stamps]
    key: dict[str, object] = {"kind": kind, "folder": str(folder.resolve()), "files": states}
    record = _record_file(folder)
    known = None if record is None else _recall(record, key)
    if known is not None:
        return known
    began_ns = wall_ns()
    digest = compute()
    changed_ns = max(max(stamp.mtime_ns, stamp.ctime_ns) for stamp in stamps)
    if began_ns - changed_ns < _SETTLED_NS or [_Stamp.of(path) for path in files] != stamps:
        logger.debug("digest of %s is not cached: a file changed just now", folder)
    elif record is not None:
        _remember(record, key | {"digest": digest})
    return digest


def _record_file(folder: Path) -> Path | None:
    """Where the digest of this folder is kept; None where nothing can be."""
    place = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    try:
        return cache_folder() / "digests" / f"{place}.json"
    except OSError as error:
        logger.debug("digest of %s is not cached: %s", folder, error)
        return None


def _recall(record: Path, key: dict[str, object]) -> str | None:
    """The digest in `record`, if it holds one for `key`."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.debug("no cached digest: %s: %s", record, error)
        return None
    if not isinstance(content, dict):
        return None
    digest = content.pop("digest", None)
    is_digest = isinstance(digest, str) and re.fullmatch(r"[0-9a-f]+", digest) is not None
    return digest if is_digest and content == key else None


def _remember(record: Path, content: dict[str, object]) -> None:
    """Write `record` anew. Who reads meanwhile, or writes too, sees one whole content or another."""
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=record.parent, delete=False) as file:
            try:
                json.dump(content, file)
                file.close()
                os.replace(file.name, record)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        logger.debug("digest not cached: %s: %s", record, error)
