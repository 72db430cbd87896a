"""What the tests of the site share: its builder can be imported, and the site is built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the extra docs")
pytest.importorskip("zensical", reason="needs the extra docs")
sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without a problem."""
    from site_builder.build import build

    folder = tmp_path_factory.mktemp("docs")
    assert build(folder) == []
    return folder / "site"
