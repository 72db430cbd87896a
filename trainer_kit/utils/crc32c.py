"""The checksum of TensorBoard's records, CRC-32C (Castagnoli), whose package computes it byte by byte in Python."""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_BLOCK = 512
"""Bytes that are looked up at once."""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes (RFC 3720, section 12.1).

    The checksum is linear: it is the sum, without carries, of what each byte adds at its distance from the end.
    """
    table, rows = _table()
    register = 0xFFFFFFFF
    for start in range(0, len(data), _BLOCK):
        values = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start).copy()
        first = min(4, len(values))
        values[:first] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8, first)
        register >>= 8 * first
        register ^= int(np.bitwise_xor.reduce(table[rows[-len(values) :] + values]))
    return register ^ 0xFFFFFFFF


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Return what each byte adds, in rows of 256 by its distance from the end, and the rows' starts, farthest first."""
    table = np.empty((_BLOCK, 256), np.uint32)
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ np.uint32(_POLYNOMIAL), last >> 1)
    table[0] = last
    for row in range(1, _BLOCK):
        table[row] = last[table[row - 1] & 0xFF] ^ table[row - 1] >> 8
    return table.reshape(-1), 256 * np.arange(_BLOCK)[::-1]
