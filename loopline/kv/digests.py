"""Names of full blocks: a digest that stands for a block's tokens and for everything before them.

    root = H(fingerprint: weights, layout, dtypes, noise key .. | depth | the request's kind of noise)
    block 0 = H(root | tokens of block 0)        block k = H(digest of block k - 1 | tokens of block k)

Equal digests mean equal keys and values, so what makes KV differ goes into the root, and a request whose noise is its
own has none (`loopline.noise_key`). `loopline.kv.prefix_index` maps digests to blocks; a request keeps its
`BlockDigests` from admission to its end. Digests are the same in every process and on every machine, so that workers
and the coordinator can compare them.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import Struct

from loopline.errors import InvariantBroken
from loopline.identity import Fingerprint
from loopline.noise_key import noise_name
from loopline.request import SamplingParams

DIGEST_BYTES = 16


def prefix_root(*parts: str) -> bytes:
    """The digest that a chain starts from. Every part counts with its length, so ("ab", "c") is not ("a", "bc")."""
    state = blake2b(digest_size=DIGEST_BYTES, person=b"loopline-root")
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def request_root(group: Fingerprint, params: SamplingParams) -> bytes | None:
    """The digest that chains of such requests start from on workers of this fingerprint: the same in workers and
    coordinator. None: nothing of the request's KV is like any other's."""
    noise = noise_name(group, params)
    return None if noise is None else noise_root(group, params.loops, noise)


@lru_cache(maxsize=256)
def noise_root(group: Fingerprint, depth: int, noise: str) -> bytes:
    """The same for one depth and a noise that has a name."""
    return prefix_root(*(f"{name}={value}" for name, value in group.fields), str(depth), noise)


class BlockDigests:
    """Digests of one request's whole blocks. Invariant: block k was hashed once, when token (k + 1) x block_size - 1
    was first seen, and its digest never changes."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self.block_size = block_size
        self.num_hashed = 0  # blocks hashed so far, counted where it happens
        self._parent = root
        self._digests: list[bytes] = []
        self._packing = Struct(f"<{block_size}I")

    @property
    def digests(self) -> Sequence[bytes]:
        """Of the blocks that are whole, in order; grows in place, do not change it."""
        return self._digests

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the blocks that became whole. `token_ids` is the request's whole list so far, prompt first; what was
        hashed before is not looked at again.

        Raises InvariantBroken if the list is shorter than what was hashed, or a new token id is no uint32.
        """
        num_whole, size = len(token_ids) // self.block_size, self.block_size
        known = len(self._digests)
        if num_whole < known:
            raise InvariantBroken(f"{len(token_ids)} tokens, and {known} blocks of {size} were hashed before")
        if num_whole == known:
            return
        new = token_ids[known * size : num_whole * size]
        if min(new) < 0 or max(new) >= 1 << 32:
            raise InvariantBroken(f"token ids {min(new)}..{max(new)} do not fit 32 bits")
        for first in range(0, len(new), size):
            self._digests.append(self._hash(new[first : first + size]))

    def _hash(self, tokens: Sequence[int]) -> bytes:
        self.num_hashed += 1
        self._parent = blake2b(self._parent + self._packing.pack(*tokens), digest_size=DIGEST_BYTES).digest()
        return self._parent
