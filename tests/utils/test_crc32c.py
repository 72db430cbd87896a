from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as byte_by_byte

from trainer_kit.utils.crc32c import crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next two: RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_checksums(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@given(st.binary(max_size=1100) | st.integers(505, 1030).map(lambda size: bytes(7 * n % 256 for n in range(size))))
def test_it_is_tensorboards(data: bytes) -> None:
    assert crc32c(data) == byte_by_byte(data)
