"""The tutorials' commands print and plot what the pages show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from site_builder import includes, recording
from site_builder.recording import ProcessFailed, Step, changes, main, output_of, pages, record, steps

PAGE = """# First

```sh
pip install nothing
```

```sh
echo "loss 0.5"
mkdir runs
```

::: output: train

```sh
ls
```

::: output: there
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tutorial in a folder of its own."""
    path = tmp_path / "pages" / "first.md"
    path.parent.mkdir()
    path.write_text(PAGE)
    monkeypatch.setattr(recording, "FOLDERS", (path.parent,))
    monkeypatch.setattr(recording, "recorded_file", lambda page, name: tmp_path / "recorded" / page / name)
    return path


def test_commands_with_an_output_are_steps() -> None:
    first, second = steps(PAGE)
    assert first == Step("train", 'echo "loss 0.5"\nmkdir runs\n')
    assert second.name == "there"


def test_names_of_the_interpreter_are_one(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    commands = "".join(f"echo {folder}/{name} -m module\n" for name in ("python", "python3", "python3.11"))
    assert output_of(Step("names", commands), tmp_path) == 3 * "python -m module\n"


def test_what_was_recorded_is_compared(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recorded" / "first"
    folder.mkdir(parents=True)
    (folder / "old.txt").touch()
    record("first")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "train.txt": "loss 0.5\n",
        "there.txt": "benchmarks\nexamples\nruns\n",
    }
    made = {"train.txt": "loss 0.5001\n", "there.txt": "benchmarks\nexamples\nruns\n"}
    assert changes("first", made) == []
    assert changes("first", made | {"train.txt": "loss 0.7"}) == ["train.txt: recorded 'loss 0.5', now 'loss 0.7'"]
    assert changes("first", {"train.txt": "loss 0.5", "new.txt": ""}) == [
        "new.txt is not recorded", "there.txt is not made any more",
    ]  # fmt: skip


def test_a_command_that_fails_leaves_the_record(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("first")
    page.write_text(PAGE.replace("mkdir runs", "echo so; false"))
    with pytest.raises(ProcessFailed, match=r"exits with code 1\nloss 0\.5\nso"):
        record("first")
    assert main(["first"]) == 1
    assert "scripts/tutorials: first: " in capsys.readouterr().err
    assert (tmp_path / "recorded" / "first" / "train.txt").read_text() == "loss 0.5\n"


def test_an_unknown_page_is_refused(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["second"])
    assert "second is no page with recorded outputs; use first" in capsys.readouterr().err


def test_a_plot_has_the_colours_of_the_style_sheet() -> None:
    from trainer_kit.report.colours import DARK, LIGHT

    sheet = (Path(recording.__file__).parent / "theme" / "assets" / "site.css").read_text()
    blocks = [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in re.findall(r"\.plot {(.*?)}", sheet, re.S)]
    light, dark = [block for block in blocks if block]
    for colours, expected in ((light, LIGHT), (dark, DARK)):
        assert colours == {role: expected[role] for role in colours}
    used = {
        role
        for path in (recording.ROOT / "docs" / "recorded").rglob("*.svg")
        for role in re.findall(r"var\(--([\w-]+)\)", path.read_text())
    }
    assert used
    assert used <= {*light} == {*dark}


# Their model learns from Python's own documentation, which each release changes.
PYTHON_OF_THE_PROSE = (3, 11)
OF_PROSE = ("larger-than-a-card", "pretrain-gpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*pages()} - {"tpu", "comparison"}))  # see tests/xla, tests/benchmarks
def test_a_tutorial_prints_and_plots_what_it_shows(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in OF_PROSE and sys.version_info[:2] != PYTHON_OF_THE_PROSE:
        pytest.skip("recorded with the prose of another Python")
    if name != "first-training":  # whose processes import all by themselves, as a user's do
        request.getfixturevalue("preloaded_python")
    assert changes(name, recording.run(name, tmp_path)) == []


def test_nothing_is_recorded_for_a_page_that_is_gone() -> None:
    folder = includes.recorded_file("", "")
    assert {path.name for path in folder.iterdir()} == {*pages()}


def test_the_memory_of_a_step_is_drawn_from_its_table() -> None:
    shown = (
        "                  memory     measured  per weight  what\n"
        "weights           42 MiB       43 MiB      4.00 B  the model's parameters\n"
        "optimizer          1 GiB       84 MiB      8.00 B  the state of the optimizer\n"
        "peak             1.1 GiB    180.1 MiB     16.91 B  of a step\n"
    )
    said = (
        "The memory of a step. estimated: weights 42 MiB, optimizer 1.02e+03 MiB. measured: weights 43 MiB, "
        "optimizer 84 MiB."
    )
    assert f'aria-label="{said}"' in recording._memory(shown)
