"""The package's front, what importing it costs, and what its archives hold."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import trainer_kit
import trainer_kit.callbacks

ROOT = Path(__file__).parent.parent
HEAVY = ("transformers", "tensorboard", "torch_xla")
# The protocol of everything that a checkpoint keeps; `Stateful` tells what they mean.
PROTOCOL = {"state_dict", "load_state_dict"}


def python(script: str, *arguments: str, cwd: Path | None = None, path: Path | None = None) -> str:
    """What `script` prints in a fresh process, which must end well."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> list[str]:
    """The names of all modules of the package."""
    names = (info.name for info in pkgutil.walk_packages(trainer_kit.__path__, "trainer_kit."))
    return ["trainer_kit", *(name for name in names if not name.endswith(".__main__"))]  # which would start


@pytest.mark.parametrize("name", trainer_kit.__all__)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(trainer_kit, name) is not None
    assert name in dir(trainer_kit)


@pytest.mark.parametrize("package", [trainer_kit, trainer_kit.callbacks], ids=lambda package: str(package.__name__))
def test_all_is_complete(package: Any) -> None:
    """`__all__` holds exactly what type checkers see: the imports under TYPE_CHECKING and the public definitions."""
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) == typed_names(ast.parse(inspect.getsource(package)), package)


def typed_names(tree: ast.Module, package: Any) -> set[str]:
    """The public functions of a package's front and what it imports from its own modules, under TYPE_CHECKING too."""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    is_front = package is trainer_kit
    guarded = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    for node in [*tree.body, *guarded]:
        if isinstance(node, ast.ImportFrom) and (node.level or (is_front and node.module.startswith("trainer_kit"))):
            names |= {alias.name for alias in node.names}
    return names


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'") as caught:
        _ = trainer_kit.Trainr
    assert caught.value.name == "Trainr"  # from which Python makes its "Did you mean"
    assert not hasattr(trainer_kit, "Trainr")


@pytest.mark.parametrize(
    "name", ["EarlyStoppingCallback", "Seq2SeqTrainer", "Seq2SeqTrainingArguments", "TrainerCallback"]
)
def test_importing_a_name_of_transformers_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'trainer_kit': use "):
        exec(f"from trainer_kit import {name}")


def test_every_module_has_a_docstring() -> None:
    without = [name for name in modules() if not importlib.import_module(name).__doc__]
    assert without == []


@pytest.mark.parametrize("name", sorted({*trainer_kit.__all__} - {"__version__", "callbacks"}))
def test_what_is_public_has_a_docstring(name: str) -> None:
    """A method that overrides another may leave the telling to it."""
    thing = getattr(trainer_kit, name)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    public = [key for key, value in members if callable(value) and not key.startswith("_") and key not in PROTOCOL]
    assert inspect.getdoc(thing)
    assert [key for key in public if not inspect.getdoc(getattr(thing, key))] == []


@pytest.mark.slow
def test_importing_is_cheap() -> None:
    """The front imports not even torch; the Trainer and its arguments none of the heavy packages."""
    script = (
        "import sys, json, trainer_kit\n"
        "before = 'torch' in sys.modules\n"
        "trainer_kit.Trainer, trainer_kit.TrainingArguments, trainer_kit.Callback, trainer_kit.callbacks\n"
        "print(json.dumps([before, [name for name in sys.argv[1:] if name in sys.modules]]))"
    )
    assert json.loads(python(script, *HEAVY)) == [False, []]


@pytest.mark.slow
@pytest.mark.parametrize("prepare", ["gc.enable()", "gc.disable()"])
def test_an_import_sets_off_no_garbage_collection_and_leaves_the_setting(prepare: str) -> None:
    script = (
        f"import torch, gc, trainer_kit; {prepare}; before, collections = gc.isenabled(), gc.get_stats(); "
        "trainer_kit.Trainer; trainer_kit.callbacks; "
        "assert gc.isenabled() == before; "
        "print([now['collections'] - then['collections'] for now, then in zip(gc.get_stats(), collections)][2])"
    )
    assert python(script) == "0\n"


@pytest.mark.slow
def test_no_module_imports_a_heavy_package() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[4:]:\n"
        "    importlib.import_module(name)\n"
        "print([name for name in sys.argv[1:4] if name in sys.modules])"
    )
    adapter = "trainer_kit.callbacks.transformers_arguments"  # its class is a subclass of one of transformers
    assert python(script, *HEAVY, *(name for name in modules() if name != adapter)).strip() == "[]"


@pytest.fixture(params=["link", "text file", "no link"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what the archives are made of, with the three forms that the link to the callbacks can have."""
    names = ("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md")
    if not all((ROOT / name).exists() for name in names[:-1]):
        pytest.skip("needs a checkout")
    copy = tmp_path / "checkout"
    no_caches = shutil.ignore_patterns("__pycache__")
    package = Path(trainer_kit.__file__).parent
    shutil.copytree(package, copy / "trainer_kit", ignore=shutil.ignore_patterns("__pycache__", "callbacks"))
    shutil.copytree(Path(trainer_kit.callbacks.__file__).parent, copy / "callbacks", ignore=no_caches)
    for name in names:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    link = copy / "trainer_kit" / "callbacks"
    if request.param == "link":
        link.symlink_to("../callbacks", target_is_directory=True)
    elif request.param == "text file":
        link.write_text("../callbacks")
    return copy


def build(kind: str, source: Path, target: Path) -> Path:
    """Builds the "wheel" or "sdist" of `source` as pip does, without fetching anything."""
    target.mkdir()
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    python(script, str(target), cwd=source)
    (archive,) = target.iterdir()
    return archive


def modules_in(names: Iterable[str]) -> list[str]:
    """The modules among the files of an archive, the mark that they are typed, and style sheets."""
    return sorted(name for name in names if name.endswith((".py", "py.typed", ".css")))


@pytest.mark.slow
def test_archives_hold_the_whole_package_once(checkout: Path, tmp_path: Path) -> None:
    files = {path.relative_to(checkout / "trainer_kit") for path in (checkout / "trainer_kit").rglob("*")}
    files |= {path.relative_to(checkout) for path in (checkout / "callbacks").rglob("*")}
    expected = modules_in(f"trainer_kit/{path.as_posix()}" for path in files)
    sdist = build("sdist", checkout, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        held = [name.partition("/")[2] for name in archive.getnames()]
        assert held.count("trainer_kit/callbacks/__init__.py") + held.count("callbacks/__init__.py") == 1
        # Python before 3.10.12 and 3.11.4 knows no filters, later ones warn without one.
        archive.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    for number, source in enumerate([checkout, unpacked]):
        wheel = build("wheel", source, tmp_path / f"wheel {number}")
        assert wheel.name.startswith(f"trainer_kit-{trainer_kit.__version__}-")
        with zipfile.ZipFile(wheel) as archive:
            assert modules_in(archive.namelist()) == expected
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            shown_by_an_index = archive.read(metadata).decode().partition("\n\n")[2]
            assert "The loss is exact" in shown_by_an_index or not (source / "README.md").exists()
            assert "](docs/" not in shown_by_an_index
            archive.extractall(tmp_path / f"installed {number}")
        script = "import trainer_kit.callbacks as c; print(c.__file__); c.Memory; import trainer_kit.cli.main"
        shown = python(script, cwd=tmp_path, path=tmp_path / f"installed {number}")
        assert str(tmp_path / f"installed {number}") in shown
