"""Where the packages lie, and the README for an index of packages; everything else stands in setup.cfg."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The callbacks are a folder of their own, linked into the package. A checkout without symbolic links
# (Windows as it is installed) holds a small text file in the link's place; the package is then mapped to the folder.
package_dir = {"": "."}
if not (Path(__file__).parent / "trainer_kit" / "callbacks").is_dir():
    package_dir["trainer_kit.callbacks"] = "callbacks"

packages = {*find_packages(include=["trainer_kit", "trainer_kit.*"]), "trainer_kit.callbacks"}

# An index shows the README without the repository's files, so links to them become plain text.
readme = Path(__file__).with_name("README.md")
long_description = readme.read_text(encoding="utf-8") if readme.is_file() else ""
long_description = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", long_description)

setup(
    package_dir=package_dir,
    packages=sorted(packages),
    long_description=long_description,
    long_description_content_type="text/markdown",
)
