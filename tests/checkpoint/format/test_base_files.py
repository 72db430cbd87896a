"""Files of a base: whether they are those of a folder, and which tensors they hold."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from trainer_kit.checkpoint import save_tensors
from trainer_kit.checkpoint.format.base_files import digests_in_files, is_local, load_from_hub, same_folder
from trainer_kit.checkpoint.format.base_reference import BaseReference, digest

WEIGHT = torch.arange(4.0)


def test_a_folder_is_found_by_each_of_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert is_local("base")
    assert same_folder("base", tmp_path / "link")
    assert not same_folder("other", tmp_path / "other")
    assert not same_folder(None, tmp_path)


def test_weights_are_found_by_their_bits_in_the_dtype_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tensors({"renamed": WEIGHT}, tmp_path)
    hub = types.ModuleType("huggingface_hub")

    def lookup(name: str, file: str, revision: str | None) -> str | None:
        if "/" not in name:
            raise ValueError("no repository")
        return str(tmp_path / file) if revision == "1" else None

    hub.try_to_load_from_cache = lookup  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    half = WEIGHT.bfloat16()
    assert digests_in_files("a/b", "1", {torch.bfloat16}) == {digest(half)}
    assert digests_in_files("a/b", "2", {torch.bfloat16}) == digests_in_files("ab", "1", {torch.bfloat16}) == set()
    digests, dtypes = {"w": digest(half), "v": "0" * 16}, dict.fromkeys("wv", "torch.bfloat16")
    found = load_from_hub(BaseReference.of("a/b", digests, (), "1", dtypes), ["w", "v"])
    assert found.keys() == {"w"}
    assert torch.equal(found["w"], half)
