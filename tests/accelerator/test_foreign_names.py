"""Each public name of accelerate can be imported from the module in which accelerate has it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest

from trainer_kit.accelerator import foreign_names

if not accelerate.__version__.startswith("1.15."):
    pytest.skip("the names are compared with those of accelerate 1.15", allow_module_level=True)

NOT_FOR_SCRIPTS = {"ProfilerActivity", "logger", "np_core", "torch_version"}


def modules() -> list[str]:
    """accelerate's modules that scripts import names from; `rich` needs a package of that name."""
    found = [
        each.name.removeprefix("accelerate.") for each in pkgutil.walk_packages(accelerate.__path__, "accelerate.")
    ]
    return [name for name in found if not name.startswith(("commands", "test_utils")) and name != "utils.rich"]


def defined(statements: list[ast.stmt]) -> Iterator[str]:
    """The functions, classes and constants that a module defines."""
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.If(body=body, orelse=orelse) | ast.Try(body=body, orelse=orelse):
                yield from defined([*body, *orelse])


def public(module: Any) -> list[str]:
    own = [*defined(ast.parse(inspect.getsource(module)).body)]
    imported = [
        name
        for name, value in vars(module).items()
        if str(getattr(value, "__module__", "")).startswith("accelerate.") and not inspect.ismodule(value)
    ]
    names = dict.fromkeys([*own, *imported])
    return [name for name in names if not name.startswith("_") and hasattr(module, name)]


@pytest.mark.filterwarnings("ignore:memory_utils has been reorganized")
@pytest.mark.parametrize("name", modules())
def test_each_name_of_a_module_is_found(name: str) -> None:
    theirs = importlib.import_module(f"accelerate.{name}")
    ours = importlib.import_module(f"trainer_kit.accelerator.{name}")
    assert [each for each in public(theirs) if each not in NOT_FOR_SCRIPTS and not hasattr(ours, each)] == []


def test_each_name_of_the_package_is_found() -> None:
    ours = importlib.import_module("trainer_kit.accelerator")
    assert [each for each in public(accelerate) if not hasattr(ours, each)] == []


def test_constants_have_accelerate_s_values() -> None:
    theirs = importlib.import_module("accelerate.utils.constants")
    ours = importlib.import_module("trainer_kit.accelerator.utils.constants")
    assert {name: getattr(ours, name) for name in ours.__all__} == {
        name: getattr(theirs, name) for name in ours.__all__
    }


def test_what_is_refused_says_what_to_do() -> None:
    from trainer_kit.accelerator.commands.launch import launch_command  # type: ignore[import-not-found]
    from trainer_kit.accelerator.hooks import add_hook_to_module  # type: ignore[import-not-found]

    from trainer_kit.accelerator.data_loader import BatchSamplerShard  # type: ignore[attr-defined]

    for refused, message in (
        (launch_command, "launch_command: .*use the command `trainer-kit`"),
        (BatchSamplerShard, r"BatchSamplerShard: .*prepare\(\) divides the batches"),
        (add_hook_to_module, "add_hook_to_module: .*register_forward_pre_hook"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert importlib.import_module("trainer_kit.accelerator.data_loader").BatchSamplerShard is BatchSamplerShard


@pytest.mark.parametrize("module", ["utils.modeling", "optimizer", "state", "commands.launch"])
def test_a_name_that_accelerate_does_not_have_is_an_import_error(module: str) -> None:
    with pytest.raises(AttributeError, match=f"'trainer_kit.accelerator.{module}' has no attribute '_nonsense'"):
        getattr(importlib.import_module(f"trainer_kit.accelerator.{module}"), "_nonsense")  # noqa: B009
    if module != "commands.launch":
        with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
            exec(f"from trainer_kit.accelerator.{module} import nonsense")


@pytest.mark.slow
def test_modules_are_there_from_the_first_import() -> None:
    code = "from trainer_kit.accelerator.utils.fsdp_utils import save_fsdp_model as f; print(f.__name__)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
        == "save_fsdp_model\n"
    )


def test_no_module_is_listed_twice() -> None:
    names = [*foreign_names._REAL, *foreign_names._OTHERS, *foreign_names._COMMANDS]
    assert len(names) == len(set(names))


def test_tqdm_is_the_function_from_wherever_it_is_imported() -> None:
    from trainer_kit.accelerator.utils.tqdm import tqdm as of_its_module

    from trainer_kit.accelerator.utils import tqdm

    assert of_its_module is tqdm
    assert [*tqdm(range(3), disable=True)] == [0, 1, 2]
