"""The source archive holds what a user of it needs: the package, its tests, documentation and project pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".ci", ".github")
"""Folders that only the repository needs; files whose names begin with a dot are left out too."""


def tracked() -> list[Path]:
    """The files of the repository, relative to its root; links, which the archives follow, are left out."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("needs a checkout")
    paths = [Path(name) for name in done.stdout.split("\0") if name]
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


@pytest.mark.slow
def test_the_source_archive_holds_the_repository(tmp_path: Path) -> None:
    files, copy = tracked(), tmp_path / "checkout"
    for path in files:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy / path)
    (copy / "trainer_kit" / "callbacks").symlink_to("../callbacks", target_is_directory=True)
    script = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    (tmp_path / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr

    [archive] = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as content:
        held = {name.partition("/")[2] for name in content.getnames()}
    wanted = {path.as_posix() for path in files if path.parts[0] not in LEFT_OUT and not path.name.startswith(".")}
    missing = {name for name in wanted - held if f"trainer_kit/{name}" not in held}  # callbacks, through the link
    assert missing == set()
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "docs/en/project/release-notes.md"):
        assert name in held
