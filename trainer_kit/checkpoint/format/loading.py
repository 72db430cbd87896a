"""In-place loading of saved weights into a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from trainer_kit.checkpoint.format.adapters import WEIGHTS_STEM, adapter_stems, with_model_names
from trainer_kit.checkpoint.format.base_files import described, differing, load_from_hub
from trainer_kit.checkpoint.format.base_reference import BaseReference, digest
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from trainer_kit.checkpoint.format.model_values import read_values, split_values
from trainer_kit.checkpoint.format.safetensors_reader import (
    Source,
    load_parts,
    load_source,
    read_header,
    readable_into,
    sources,
)
from trainer_kit.checkpoint.format.safetensors_writer import is_file_of, storage_key
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.box import Part, Placement, unsharded
from trainer_kit.utils.own_loading import EXTRA_STATE, prefixes_of_own_loading
from trainer_kit.utils.pytree import repeated_dimensions
from trainer_kit.utils.tied_parameters import parameters_by_all_names
from trainer_kit.utils.units import join_names
from trainer_kit.utils.vectors import as_bytes
from trainer_kit.utils.wrappers import model_class, without_wrappers

Tensors = Mapping[str, torch.Tensor]
Device = str | int | torch.device
LoadState = Callable[[torch.nn.Module, Mapping[str, Any]], object]
"""Loads a part of a model's state, as `Strategy.load_model_state` does."""


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Device | Mapping[str, Device] | None = None,
    *,
    strict: bool = True,
    stem: str = "model",
) -> None:
    """Load weights into a model, in place and file by file.

    Names and shapes are compared before any weight is written, except for the shapes of modules that override
    `_load_from_state_dict` or have a load-state-dict pre-hook, which may resize their tensors. Weights are cast to the
    model's dtypes, and tied weights stay tied. A name may be missing from the files if the model ties it to one that
    is present. The host needs memory for the largest file, except for weights on the CPU that have the stored dtype.

    Args:
        model: The model, on any device.
        checkpoint: A checkpoint of trainer_kit (whose weights are compared with their checksums), a folder that
            `save_model` or `save_pretrained` wrote, or one `.safetensors` file.
        device_map: Target of a move after loading: a device, or devices by name of a module or parameter, where the
            longest name decides and `""` is the whole model. A model on several devices needs hooks that move its
            activations, such as accelerate's `dispatch_model`. None: no move.
        strict: Whether a name that only the model or only the files have is an error.
        stem: Prefix of the names of the files in a folder.

    Raises:
        CheckpointError: If files are missing or damaged.
        ValueError: If the weights belong to another model; the message names the first tensors that differ. Also if
            `device_map` names an unknown part, omits a part, or uses "disk".
        RuntimeError: If a module that loads its tensors itself does not take them.
    """
    places = [] if device_map is None else _places(model, device_map)
    load_weights(model, Path(checkpoint), strict, stem, is_verified=False)
    for part, device in places:
        if isinstance(part, torch.nn.Module):
            part.to(device)
        else:
            part.data = part.data.to(device)


def _places(
    model: torch.nn.Module, device_map: Device | Mapping[str, Device]
) -> list[tuple[torch.nn.Module | torch.Tensor, torch.device]]:
    """Return the parts of the model with their devices, outer parts before inner ones."""
    devices = device_map if isinstance(device_map, Mapping) else {"": device_map}
    tensors = dict([*parameters_by_all_names(model), *model.named_buffers(remove_duplicate=False)])
    parts: dict[str, torch.nn.Module | torch.Tensor] = {**dict(model.named_modules(remove_duplicate=False)), **tensors}
    kind, places = model_class(model).__name__, []
    for name, device in sorted(devices.items(), key=lambda item: len(item[0])):
        if name not in parts:
            raise ValueError(f"device_map names {name!r}, which is no module or parameter of this {kind}")
        if device == "disk":
            raise ValueError(f"device_map puts {name!r} on 'disk', but weights stay in memory; name a device, or 'cpu'")
        try:
            places.append((parts[name], torch.device(device)))
        except RuntimeError as error:
            raise ValueError(f"device_map puts {name!r} on {device!r}, which is no device: {error}") from error
    for name in tensors:
        if not any(name == each or name.startswith(f"{each}.") or not each for each in devices):
            raise ValueError(f"device_map has no device for {name!r} of this {kind}; '' stands for the whole model")
    return places


def _load_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    model.load_state_dict(state, strict=False)


def load_weights(
    model: torch.nn.Module,
    checkpoint: Path,
    strict: bool = True,
    stem: str = "model",
    *,
    is_verified: bool,
    load_state: LoadState = _load_state,
    placement: Placement = unsharded,
    whole_tensors: Callable[[Tensors], Tensors] = dict,
) -> list[str]:
    """Load weights into a model as `load_checkpoint_in_model` does, without moving it.

    Args:
        model: See `load_checkpoint_in_model`.
        checkpoint: See `load_checkpoint_in_model`.
        strict: See `load_checkpoint_in_model`.
        stem: See `load_checkpoint_in_model`.
        is_verified: Whether `newest_valid` or `verify` has just verified the checkpoint.
        load_state: Called with the model and the whole tensors of each file, each time with all other values.
        placement: Returns the part of a model's tensor that this process holds; only its bytes are read, into it.
        whole_tensors: Returns tensors of the model with each sharded one gathered; called on all processes.

    Returns:
        Names of the model's tensors that the files lack, which stay as they are; none if `strict`.
    """
    model = without_wrappers(model)
    state, own_values = _state_of(model)
    found = _find(checkpoint, stem, is_verified, model)
    values = read_values(checkpoint, stem, is_verified)
    base = BaseReference.read(checkpoint)
    elsewhere = _elsewhere(state, found, base)
    shapes = _shapes(found)
    missing = _compare(state, shapes, checkpoint, model, strict, elsewhere, own_values, values)
    other = {*_of_other_shape(state, shapes), *(name for name in state if name.endswith(EXTRA_STATE))}
    if base is not None:
        changed = _changed(state, elsewhere, base, whole_tensors)
        found += base.kept_sources(checkpoint, changed.intersection(base.kept))
        if named := _named(state, changed.difference(base.kept), base, checkpoint):
            load_state(model, named)
    resized = _load_named(found, other) if len(found) > 1 else {}  # a module may want all its tensors in each call
    state = {name: tensor for name, tensor in state.items() if name not in other}
    for source in found:
        parts = _parts(state, source, placement)
        once = {id(state[name]): name for name in parts}  # of tied names the last
        load_parts(source, {name: parts[name] for name in once.values()})
        names = [name for name in source.shapes if name not in parts]
        own = {name: state[name] for name in source.entries if name in state and name not in parts}
        loaded = load_source(source, readable_into(own, source.entries), names)
        for name in [name for name in loaded if name in state and repeated_dimensions(state[name])]:
            _fill_repeated(state[name], loaded.pop(name), name, checkpoint)
        load_state(model, {**loaded, **resized, **(values or {})})
    return missing


def check_weights(model: torch.nn.Module, checkpoint: Path) -> None:
    """Check by the headers of its files that a verified checkpoint belongs to this model.

    Raises:
        ValueError: If names or shapes differ; the message names the first tensors that do.
    """
    model, base = without_wrappers(model), BaseReference.read(checkpoint)
    found = _find(checkpoint, "model", is_verified=True, model=model)
    state, own_values = _state_of(model)
    values, elsewhere = read_values(checkpoint, "model", is_verified=True), base.digests if base is not None else ()
    _compare(state, _shapes(found), checkpoint, model, True, elsewhere, own_values, values)


def _state_of(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parameters and buffers themselves, of which load_state_dict copies nothing, and other values."""
    return split_values(model.state_dict(keep_vars=True))


def _parts(state: Mapping[str, torch.Tensor], source: Source, placement: Placement) -> dict[str, Part]:
    """Return the parts that this process holds of the model's tensors in a file, by name."""
    found = {name: placement(state[name]) for name in state if name in source.shapes}
    return {name: part for name, part in found.items() if part is not None}


@torch.no_grad()
def _fill_repeated(tensor: torch.Tensor, values: torch.Tensor, name: str, checkpoint: Path) -> None:
    """Fill an expanded tensor through its distinct elements, since `copy_` refuses shared memory."""
    once, first = tensor, values
    for dimension in repeated_dimensions(tensor):
        once, first = once.narrow(dimension, 0, 1), first.narrow(dimension, 0, 1)
    same_bits = torch.equal(as_bytes(first.expand_as(values)), as_bytes(values))
    if not same_bits:
        raise ValueError(
            f"{name!r} repeats one value in memory (expand), but {checkpoint} holds values that differ; give the model "
            "a tensor of its own there (clone)"
        )
    once.copy_(first)


def _elsewhere(state: Tensors, found: Sequence[Source], base: BaseReference | None) -> set[str]:
    """Return the names of weights that need not be in the files: those below adapters."""
    names, shapes = set[str](), _shapes(found)
    if base is not None:
        names = {*base.digests}
    elif any(PurePosixPath(source.path).stem == WEIGHTS_STEM for source in found):  # save_model wrote the folder
        names = {name for name, tensor in state.items() if not tensor.requires_grad}
    return names - shapes.keys()


def _changed(
    state: Tensors,
    names: Collection[str],
    base: BaseReference,
    whole_tensors: Callable[[Tensors], Tensors],
) -> set[str]:
    """Return the names of frozen weights that differ in the model."""
    return {name for name in sorted(names) if digest(whole_tensors({name: state[name]})[name]) != base.digests[name]}


def _named(state: Tensors, names: Collection[str], base: BaseReference, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return these weights from the files of the base; refuse a model whose weights differ from those not there."""
    found = load_from_hub(base, names)
    if foreign := sorted({*names} - found.keys()):
        raise ValueError(
            f"{checkpoint} holds adapters for the weights of {described(base)}, but the model has others in "
            f"{join_names(differing(base, foreign, state))}; make the model from the same weights"
        )
    return found


def _find(checkpoint: Path, stem: str, is_verified: bool, model: torch.nn.Module) -> list[Source]:
    if checkpoint.is_file():
        if checkpoint.suffix != ".safetensors":
            raise CheckpointError(f"{checkpoint} is no .safetensors file; files that are pickles are never read")
        return [read_header(checkpoint)]
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist")
    names = model.state_dict(keep_vars=True).keys()
    if not (checkpoint / MANIFEST_NAME).exists():
        adapters = [each for each in adapter_stems(model).values() if (checkpoint / f"{each}.safetensors").exists()]
        found = [with_model_names(source, names) for each in adapters for source in sources(checkpoint, each)]
        has_model = any(is_file_of(path.name, stem) for path in checkpoint.iterdir())
        return found + (sources(checkpoint, stem) if has_model or not found else [])
    manifest = Manifest.read(checkpoint)
    adapters = [name for name in manifest.files if PurePosixPath(name).name == f"{WEIGHTS_STEM}.safetensors"]
    listed = [name for name in manifest.files if is_file_of(name, stem)]
    if not is_verified:
        manifest.check(checkpoint, [*listed, *adapters])
    of_adapters = (sources(checkpoint, each.removesuffix(".safetensors"), adapters) for each in adapters)
    found = [with_model_names(source, names) for each in of_adapters for source in each]
    return found + (sources(checkpoint, stem, listed) if listed or not found else [])


def _shapes(found: Sequence[Source]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in the files, by stored name and alias."""
    return {name: shape for source in found for name, shape in source.shapes.items()}


def _compare(
    state: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
    model: torch.nn.Module,
    strict: bool,
    elsewhere: Collection[str],
    own_values: Collection[str],
    values: Collection[str] | None,
) -> list[str]:
    """Check names and shapes; return the names that the files lack, except those of weights that are elsewhere.

    A value that is no tensor may have been one.
    """
    model_name = model_class(model).__name__
    empty = next((name for name, tensor in state.items() if tensor.is_meta), None)
    if empty is not None:
        raise ValueError(f"{empty!r} of this {model_name} is on the device 'meta', which holds nothing; use to_empty()")
    present = {storage_key(tensor) for name, tensor in state.items() if name in shapes or name in elsewhere}
    there, own = {*shapes, *(values or ())}, {*state, *own_values}
    missing = [name for name, tensor in state.items() if name not in there and storage_key(tensor) not in present]
    missing += [name for name in own_values if values is not None and name not in there]
    unexpected = [name for name in (*shapes, *elsewhere, *(values or ())) if name not in own]
    if other := _of_other_shape(state, shapes):
        own_loading = prefixes_of_own_loading(model)
        other = [
            f"{name!r} is of shape {list(shapes[name])} there and {list(state[name].shape)} in the model"
            for name in other
            if not name.startswith(own_loading)
        ]
    problems = [_list("of other shape: ", other)]
    if strict:
        problems += [_list("missing there: ", map(repr, missing)), _list("not in the model: ", map(repr, unexpected))]
    if any(problems):
        reasons = "; ".join(problem for problem in problems if problem)
        if (checkpoint / "adapter_config.json").is_file():
            reasons += "; it holds adapters: give the model that peft makes with this adapter_config.json"
        raise ValueError(f"{checkpoint} holds the weights of another model than this {model_name}: {reasons}")
    return missing


def _of_other_shape(state: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name, tensor in state.items() if name in shapes and tuple(tensor.shape) != shapes[name]]


def _load_named(found: Sequence[Source], names: Collection[str]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for source in found:
        loaded |= load_source(source, names=[name for name in names if name in source.shapes])
    return loaded


def _list(title: str, items: Any) -> str:
    names = join_names(items)
    return f"{title}{names}" if names else ""
