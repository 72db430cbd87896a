"""Where the packages lie; everything else stands in setup.cfg."""

from pathlib import Path

from setuptools import find_packages, setup

# The callbacks are a folder of their own, linked into the package. A checkout without symbolic links
# (Windows as it is installed) holds a small text file in the link's place; the package is then mapped to the folder.
package_dir = {"": "."}
if not (Path(__file__).parent / "trainer_kit" / "callbacks").is_dir():
    package_dir["trainer_kit.callbacks"] = "callbacks"

packages = {*find_packages(include=["trainer_kit", "trainer_kit.*"]), "trainer_kit.callbacks"}
setup(package_dir=package_dir, packages=sorted(packages))
