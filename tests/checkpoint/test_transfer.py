"""Files that travel to the memory of another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.checkpoint import FileEntry, transfer
from trainer_kit.checkpoint.format.disk import write_file
from trainer_kit.checkpoint.transfer import Arrival, pieces_of, read_piece

CONTENTS = {"empty": b"", "model": bytes(range(250)), "state/optimizer": bytes(100)}


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 40)), st.integers(1, 15))
def test_pieces_cover_each_file_once(sizes: dict[str, int], piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_PIECE_BYTES", piece_bytes)
        pieces = pieces_of({name: FileEntry(size, "0" * 16) for name, size in sizes.items()})
    for name, size in sizes.items():
        covered = [place for each in pieces if each.name == name for place in range(each.start, each.start + each.size)]
        assert covered == [*range(size)]
    assert all(0 < each.size <= piece_bytes for each in pieces)


def sent(folder: Path) -> dict[str, FileEntry]:
    (folder / "state").mkdir(parents=True)
    return {name: write_file(folder / name, [content]) for name, content in CONTENTS.items()}


def send(folder: Path, entries: dict[str, FileEntry], flipped: int | None = None) -> tuple[Arrival, str | None]:
    """Send all files from one folder to another one; return why they are refused."""
    arrival = Arrival(folder / "there", entries)
    for number, piece in enumerate(pieces_of(entries)):
        assert arrival.is_waiting
        content, problem = read_piece(folder / "here", piece)
        assert problem is None
        buffer = arrival.buffer()
        buffer.copy_(content)
        if number == flipped:
            buffer[0] ^= 1
        arrival.write(buffer)
    return arrival, arrival.finish()


def test_files_arrive_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 64)
    entries = sent(tmp_path / "here")
    arrival, problem = send(tmp_path, entries)
    assert problem is None
    assert not arrival.is_waiting
    assert {name: (tmp_path / "there" / name).read_bytes() for name in CONTENTS} == CONTENTS


@pytest.mark.parametrize("flipped", [0, 3, 5])
def test_a_flipped_bit_is_refused_on_arrival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flipped: int) -> None:
    monkeypatch.setattr(transfer, "_PIECE_BYTES", 64)
    _, problem = send(tmp_path, sent(tmp_path / "here"), flipped)
    assert problem is not None
    assert "arrived with the checksum" in problem


def test_memory_that_is_full_is_reported_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("no folder")
    _, problem = send(tmp_path, sent(tmp_path / "here"))
    assert problem is not None
    assert "there" in problem


def test_a_file_that_cannot_be_read_is_sent_as_zeros(tmp_path: Path) -> None:
    entries = sent(tmp_path)
    (tmp_path / "model").write_bytes(b"short")
    (tmp_path / "state/optimizer").unlink()
    model, optimizer = pieces_of(entries)
    assert read_piece(tmp_path, model)[1] == f"{tmp_path / 'model'} has become shorter"
    content, problem = read_piece(tmp_path, optimizer)
    assert problem is not None
    assert torch.equal(content, torch.zeros(100, dtype=torch.uint8))
