"""What has accelerate's name takes accelerate's arguments: in the same order, with the same defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import pytest
import torch

import trainer_kit
from trainer_kit import accelerator as ours

if not accelerate.__version__.startswith("1.15."):
    pytest.skip("the arguments are compared with those of accelerate 1.15", allow_module_level=True)

GUIDE = Path(__file__).parents[2] / "docs" / "en" / "coming-from" / "accelerate.md"

# Arguments that are left out here, or have another default; docs/en/coming-from/accelerate.md says why.
LEFT_OUT = {
    "load_checkpoint_and_dispatch": {
        "max_memory", "no_split_module_classes", "offload_folder", "offload_buffers", "offload_state_dict",
        "skip_keys", "preload_module_classes", "force_hooks", "full_state_dict", "broadcast_from_rank0",
    },
    "load_checkpoint_in_model": {
        "offload_folder", "dtype", "offload_state_dict", "offload_buffers", "keep_in_fp32_modules", "offload_8bit_bnb",
        "full_state_dict", "broadcast_from_rank0",
    },
}  # fmt: skip
OTHER_DEFAULTS = {
    ("Accelerator.on_local_main_process", "function"),
    ("Accelerator.on_local_process", "local_process_index"),
    ("Accelerator.on_main_process", "function"),
    ("Accelerator.on_process", "process_index"),
    ("DistributedDataParallelKwargs", "bucket_cap_mb"),
    ("DistributedDataParallelKwargs", "gradient_as_bucket_view"),
    ("GradientAccumulationPlugin", "num_steps"),
    ("load_checkpoint_in_model", "strict"),
    ("notebook_launcher", "rdzv_id"),
    ("notebook_launcher", "use_port"),
}
STAND_IN = {
    ("DistributedDataParallelKwargs", "comm_hook"),
    ("DistributedDataParallelKwargs", "comm_wrapper"),
    ("Accelerator", "split_batches"),
    ("write_basic_config", "save_location"),
}
"""Their default is an object that stands for the same value."""


def shared() -> dict[str, tuple[Any, Any]]:
    """Theirs and ours of each name that both have."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in {*ours.__all__, *trainer_kit.__all__}:
        theirs = getattr(accelerate, name, None) or getattr(accelerate.utils, name, None)
        if callable(theirs) and name != "DistributedType":
            found[name] = theirs, getattr(ours, name, None) or getattr(trainer_kit, name)
    for name in dir(accelerate.Accelerator):
        theirs, own = getattr(accelerate.Accelerator, name), getattr(trainer_kit.Accelerator, name, None)
        if not name.startswith("_") and callable(theirs) and own is not None and name not in ("log", "init_trackers"):
            found[f"Accelerator.{name}"] = theirs, own
    return found


def arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("name", sorted(shared()))
def test_arguments_are_accelerate_s(name: str) -> None:
    theirs, own = map(arguments, shared()[name])
    left_out = LEFT_OUT.get(name, set())
    assert left_out == theirs.keys() - own.keys() - ({"rdzv_conf", "log_line_prefix_template"} - own.keys())
    for argument in own.keys() & theirs.keys():
        if (name, argument) in STAND_IN:
            continue
        differs = own[argument].default != theirs[argument].default
        assert differs == ((name, argument) in OTHER_DEFAULTS), argument
    if "rdzv_conf" in theirs and "rdzv_conf" not in own:
        return
    # What may be given by position is at the position that it has there.
    positional = [each.name for each in own.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    for place, argument in enumerate(positional):
        if argument in theirs:
            assert list(theirs)[place] == argument


def prepared(accelerator: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
    made = dict(zip(("optimizer", "schedule", "loader"), accelerator.prepare(optimizer, schedule, loader), strict=True))
    return made | {
        "accelerator": accelerator,
        "state": accelerator.state,
        "gradient_state": accelerator.gradient_state,
    }


def test_attributes_of_accelerate_s_objects_exist_or_are_explained() -> None:
    theirs, own = prepared(accelerate.Accelerator(cpu=True)), prepared(trainer_kit.Accelerator(cpu=True))
    objects = [(theirs[kind], own[kind]) for kind in theirs]
    for one, other in [*objects, (accelerate.PartialState(), ours.PartialState())]:
        for name in dir(one):
            if not name.startswith("_"):
                try:
                    getattr(other, name)
                except AttributeError as error:
                    assert re.search(rf"no attribute '{name}': \w", str(error)), error  # noqa: PT017


def test_the_guide_names_what_is_left_out() -> None:
    guide = GUIDE.read_text()
    names = {argument for each in LEFT_OUT.values() for argument in each} | {name for _, name in OTHER_DEFAULTS}
    assert not {
        name for name in names - {"function", "num_steps"} if f"`{name}`" not in guide and f"`{name}=" not in guide
    }


def test_scripts_see_the_version_whose_names_these_are() -> None:
    assert accelerate.__version__ == trainer_kit.accelerator.__version__
