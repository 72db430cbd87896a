from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.utils import run_log
from trainer_kit.utils.run_log import FORMAT, LogFile, read_log


def write(path: Path, *records: dict[str, Any] | str) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def at(step: int, event: str = "log", **values: Any) -> dict[str, Any]:
    return {"event": event, "time": 1.7e9 + step, "step": step, **values}


def test_work_after_a_checkpoint_is_found(tmp_path: Path) -> None:
    """Of two starts that both resumed from step 6, and a pause of 5 s between them."""
    change = at(8, "membership", number=2)
    path = write(
        tmp_path / "log.jsonl", at(0, "start"), at(5), at(6, "save"), at(8), change | {"time": 1.7e9 + 8.5}, at(9),
        at(6, "start") | {"time": 1.7e9 + 15, "began": 1.7e9 + 14}, at(7) | {"time": 1.7e9 + 17},
    )  # fmt: skip
    work = run_log.logged_after(path, 1.7e9 + 6, 6)
    assert (work.seconds, work.steps) == (3 + 3, 3 + 1)
    assert [each["number"] for each in work.memberships] == [2]
    assert run_log.logged_after(path, 1.7e9 + 99, 6) == (0.0, 0, [])
    assert run_log.logged_after(tmp_path / "none.jsonl", 0.0, 6) == (0.0, 0, [])


def test_a_rollback_is_no_work_done_again_by_a_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", at(8), at(6, "rollback") | {"time": 1.7e9 + 9}, at(10))
    assert run_log.logged_after(path, 1.7e9 + 5, 5).steps == 4


def test_only_the_newest_way_through_the_steps_stands(tmp_path: Path) -> None:
    """Against the rule said plainly: a start or a rollback takes away what is there of later steps."""
    chance, records, plain = random.Random(0), [], []
    for number in range(3000):
        event = chance.choices(["log", "save", "start", "rollback"], [90, 5, 3, 2])[0]
        records.append(at(chance.randrange(100) if event != "log" else number % 100, event, number=number))
        if event in ("start", "rollback"):
            plain = [earlier for earlier in plain if earlier["step"] <= records[-1]["step"]]
        plain.append(records[-1])
    assert read_log(write(tmp_path / "log.jsonl", *records)) == plain


@pytest.mark.parametrize("piece", [1, 200, 2**20])
def test_pieces_of_any_size_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    records = [at(step, text="ä" * (step % 50)) for step in range(100)]
    path = write(tmp_path / "log.jsonl", *records)
    monkeypatch.setattr(run_log, "_PIECE", piece)
    assert [record for piece in LogFile(path).pieces() for record in piece] == records


def test_the_quick_parser_and_that_of_the_library_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": "nan", "b": 1e-300, "c": 2**70, "d": [1, {"e": None}], "f": "\ud800", "g": 0.1 + 0.2, "h": -0.0}
    path = write(tmp_path / "log.jsonl", at(1), at(2, **values), at(3))
    quick = read_log(path)
    monkeypatch.setattr(run_log, "_loads", json.loads)
    plain = read_log(path)
    assert repr(quick) == repr(plain)
    assert math.isnan(quick[1].pop("a"))
    assert quick[1].pop("f") == "\ud800"
    assert quick[1]["c"] == 2**70


def test_lines_that_were_cut_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", at(0, "start"), at(1), '{"event": "lo', at(0, "start"), at(1))
    with path.open("a") as file:
        file.write('{"event": "log", "time": 17')
    found = LogFile(path)
    assert [record["step"] for piece in found.pieces() for record in piece] == [0, 1, 0, 1]
    assert found.cut == [3, 6]


def test_two_damaged_lines_are_no_kill(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", at(0, "start"), '{"event"', '{"event"', at(0, "start"))
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 is no record of a run; repair or remove that line"):
        read_log(path)


def test_a_record_over_two_lines_is_damage(tmp_path: Path) -> None:
    """Joined by a comma the two halves would be one record."""
    path = write(tmp_path / "log.jsonl", at(0, "start"), '{"event": "log", "step": 1', '"loss": 2}', at(2))
    with pytest.raises(ValueError, match="line 2 "):
        read_log(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", at(0, "start", format=FORMAT + 1, trainer_kit="9.0"), at(1))
    with pytest.raises(
        ValueError, match=rf"format {FORMAT + 1}, written by trainer_kit 9\.0.* install a newer"
    ) as caught:
        read_log(path)
    assert str(caught.value).count(";") == 1
    assert read_log(write(path, at(0, "start", format=FORMAT), at(1)))
    assert read_log(write(path, at(0, "start"), at(1)))  # from before there were versions
