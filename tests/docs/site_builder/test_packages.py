"""The table of other packages shows the versions that setup.cfg and constraints.txt name."""

from __future__ import annotations

import configparser
import re

from site_builder.packages import ROOT, packages, tried


def test_each_package_has_its_oldest_and_newest_version() -> None:
    rows = [line.strip("| ").split(" | ") for line in packages().splitlines()[2:]]
    versions = {name.strip("`"): (oldest, newest) for name, oldest, newest in rows}
    assert {"torch", "transformers", "torchao", "peft", "datasets", "wandb"} <= versions.keys()
    assert versions["torch"] == ("2.9", tried()["torch"])
    assert versions["transformers"][0] == "5.4"
    assert versions["numpy"] == ("1.26", tried()["numpy"])  # of the oldest Python that has a bound of its own
    assert versions["accelerate"] == ("1.15", tried()["accelerate"])  # the benchmarks take older ones too
    assert versions["ray"] == ("2.51", tried()["ray"])  # written with the names of its own extras


def test_the_table_has_each_package_that_the_tests_try_the_library_with() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    wanted = re.findall(r"^([\w-]+)", setup["options.extras_require"]["ecosystem"], re.MULTILINE)
    assert len(wanted) > 15
    assert not [name for name in wanted if f"| `{name}` |" not in packages()]


def test_pages_lead_to_the_table() -> None:
    assert "::: from-code: packages" in (ROOT / "docs/en/coming-from/index.md").read_text(encoding="utf-8")
    link = "coming-from/index.md#versions-of-other-packages"
    for page in ("docs/en/reference/index.md", "CONTRIBUTING.md"):
        assert link in (ROOT / page).read_text(encoding="utf-8")


def test_the_newer_of_two_lines_counts() -> None:
    assert tried()["transformers"] != "5.20.2"
