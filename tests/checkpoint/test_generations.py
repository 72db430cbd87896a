"""Copies of a state in the memory of machines: which are complete, and which can be used."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.generations import write_part

from trainer_kit.checkpoint import FileEntry, generations
from trainer_kit.checkpoint.generations import (
    MARKER,
    Generation,
    Marker,
    choose,
    folder_name,
    give_up_copies,
    has_state,
    list_generations,
    make_private_folder,
    newer_generations,
    read_generation,
    read_marker,
    remove_marker,
    write_marker,
)

FILES = {name: FileEntry(size, "0" * 16) for name, size in (("a", 3), ("b", 2), ("c", 2))}
MARK = Marker("0123456789abcdef" * 2, "f" * 32, "/runs/a")


def generation(step: int, names: frozenset[str], problem: str | None = None) -> Generation:
    places = {name: Path("memory", name) for name in names}
    return Generation(f"{step:08}-00000000", step, 2, "here", FILES, places, [] if problem is None else [problem])


HELD = st.dictionaries(st.integers(1, 6), st.frozensets(st.sampled_from([*FILES])), max_size=4)


@given(st.lists(HELD, min_size=1, max_size=4), st.none() | st.integers(0, 6))
def test_the_newest_generation_of_which_all_parts_are_somewhere_is_chosen(
    held: list[dict[int, frozenset[str]]], on_disk: int | None
) -> None:
    found = [{each.name: each for each in (generation(*facts) for facts in rank.items())} for rank in held]
    choices = []
    for name in newer_generations([[*each] for each in found], on_disk):
        choices.append(choose([each.get(name) for each in found]))
        if choices[-1].generation is not None:
            break
    choice = choices[-1] if choices else choose([None] * len(held))
    steps = {step for each in held for step in each}
    there = {step: frozenset[str]().union(*(each.get(step, frozenset()) for each in held)) for step in steps}
    newer = {step: names for step, names in there.items() if on_disk is None or step > on_disk}
    complete = [step for step, names in newer.items() if names == FILES.keys()]
    assert (choice.generation and choice.generation.step) == max(complete, default=None)
    assert sum(bool(each.refused) for each in choices) == sum(step > max(complete, default=0) for step in newer)
    if choice.generation is not None:
        assert choice.holders.keys() == FILES.keys()
        for name, rank in choice.holders.items():
            assert name in held[rank][choice.generation.step]


def test_machines_that_have_all_share_the_work() -> None:
    both = [generation(4, frozenset(FILES)), generation(4, frozenset(FILES))]
    assert choose(both).holders == {"a": 0, "b": 1, "c": 1}
    assert choose([both[0], None, both[1]]).holders == {"a": 0, "b": 2, "c": 2}


def test_the_reason_names_what_is_damaged_or_missing() -> None:
    damaged, missing = generation(4, frozenset("ab"), "c is damaged"), generation(2, frozenset("ab"))
    assert choose([damaged, None]).refused == "the copies of step 4 cannot be used: c is damaged"
    assert choose([None, missing]).refused == "the copies of step 2 cannot be used: no machine that is here has c"
    assert choose([None, None]).refused == ""
    assert newer_generations([[damaged.name, missing.name], []], None) == [damaged.name, missing.name]
    assert newer_generations([[missing.name], [damaged.name]], 2) == [damaged.name]


def test_own_and_received_files_of_a_machine_are_found_together(tmp_path: Path) -> None:
    write_part(tmp_path, "00000004-0000000a", 0, 0, {"model": b"weights"})
    write_part(tmp_path, "00000004-0000000a", 1, 0, {"state/optimizer": b"moments"})
    (tmp_path / folder_name("00000006-0000000b", 0, 0)).mkdir()  # without a manifest: it was not written to its end
    (tmp_path / "something else").mkdir()
    assert list_generations(tmp_path) == ["00000004-0000000a"]
    found = read_generation(tmp_path, "00000004-0000000a")
    assert found is not None
    assert (found.step, found.world_size, found.problems) == (4, 2, [])
    assert {name: path.read_bytes() for name, path in found.places.items()} == {
        "model": b"weights",
        "state/optimizer": b"moments",
    }
    assert list_generations(tmp_path / "missing") == []
    assert read_generation(tmp_path, "00000006-0000000b") is None
    assert read_generation(tmp_path / "missing", "00000004-0000000a") is None


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    write_part(tmp_path, "00000004-0000000a", 0, 0, {"model": b"weights", "state/optimizer": b"momentS"})
    found = read_generation(tmp_path, "00000004-0000000a")
    assert found is not None
    assert [*found.places] == ["model"]
    (problem,) = found.problems
    assert "optimizer is damaged: its checksum is" in problem
    assert choose([found]).generation is None


def test_a_right_copy_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    for machine, model in enumerate((b"weightS", b"weights")):
        contents = {"model": model, "state/optimizer": b"moments"}
        write_part(tmp_path / str(machine), "00000004-0000000a", 0, machine, contents)
    choice = choose([read_generation(tmp_path / str(machine), "00000004-0000000a") for machine in range(2)])
    assert choice.generation is not None
    assert choice.holders["model"] == 1
    assert not choice.refused


def test_only_this_user_may_enter_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MARK.folder(tmp_path)
    make_private_folder(folder)
    make_private_folder(folder)  # another process of this machine
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(OSError, match="is no folder of this user"):
        make_private_folder(folder)
    write_part(folder, "00000004-0000000a", 0, 0, {"model": b"weights"})
    assert list_generations(folder) == [], "another user may have put anything there"
    assert read_generation(folder, "00000004-0000000a") is None


def test_a_link_is_no_folder_of_copies(tmp_path: Path) -> None:
    folder = MARK.folder(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is no folder of this user"):
        make_private_folder(folder)


def test_folders_of_other_starts_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = Marker.after(MARK, tmp_path).folder(tmp_path)
    for each in (MARK.folder(tmp_path), earlier, Marker.after(None, tmp_path).folder(tmp_path)):
        make_private_folder(each)
    assert MARK.others(tmp_path) == [earlier]
    monkeypatch.setattr(os, "getuid", lambda: earlier.stat().st_uid + 1)
    assert MARK.others(tmp_path) == [], "of another user"


def test_the_output_folder_says_where_copies_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_marker(tmp_path) is None
    mark = Marker.after(None, tmp_path)
    write_marker(tmp_path, mark)
    assert read_marker(tmp_path) == mark
    bad = mark._asdict() | {"start_id": "../../home"}, mark._asdict() | {"start_id": 3}, {}, []
    for content in map(json.dumps, bad):
        (tmp_path / MARKER).write_text(content)
        assert read_marker(tmp_path) is None
    assert not caplog.records
    caplog.set_level("INFO", logger="trainer_kit")
    (tmp_path / MARKER).write_text("{")
    assert read_marker(tmp_path) is None
    assert "copies in memory are not looked for" in caplog.text
    write_marker(tmp_path, mark)
    give_up_copies(tmp_path)
    later = read_marker(tmp_path)
    assert later is not None
    assert later.folder_id == mark.folder_id, "so that the next start finds what to remove"
    assert later.start_id != mark.start_id
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert read_marker(tmp_path / "copy") is None
    assert f"copies in memory belong to {tmp_path.resolve()}, not to" in caplog.text
    remove_marker(tmp_path)
    remove_marker(tmp_path)
    give_up_copies(tmp_path)
    assert not (tmp_path / MARKER).exists()


def test_a_folder_may_hold_the_state_of_a_run(tmp_path: Path) -> None:
    assert not has_state(tmp_path / "missing")
    write_marker(tmp_path, Marker.after(None, tmp_path))
    assert has_state(tmp_path)
    remove_marker(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    assert has_state(tmp_path)


def test_names_of_folders_are_read_as_they_are_made(tmp_path: Path) -> None:
    (tmp_path / folder_name("00000012-89abcdef", 3, 14)).mkdir()
    assert [name for name, _ in generations.folders_of(tmp_path)] == ["00000012-89abcdef"]
