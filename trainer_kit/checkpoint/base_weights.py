"""`BaseWeights`: the frozen weights below a model's adapters, which a run's checkpoints share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.adapters import (
    Tensors,
    adapter_folders,
    base_commit,
    base_name,
    frozen_names,
    split_state,
)
from trainer_kit.checkpoint.format.base_files import digests_in_files, is_local
from trainer_kit.checkpoint.format.base_reference import BaseReference, digest, write_kept
from trainer_kit.checkpoint.format.safetensors_writer import address, storage_key, untie
from trainer_kit.errors import SaveError
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.fingerprint import fingerprints
from trainer_kit.utils.quantized_tensors import is_quantized, parts_of
from trainer_kit.utils.units import format_size
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger("trainer_kit")


class BaseWeights:
    """Divides the state of a model with adapters into the parts that a checkpoint holds and those that it refers to.

    A frozen weight may change in any way during a run: a checkpoint refers only to those with the bits and the names
    of its beginning.

    Args:
        model: The user's model, prepared.
        reference: Reference to the frozen weights, as they are now.
        in_files: Names of the weights that the files of the base hold.
        strategy: The strategy, which may shard the weights.
        folder: Folder in which the run keeps the weights; None: it keeps none.

    Attributes:
        current: The reference of the checkpoint that was divided last, to the weights that had not changed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        reference: BaseReference,
        in_files: Collection[str],
        strategy: Strategy,
        folder: Path | None,
    ) -> None:
        self.model = without_wrappers(model)
        self.reference = self.current = reference
        self.in_files = in_files
        self.strategy = strategy
        self.folder = folder
        self._marks = self._marks_now()

    def split(self, state: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, Tensors]]:
        """Return the tensors that a checkpoint holds under the model's names, and those of its adapters' files.

        Weights that were trained, or changed, since they were referred to belong to the first. Collective if sharding
        is active.
        """
        unchanged = self.unchanged()
        self.current = self.reference.only(unchanged)
        return split_state(self.model, state, unchanged)

    def unchanged(self) -> set[str]:
        """Return the names of the frozen weights with the bits of the beginning. Collective if sharding is active."""
        mine, failed = set[str](), None
        try:
            now = self._marks_now()
            mine = {name for name, mark in self._marks.items() if now.get(name) == mark}
        except Exception as error:  # the other processes wait for this one
            failed = error
        if self.strategy.sharding.is_active:  # each process has compared its own parts
            mine = mine.intersection(*self.strategy.collectives.gather_object(mine))
        if failed is not None:
            raise failed
        return mine

    def left_out(self) -> set[str]:
        """Return the names of the weights that the folder of `save_model` need not hold.

        Those are the unchanged ones that the files of the base hold; without such files, all unchanged ones.
        A warning says where the latter lie. Collective if sharding is active.
        """
        unchanged = self.unchanged()
        if self.in_files:
            return unchanged.intersection(self.in_files)
        if unchanged and self.strategy.is_main:
            logger.warning(
                "the saved folder lacks the frozen weights below the adapters, which %s; to save the whole model, call "
                "merge_and_unload() and save what it returns",
                "no file holds" if self.folder is None else f"only {self.folder} holds",
            )
        return unchanged

    def _marks_now(self) -> dict[str, tuple[object, ...]]:
        """Return what identifies the bits of each frozen weight that is still there, with one wait for the device."""
        own = self.model.state_dict(keep_vars=True)
        own = {name: own[name] for name in self.reference.digests if name in own and not own[name].requires_grad}
        places: dict[tuple[object, ...], list[int]] = {}  # in `parts`, by tensor
        parts: list[torch.Tensor] = []
        for tensor in own.values():
            if (key := storage_key(tensor)) not in places:
                (local,) = self.strategy.sharding.own_parts([tensor])
                new = [each if address(each) else self.strategy.device_info.to_host(each) for each in parts_of(local)]
                places[key] = [*range(len(parts), len(parts) + len(new))]
                parts += new
        numbers = fingerprints(parts)
        return {
            name: (tensor.dtype, tensor.shape, *(numbers[place] for place in places[storage_key(tensor)]))
            for name, tensor in own.items()
        }


def refer_to_base(run: Run) -> BaseWeights | None:
    """Refer to the frozen weights below a model's adapters, and keep those of unknown origin. Collective.

    The run's folder keeps the weights that no repository of the Hub holds, unless save_strategy is "no".

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
    saves = run.args.save_strategy != "no"
    if saves:
        _check_adapters(model, strategy)
    state, names = model.state_dict(keep_vars=True), sorted(frozen_names(model))
    to_host = strategy.device_info.to_host
    digests = {name: digest(whole, to_host) for name, whole in _whole(state, names, strategy)}
    is_quantized_base = any(_is_quantized(state[name]) for name in names)
    if saves and is_quantized_base and base_name(model) is None:
        raise ValueError(
            "the frozen weights are quantized, and the model does not say from where it was loaded, so that no "
            "checkpoint can refer to them; load the model by from_pretrained, or set save_strategy='no'"
        )
    reference, in_files = strategy.collectives.on_main(lambda: _reference(model, digests, state, is_quantized_base))
    if saves:
        kept = strategy.sharding.collect_on_main({name: state[name] for name in reference.kept})
        strategy.collectives.on_main(lambda: _keep(run, reference, kept))
    folder = Path(run.args.output_dir) / reference.folder if saves and reference.folder is not None else None
    return BaseWeights(model, reference, in_files, strategy, folder)


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
) -> tuple[BaseReference, set[str]]:
    """Return the reference, and the names of the weights that the files of the base hold.

    Only a repository of the Hub holds weights for good: it can be loaded again by its commit, unlike a folder.
    """
    name, commit = base_name(model), base_commit(model)
    dtypes = {each: str(state[each].dtype) for each in digests}
    if is_quantized_base:
        return BaseReference.of(name, digests, (), commit, dtypes), {*digests}
    found = set[str]()
    if name is not None:
        found = digests_in_files(name, commit, {state[each].dtype for each in digests})
    in_files = {each for each in digests if digests[each] in found}
    is_lasting = name is not None and not is_local(name)
    kept = digests.keys() - in_files if is_lasting else digests.keys()
    return BaseReference.of(name if in_files else None, digests, kept, commit, dtypes), in_files


def _keep(run: Run, reference: BaseReference, kept: Tensors) -> None:
    folder = Path(run.args.output_dir)
    try:
        write_kept(folder, reference, kept, run.args.max_shard_size, run.strategy.device_info.to_host)
    except OSError as error:
        raise SaveError(f"the frozen weights of the model could not be written to {folder}: {error}") from error
    size = format_size(sum(kept[name].nbytes for name in untie(kept)))
    place = f"{folder / reference.folder} holds {size} of them" if reference.folder else f"{reference.name} holds them"
    logger.info("checkpoints hold the adapters, and refer to the frozen weights: %s", place)
