"""Fingerprints: one chained hash a block, so equal hashes at one place mean equal tokens up to there."""

from collections.abc import Iterable, Sequence

PREFIX_BYTES = 8
"""Bytes of each block hash that a reader sends to choose a lease by."""


def is_prefix(old: Sequence[bytes], new: Sequence[bytes]) -> bool:
    """Whether ``new`` goes on where ``old`` ends."""
    return len(old) <= len(new) and old[-1] == new[len(old) - 1]


def shared_blocks(hashes: Sequence[bytes], prefixes: bytes) -> int:
    """Blocks that a fingerprint shares from the start with a reader's prompt, by what the reader sent of it."""
    count = 0
    for i, block_hash in enumerate(hashes):
        if block_hash[:PREFIX_BYTES] != prefixes[i * PREFIX_BYTES : (i + 1) * PREFIX_BYTES]:
            break
        count += 1
    return count


def common_blocks(hashes: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Blocks that two fingerprints share from the start, compared in full."""
    count = 0
    for mine, theirs in zip(hashes, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def hash_prefixes(hashes: Iterable[bytes]) -> bytes:
    """What a reader sends of its prompt's block hashes."""
    return b"".join(bytes(block_hash[:PREFIX_BYTES]) for block_hash in hashes)
