"""`trainer-kit checkpoints`: what it says, its exit codes, and what it removes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer_states import trainer_state

from trainer_kit.checkpoint import take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.json_files import checksum
from trainer_kit.checkpoint.format.manifest import FileEntry, Manifest, _content_checksum
from trainer_kit.cli.main import main

METRICS = {10: 0.5, 20: 0.25, 30: 0.75, 40: None}


def save(run: Path, step: int, name: str | None = None, value: float = 1.0, run_id: str = "run") -> Path:
    committed = [
        [f"checkpoint-{each}", number, METRICS[each]] for number, each in enumerate(METRICS, 1) if each <= step
    ]
    best: tuple[float, int] | tuple[None, None] = (0.25, 20) if step >= 20 else (None, None)
    states = {"trainer": trainer_state(step, committed, run_id, best)}
    arguments: dict[str, Any] = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "seed": 1}
    snapshot = take_snapshot(step, {"w": torch.full((300,), value)}, states, arguments=arguments)
    return write_checkpoint(run, snapshot, name=name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 10 to 40; the last one is damaged."""
    for step in METRICS:
        save(tmp_path / "run", step)
    path = tmp_path / "run" / "checkpoint-40" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return tmp_path / "run"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `trainer-kit checkpoints` in a wide terminal; gives the exit code and all that was printed."""
    monkeypatch.setenv("COLUMNS", "1000")

    def tell(*words: Any) -> tuple[int, str]:
        code = main(["checkpoints", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return tell


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_ls_shows_what_is_there(run: Path, told: Any) -> None:
    save(run, 25, name="crash-25")
    save(run, 25, name="crash-25-rank-1")
    save(run / "earlier-1", 10)
    code, text = told("ls", run)
    lines = text.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[1:5]] == [f"checkpoint-{step}" for step in METRICS]
    assert lines[1].endswith("  valid")
    assert lines[2].endswith("  valid, the best (eval_loss 0.25)")
    assert "invalid: model.safetensors is truncated: " in lines[4]
    assert lines[5].startswith("4 checkpoints, 3 valid, ")
    assert lines[5].endswith("training would resume from checkpoint-30")
    assert lines[6:] == ["also there: crash-25, crash-25-rank-1, earlier-1 (1 checkpoint)"]


def test_ls_does_not_believe_a_damaged_state(run: Path, told: Any) -> None:
    path = run / "checkpoint-40" / "state" / "trainer.json"
    path.write_bytes(path.read_bytes().replace(b'"best_step": 20', b'"best_step": 10'))
    assert next(line for line in told("ls", run)[1].splitlines() if "best" in line).startswith("checkpoint-20 ")


def test_ls_quick_reads_no_weights(run: Path, told: Any) -> None:
    path = run / "checkpoint-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert "checksum" in told("ls", run)[1]
    text = told("ls", "--quick", run)[1]
    assert "checksum" not in text
    assert text.count("sizes right") == 3
    assert text.count("invalid: model.safetensors is truncated") == 1


def test_ls_goes_on_where_a_run_removes_one_meanwhile(run: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [run / f"checkpoint-{step}" for step in (5, *METRICS)]
    monkeypatch.setattr("trainer_kit.checkpoint.format.inventory.find_checkpoints", lambda folder, prefix: found)
    code, text = told("ls", run)
    assert (code, text.count("valid, ")) == (0, 2)
    assert "invalid: does not exist" in text


def test_rows_fit_a_terminal(run: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, told("ls", run)[1].splitlines())) <= 80


def test_verify_tells_of_each_and_fails_where_one_is_damaged(run: Path, told: Any) -> None:
    code, text = told("verify", run)
    assert code == 1
    assert text.count(": valid, 3 files, ") == 3
    assert "checkpoint-40: invalid: model.safetensors is truncated" in text
    assert told("verify", run / "checkpoint-40")[0] == 1
    assert told("verify", run / "checkpoint-10")[0] == 0
    (run / "checkpoint-10" / "manifest.json").unlink()
    assert "checkpoint-10: invalid: has no manifest.json" in told("verify", run / "checkpoint-10")[1]


def test_verify_takes_any_folder_with_a_manifest(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, name="final")
    save(tmp_path, 10, name="checkpoint_3")
    assert told("verify", tmp_path / "final") == (0, told("verify", tmp_path / "final")[1])
    assert told("verify", tmp_path)[1].startswith("checkpoint_3: valid")
    monkeypatch.chdir(tmp_path / "checkpoint_3")
    assert told("verify", ".")[1].startswith("checkpoint_3: valid")


def test_diff_of_equal_ones(run: Path, told: Any) -> None:
    code, text = told("diff", run / "checkpoint-10", run / "checkpoint-10")
    assert code == 0
    assert text.splitlines()[-1] == "equal: 1 tensor bit for bit, and all other values"


def test_diff_names_what_differs(run: Path, tmp_path: Path, told: Any) -> None:
    code, text = told("diff", run / "checkpoint-10", save(tmp_path / "other", 20, value=1.5))
    assert code == 1
    assert "1 of 1 tensor differ" in text
    assert "      0.5     0.333            300 of 300  model: w" in text
    assert "state/trainer: counters.step  10 -> 20" in text
    assert "\nA  " in f"\n{text}"
    assert "step 20, 1 process, torch" in text


def test_diff_shows_the_first_differences_or_all(tmp_path: Path, told: Any) -> None:
    weights = {f"w{number}": torch.zeros(2) for number in range(30)}
    a, b = (
        write_checkpoint(
            tmp_path / str(shift),
            take_snapshot(
                1, {name: each + shift for name, each in weights.items()}, {}, arguments={"many": [shift] * 9}
            ),
        )
        for shift in (0, 1)
    )
    text = told("diff", a, b)[1]
    assert text.count("model: w") == 20
    assert "… and 10 more (--all shows them)" in text
    assert "arguments: many  9 of 9 items differ" in text
    text = told("diff", "--all", a, b)[1]
    assert text.count("model: w") == 30
    assert "more" not in text


def test_diff_of_one_that_cannot_be_read_ends_otherwise(run: Path, told: Any) -> None:
    code, text = told("diff", run / "checkpoint-10", run / "checkpoint-40")
    assert code == 2
    assert "model.safetensors is truncated" in text
    assert told("diff", run / "checkpoint-10", run / "checkpoint-11")[0] == 2


@pytest.mark.parametrize(
    ("words", "stay"),
    [
        (["--keep", "1"], (20, 30, 40)),
        (["--keep", "1", "--keep-best", "2"], (10, 20, 30, 40)),
        (["--keep", "1", "--damaged"], (20, 30)),
        (["--keep", "1", "--keep-every", "1"], (10, 20, 30, 40)),
        (["--keep", "3", "--damaged"], (10, 20, 30)),
    ],
)
def test_prune_keeps_what_the_run_would_keep(run: Path, told: Any, words: Sequence[str], stay: Sequence[int]) -> None:
    before = names(run)
    code, text = told("prune", run, *words, "--dry-run")
    assert (code, names(run)) == (0, before)
    expected = [f"checkpoint-{step}" for step in stay]
    assert f"freed; {len(stay)} stay: {', '.join(expected)}\n" in text
    assert text.count("would be removed, ") == len(before) - len(stay)
    code, text = told("prune", run, *words)
    assert (code, names(run)) == (0, expected)
    assert text.count(": removed, ") == len(before) - len(stay)
    assert text.count("checkpoint-40: left, invalid: ") == int("--damaged" not in words)


def test_prune_does_not_count_a_damaged_one(run: Path, told: Any) -> None:
    (run / "checkpoint-20" / "arguments.json").unlink()
    code, text = told("prune", run, "--keep", "1")
    assert (code, names(run)) == (0, [f"checkpoint-{step}" for step in METRICS])
    assert "checkpoint-20: left, invalid: arguments.json is missing" in text


def test_prune_leaves_what_the_run_did_not_commit(run: Path, told: Any) -> None:
    save(run, 10, name="checkpoint-15")
    assert told("prune", run, "--keep", "1")[0] == 0
    assert names(run) == ["checkpoint-15", "checkpoint-20", "checkpoint-30", "checkpoint-40"]


def test_prune_tells_of_a_process_that_is_writing(run: Path, told: Any) -> None:
    (run / f".staging-checkpoint-50-{os.getppid()}").mkdir()
    assert "a process is writing here (.staging-checkpoint-50-" in told("prune", run, "--keep", "1")[1]


def test_prune_leaves_what_a_trainer_did_not_write(tmp_path: Path, told: Any) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, take_snapshot(step, {}, {"trainer": {"step": step}}, arguments={}))
    code, text = told("prune", tmp_path, "--keep", "1")
    assert (code, names(tmp_path)) == (1, ["checkpoint-1", "checkpoint-2"])
    assert "holds no valid checkpoint of a Trainer" in text
    assert told("ls", tmp_path)[0] == 0


def test_prune_needs_a_valid_one_of_a_run(run: Path, told: Any) -> None:
    for step in (10, 20, 30):
        (run / f"checkpoint-{step}" / "manifest.json").unlink()
    before = names(run)
    code, text = told("prune", run, "--keep", "1", "--damaged")
    assert (code, names(run)) == (1, before)
    assert "holds no valid checkpoint of a Trainer; nothing is removed" in text


@pytest.mark.parametrize("action", [("ls",), ("verify",), ("prune", "--keep", "2")])
def test_a_folder_without_checkpoints(action: Sequence[str], tmp_path: Path, told: Any) -> None:
    assert told(*action, tmp_path / "nowhere") == (
        1,
        f"trainer-kit checkpoints: {tmp_path / 'nowhere'} does not exist; give the output_dir of a run, or one of its "
        "checkpoints\n",
    )
    code, text = told(*action, tmp_path)
    assert code == 1
    assert text.startswith(f"trainer-kit checkpoints: {tmp_path} holds no checkpoints; ")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_prune_refuses_numbers_that_make_no_sense(number: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoints", "prune", str(run), "--keep", number])
    assert left.value.code == 2
    assert "--keep" in capsys.readouterr().err


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom trainer_kit.cli.main import main\n"
        "try:\n    main(['checkpoints', '--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "prune" in done.stdout


def test_prune_leaves_what_is_not_the_runs(run: Path, told: Any) -> None:
    shutil.rmtree(run / "checkpoint-10")
    save(run, 10, run_id="another")
    foreign = run / "checkpoint-15"  # transformers writes such ones
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"x")
    newer = save(run, 35)
    manifest = json.loads((newer / "manifest.json").read_text())
    del manifest["checksum"]
    content = manifest | {"format_version": 1}
    (newer / "manifest.json").write_text(json.dumps(content | {"checksum": _content_checksum(content)}))
    code, text = told("prune", run, "--keep", 1, "--keep-best", 1, "--damaged")
    assert code == 0
    assert names(run) == [f"checkpoint-{step}" for step in (10, 15, 20, 30, 35)]
    assert "checkpoint-15: left, invalid" in text
    assert "checkpoint-35: left, invalid" in text


def test_a_run_in_a_folder_that_is_named_like_a_checkpoint(run: Path, told: Any) -> None:
    renamed = run.rename(run.with_name("checkpoint-3"))
    assert "checkpoint-20" in told("ls", renamed)[1]


def test_a_crash_is_nothing_that_a_resume_goes_on_from(tmp_path: Path, told: Any) -> None:
    save(tmp_path, 25, name="crash-25")
    code, text = told("ls", tmp_path)
    assert code == 0
    assert text.splitlines()[-1].startswith("1 crash, 1 valid, ")
    assert text.splitlines()[-1].endswith("; none to resume from")


def test_the_run_that_holds_the_folder_is_named(run: Path, told: Any) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from trainer_kit.utils.run_lock import RunLock\n"
         "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()", str(run)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    assert f"(process {held.pid}), since 20" in told("ls", run)[1]
    assert f"(process {held.pid}), since 20" in told("prune", run, "--keep", "1")[1]
    held.communicate("", timeout=60)
    assert "in use" not in told("ls", run)[1]


def test_nothing_outside_of_the_folder_is_removed(run: Path, told: Any) -> None:
    outside = save(run.parent / "other", 5)
    shutil.rmtree(run / "checkpoint-10")
    (run / "checkpoint-10").symlink_to(save(run.parent / "elsewhere", 10))
    for name in ("../other/checkpoint-5", str(outside)):
        state = run / "checkpoint-30" / "state" / "trainer.json"
        content = json.loads(state.read_text())
        content["committed"][0][0] = name
        state.write_text(json.dumps(content))
        reseal(run / "checkpoint-30")
        assert "would be freed" in told("prune", run, "--keep", "1", "--dry-run")[1]
        told("prune", run, "--keep", "1", "--keep-best", "1")
        assert (outside / "manifest.json").is_file()
    assert (run.parent / "elsewhere" / "checkpoint-10" / "manifest.json").is_file()


def reseal(checkpoint: Path) -> None:
    """A manifest that says of all files what they are now."""
    before = Manifest.read(checkpoint)
    found = {name: checkpoint / name for name in before.files}
    files = {name: FileEntry(path.stat().st_size, checksum(path)) for name, path in found.items()}
    (checkpoint / "manifest.json").write_text(json.dumps(Manifest.of(files, before.step, before.world_size).to_json()))
