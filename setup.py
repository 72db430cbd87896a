"""Where the packages lie; everything else stands in setup.cfg."""

from pathlib import Path

from setuptools import setup

# The callbacks are a folder of their own, linked into the package. A checkout without symbolic links
# (Windows as it is installed) holds a small text file in the link's place; the package is then mapped to the folder.
package_dir = {"": "."}
if not (Path(__file__).parent / "trainer_kit" / "callbacks").is_dir():
    package_dir["trainer_kit.callbacks"] = "callbacks"

setup(
    package_dir=package_dir,
    packages=[
        "trainer_kit",
        "trainer_kit.accelerator",
        "trainer_kit.callbacks",
        "trainer_kit.checkpoint",
        "trainer_kit.checkpoint.format",
        "trainer_kit.cli",
        "trainer_kit.config",
        "trainer_kit.data",
        "trainer_kit.debugging",
        "trainer_kit.launch",
        "trainer_kit.loop",
        "trainer_kit.loss",
        "trainer_kit.memory",
        "trainer_kit.planning",
        "trainer_kit.profiling",
        "trainer_kit.report",
        "trainer_kit.strategies",
        "trainer_kit.strategies.fsdp",
        "trainer_kit.strategies.watchdog",
        "trainer_kit.strategies.xla",
        "trainer_kit.tools",
        "trainer_kit.tools.verify",
        "trainer_kit.trackers",
        "trainer_kit.utils",
    ],
)
