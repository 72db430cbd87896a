"""What the tests of the site share: its builder can be imported, and the site is built once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("griffe", reason="needs the extra docs")
pytest.importorskip("zensical", reason="needs the extra docs")
sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without a problem; the processes of a test run share it."""
    from site_builder.build import build

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site_of_docs"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "problems").exists():
            problems = build(folder)
            (folder / "problems").write_text("\n".join(problems))
    assert (folder / "problems").read_text() == ""
    return folder / "site"
