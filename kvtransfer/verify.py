"""Whether a push's bytes are those that were sent: `transfer.verify: digest`, for debugging.

The sender's transfer thread hashes the source blocks as it posts a push, and the notice carries the digest; the
receiver hashes the target blocks when the notice has come. Where the bytes are read from is the worker's to say.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

DIGEST_BYTES = 16

ReadBlocks = Callable[[Sequence[int]], Iterable[memoryview]]
"""The bytes of blocks of an arena, in the order given, one piece each. May be called from any thread."""


def digest_of(pieces: Iterable[memoryview]) -> bytes:
    """[DIGEST_BYTES] of all pieces, one after the other."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()
