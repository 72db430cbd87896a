"""`TextGenerator`: token ids that a transformers model generates from the prompts of an evaluation's batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from trainer_kit.loss.batch import IGNORED, labels_of, shape_of
from trainer_kit.loss.loss import columns_of
from trainer_kit.run import Run
from trainer_kit.utils.wrappers import model_class

_ARGUMENT = "predict_with_generate=True"
_LENGTHS = frozenset({"max_length", "max_new_tokens"})


class TextGenerator:
    """Generate token ids with the model's own `generate`.

    Args:
        run: The run, with `predict_with_generate`.
        given: Arguments of `generate` that take precedence over those of the run.

    Raises:
        ValueError: If the model cannot generate or is sharded, or the device compiles for each shape.

    Attributes:
        pad_id: Id with which shorter texts are padded; None if neither model nor tokenizer has one.
    """

    def __init__(self, run: Run, given: Mapping[str, Any]) -> None:
        model: Any = run.model
        if not callable(getattr(model, "generate", None)) or not hasattr(model, "generation_config"):
            raise ValueError(
                f"{_ARGUMENT} needs a transformers model that generates, but the model is {model_class(model).__name__}"
            )
        if run.strategy.static_shapes:
            raise ValueError(f"{_ARGUMENT} is not possible on a device that compiles for each shape; set it to False")
        if any(map(run.strategy.sharding.is_sharded, model.parameters())):
            raise ValueError(
                f"{_ARGUMENT} is not possible with a sharded model, whose processes would generate texts of other "
                "lengths; set it to False, and generate from a checkpoint"
            )
        self._model = model
        self._is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._settings = self._read_settings(run.args, given)
        self.pad_id = self._find_pad_id(run.processing_class)

    def __call__(self, batch: Any, samples: int) -> torch.Tensor:
        """Return the ids generated for a batch: one row for each sample, without the prompt of a causal model.

        Args:
            batch: The batch on the device.
            samples: Number of its samples.

        Raises:
            ValueError: If the batch has no `input_ids`, if a sample has no prompt, or if `generate` returns another
                number of rows.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(f"{_ARGUMENT} needs batches that are dicts, but one is {shape_of(batch)}")
        inputs = self._inputs_of_encoder(batch) if self._is_encoder_decoder else self._prompts(batch)
        pad = {} if self.pad_id is None else {"pad_token_id": self.pad_id}
        ids = self._model.generate(**inputs, **(pad | self._settings))
        ids = getattr(ids, "sequences", ids)
        if len(ids) != samples:
            raise ValueError(
                f"generate() returned {len(ids)} texts for {samples} samples; set num_return_sequences=1 in "
                "generation_config"
            )
        return ids if self._is_encoder_decoder else ids[:, inputs["input_ids"].shape[1] :]  # type: ignore[no-any-return]

    def _read_settings(self, args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        has_length = not _LENGTHS.isdisjoint(given)
        replaced = _LENGTHS if has_length else frozenset[str]()
        settings = {name: value for name, value in (args.generation_config or {}).items() if name not in replaced}
        if args.generation_num_beams is not None:
            settings["num_beams"] = args.generation_num_beams
        settings |= given
        if "max_length" in settings and not self._is_encoder_decoder:
            raise ValueError(
                f"generation_config has max_length={settings['max_length']}, which counts the padded prompt of a "
                "causal model; give max_new_tokens"
            )
        if args.generation_max_length is not None and not has_length:
            if lengths := [name for name in sorted(_LENGTHS) if settings.get(name) is not None]:
                raise ValueError(
                    f"generation_max_length={args.generation_max_length} and generation_config's {lengths[0]}="
                    f"{settings[lengths[0]]} are two lengths; leave one out"
                )
            name = "max_length" if self._is_encoder_decoder else "max_new_tokens"
            settings[name] = args.generation_max_length
        if settings.get("max_length") is not None:
            settings.setdefault("max_new_tokens", None)  # the model's own would win over max_length
        return settings

    def _find_pad_id(self, processing_class: Any) -> int | None:
        config = self._model.generation_config
        found = self._settings.get("pad_token_id", config.pad_token_id)
        if found is None:
            found = getattr(processing_class, "pad_token_id", None)
        if found is None:
            found = self._settings.get("eos_token_id", config.eos_token_id)
        first: int | None = found[0] if isinstance(found, (list, tuple)) else found
        return first

    def _is_token(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which ids are no padding, as transformers infers it: one that ends texts may also be a token."""
        ends = self._settings.get("eos_token_id", self._model.generation_config.eos_token_id)
        if self.pad_id is None or self.pad_id in (ends if isinstance(ends, (list, tuple)) else [ends]):
            return torch.ones_like(ids, dtype=torch.bool)
        return ids != self.pad_id

    def _inputs_of_encoder(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        labels, known = labels_of(batch), columns_of(self._model)
        inputs = {name: batch[name] for name in batch if batch[name] is not None and (known is None or name in known)}
        decoder_ids = inputs.get("decoder_input_ids")
        # A collator makes them from the labels; generation would then continue the answer.
        if labels is not None and decoder_ids is not None and decoder_ids.shape == labels.shape:
            inputs = {name: inputs[name] for name in inputs if not name.startswith("decoder_")}
        inputs.pop("labels", None)
        return inputs

    def _prompts(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns up to the first label of each row, padded on the left, as a causal model needs them."""
        ids, known = batch.get("input_ids"), columns_of(self._model)
        if ids is None:
            raise ValueError(f"{_ARGUMENT} needs input_ids, but a batch is {shape_of(batch)}")
        attended = batch.get("attention_mask")
        is_prompt = self._is_token(ids) if attended is None else attended.bool()
        labels = labels_of(batch)
        if labels is not None:
            is_prompt = is_prompt & ((labels != IGNORED).cumsum(-1) == 0)
        shortest, longest = (int(each) for each in torch.stack(is_prompt.sum(-1).aminmax()).tolist())
        if not shortest:
            raise ValueError(
                f"{_ARGUMENT} generates from the tokens before the first label, but a sample has a label at its first "
                "token; set the labels of its prompt to -100"
            )
        order = is_prompt.int().argsort(dim=-1, stable=True)[:, -longest:]
        mask = is_prompt.gather(1, order)
        dropped = ("labels", "label", "position_ids", "attention_mask")
        inputs = {name: batch[name] for name in batch if name not in dropped and (known is None or name in known)}
        for name, column in inputs.items():
            if isinstance(column, torch.Tensor) and column.shape == ids.shape:
                fill = (self.pad_id or 0) if name == "input_ids" else 0
                inputs[name] = torch.where(mask, column.gather(1, order), fill)
        return {**inputs, "attention_mask": mask.to(ids.dtype)}


def checked_settings(model: torch.nn.Module, settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return arguments of `generate` for one evaluation, without those that are None.

    Args:
        model: The user's model.
        settings: The arguments by name.
        method: Name of the method that got them, for the error.

    Raises:
        TypeError: If a name is no argument of `generate`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return given
    from transformers import GenerationConfig

    known = {*vars(GenerationConfig()), *inspect.signature(getattr(model, "generate", print)).parameters}
    for name in given:
        if name not in known:
            todo = "give Trainer(preprocess_logits_for_metrics=)" if name == "ignore_keys" else "leave it out"
            raise TypeError(f"{method}() has no argument {name!r}, and generate() neither; {todo}")
    return given
