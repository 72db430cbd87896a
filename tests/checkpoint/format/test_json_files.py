from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.checkpoint import CheckpointError
from trainer_kit.checkpoint.format import json_files
from trainer_kit.checkpoint.format.json_files import inside, parse_json, read_json

OUTSIDE = ["", ".", "..", "../x", "a/../../x", "a/..", "/etc/passwd", "//x", "C:x", "C:/x", "a\\b", "\\\\host\\share"]
NOT_PLAIN = ["./a", "a/./b", "a//b", "a/", "a\nb", "a\0b", "\ud800", "\u202egnp.exe", "a\u00a0b", "a\u200bb"]


@pytest.mark.parametrize("name", [*OUTSIDE, *NOT_PLAIN, None, 3, ["a"], {}], ids=repr)
def test_a_name_that_leads_elsewhere_or_is_none_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(CheckpointError, match="does not lie inside it; do not trust it") as caught:
        inside(tmp_path, name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a b", "state/a..b.json", "..a", "...", "Größe-模型.json", "e\u0301"])
def test_any_other_name_is_taken(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        inside(tmp_path, "x" * 5000)


def test_links_anywhere_in_a_path_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "file").touch()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert inside(tmp_path, "real/deep/file").exists()
    for name in ("link", "link/deep/file", "real/up/real/deep/file", "dangling", "dangling/a"):
        with pytest.raises(CheckpointError, match="is a link"):
            inside(tmp_path, name)
    os.link(tmp_path / "real" / "deep" / "file", tmp_path / "hard")
    assert inside(tmp_path, "hard").exists()
    assert inside(tmp_path / "link", "deep/file").exists()  # the folder itself is its user's choice


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_what_would_be_waited_for_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "pipe/a"):
        with pytest.raises(CheckpointError, match="pipe is neither a plain file nor a folder"):
            inside(tmp_path, name)
    with pytest.raises(CheckpointError, match="is no plain file"):
        read_json(tmp_path / "pipe")


def test_json_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "JSON_BYTES", 20)
    monkeypatch.setattr(json_files, "JSON_VALUES", 5)
    for content in (b'["%s"]' % (b"x" * 16), b"[1,2,3,4,5]", b"[[[[[]]]]]"):
        assert parse_json(content, tmp_path)
    for content in (b'["%s"]' % (b"x" * 17), b"[1,2,3,4,5,6]", b"[[[[[[]]]]]]"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.json is not to be trusted: it holds JSON of more than"):
            read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"\xff", b"\xef\xbb\xbf{}", b"1 2", b"[" * 100_000]
)
def test_what_is_no_strict_json_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"a\.json is damaged, it holds no valid JSON"):
        parse_json(content, Path("a.json"))


def test_a_json_file_that_is_a_folder_or_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no plain file"):
        read_json(tmp_path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_json(tmp_path / "a.json")
