"""The table of other packages shows the versions that setup.cfg and constraints.txt name."""

from __future__ import annotations

from site_builder.packages import packages, tried


def test_each_package_has_its_oldest_and_newest_version() -> None:
    rows = [line.strip("| ").split(" | ") for line in packages().splitlines()[2:]]
    versions = {name.strip("`"): (oldest, newest) for name, oldest, newest in rows}
    assert {"torch", "transformers", "torchao", "peft", "datasets", "wandb"} <= versions.keys()
    assert versions["torch"] == ("2.9", tried()["torch"])
    assert versions["transformers"][0] == "5.4"
    assert versions["ray"] == ("2.51", tried()["ray"])  # written with the names of its own extras


def test_the_newer_of_two_lines_counts() -> None:
    assert tried()["transformers"] != "5.20.2"
