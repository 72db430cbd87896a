"""`BaseWeights`: the frozen weights below a model's adapters, which a run's checkpoints share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.adapters import Tensors, adapter_folders, base_name, frozen_names, split_state
from trainer_kit.checkpoint.format.base_reference import BaseReference, digest, write_kept
from trainer_kit.checkpoint.format.safetensors_reader import load_tensor, read_header
from trainer_kit.checkpoint.format.safetensors_writer import untie
from trainer_kit.errors import CheckpointError, SaveError
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.quantized_tensors import is_quantized
from trainer_kit.utils.units import format_size
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger("trainer_kit")


class BaseWeights:
    """Divides the state of a model with adapters into the parts that a checkpoint holds and those that it refers to.

    Args:
        model: The user's model, prepared.
        reference: Reference to the frozen weights, as they are now.
    """

    def __init__(self, model: torch.nn.Module, reference: BaseReference) -> None:
        self.model = without_wrappers(model)
        self.reference = reference
        own = self.model.state_dict(keep_vars=True)
        self._versions = {name: own[name]._version for name in reference.digests}

    def split(self, state: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, Tensors]]:
        """Return the tensors that a checkpoint holds under the model's names, and those of its adapters' files.

        Weights that were trained, or changed, since they were referred to belong to the first.
        """
        own, versions = self.model.state_dict(keep_vars=True), self._versions
        unchanged = {
            name for name, version in versions.items() if own[name]._version == version and not own[name].requires_grad
        }
        return split_state(self.model, state, unchanged)


def refer_to_base(run: Run) -> BaseWeights | None:
    """Refer to the frozen weights below a model's adapters, and keep those of unknown origin. Collective.

    The run's folder keeps the weights that the files from which the model was loaded do not hold.

    Args:
        run: The run, with its prepared model and its folder.

    Returns:
        The weights; None for a model without adapters.

    Raises:
        SaveError: If the weights cannot be written.
        ValueError: If the strategy or a checkpoint cannot hold the adapters or their base.
    """
    model, strategy = without_wrappers(run.model), run.strategy
    if not adapter_folders(model):
        return None
    _check_adapters(model, strategy)
    state, names = model.state_dict(keep_vars=True), sorted(frozen_names(model))
    to_host = strategy.device_info.to_host
    digests = {name: digest(whole, to_host) for name, whole in _whole(state, names, strategy)}
    is_quantized_base = any(_is_quantized(state[name]) for name in names)
    reference = strategy.collectives.on_main(lambda: _reference(model, digests, state, is_quantized_base))
    kept = strategy.sharding.collect_on_main({name: state[name] for name in reference.kept})
    strategy.collectives.on_main(lambda: _keep(run, reference, kept))
    return BaseWeights(model, reference)


def _check_adapters(model: torch.nn.Module, strategy: Strategy) -> None:
    """Check that the parts of sharded adapters can be written: a computed tensor has no part on each process."""
    if not strategy.sharding.is_active:
        return
    configs: Any = model.peft_config
    for name, config in configs.items():
        if config.is_prompt_learning or config.peft_type == "ADALORA":
            raise ValueError(
                f"the adapter {name!r} is of type {getattr(config.peft_type, 'value', config.peft_type)}, whose file "
                "holds computed tensors, which sharded weights do not allow; use strategy='ddp'"
            )


def _whole(state: Tensors, names: list[str], strategy: Strategy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by name, one sharded tensor at a time. Collective if sharding is active."""
    for name in names:
        yield name, strategy.sharding.whole_tensors({name: state[name].detach()})[name]


def _is_quantized(tensor: torch.Tensor) -> bool:
    return is_quantized(tensor) or type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def _reference(
    model: torch.nn.Module, digests: Mapping[str, str], state: Tensors, is_quantized_base: bool
) -> BaseReference:
    name = base_name(model)
    if is_quantized_base:
        if name is None:
            raise ValueError(
                "the frozen weights are quantized, and the model does not say from where it was loaded, so that no "
                "checkpoint can refer to them; load the model by from_pretrained, or set save_strategy='no'"
            )
        return BaseReference.of(name, digests, ())
    found = _digests_at(name, {state[each].dtype for each in digests}) if name is not None else set()
    kept = [each for each in digests if digests[each] not in found]
    return BaseReference.of(name if len(kept) < len(digests) else None, digests, kept)


def _digests_at(name: str, dtypes: set[torch.dtype]) -> set[str]:
    """Return the digests of all tensors in the files of a base, in each of these dtypes; empty without files."""
    found = set[str]()
    folder = _folder_of(name)
    for path in () if folder is None else sorted(folder.glob("*.safetensors")):
        try:
            source = read_header(path)
            for each in source.entries:
                tensor = load_tensor(source, each)
                found |= {digest(tensor.to(dtype)) for dtype in dtypes if not tensor.is_complex()}
        except CheckpointError as error:
            logger.warning("%s is not used as the base's file: %s", path, error)
    return found


def _folder_of(name: str) -> Path | None:
    """Return the folder of a base: itself, or the snapshot of a repository in the Hub's cache."""
    if Path(name).is_dir():
        return Path(name)
    hub: Any = sys.modules.get("huggingface_hub")  # imported already if the base comes from the Hub
    for file in ("config.json", "model.safetensors") if hub is not None else ():
        path = hub.try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent
    return None


def _keep(run: Run, reference: BaseReference, kept: Tensors) -> None:
    folder = Path(run.args.output_dir)
    try:
        write_kept(folder, reference, kept, run.args.max_shard_size, run.strategy.device_info.to_host)
    except OSError as error:
        raise SaveError(f"the frozen weights of the model could not be written to {folder}: {error}") from error
    size = format_size(sum(kept[name].nbytes for name in untie(kept)))
    place = f"{folder / reference.folder} holds {size} of them" if reference.folder else f"{reference.name} holds them"
    logger.info("checkpoints hold the adapters, and refer to the frozen weights: %s", place)
