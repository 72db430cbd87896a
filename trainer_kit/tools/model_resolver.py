"""`resolve`: finds the model that a user names, and creates it on shapes alone with a batch for it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.loss.batch import samples_of
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.memory.advice import resized
from trainer_kit.memory.errors import described

SAMPLES = 8
"""Default number of samples, equal to that of `TrainingArguments.per_device_train_batch_size`."""

TOKENS = 512
"""Default number of tokens per sequence, limited by the model's positions."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of the weights, by name."""

# Tasks whose batches follow from a config alone, by their names in transformers' tables of classes
# (MODEL_FOR_…_MAPPING_NAMES), and the kind of batch.
_TASKS = {
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "TOKEN_CLASSIFICATION": "tokens",
    "SEQUENCE_CLASSIFICATION": "text",
    "QUESTION_ANSWERING": "span",
    "IMAGE_CLASSIFICATION": "image",
}

# Tasks of a config without one: an encoder is fine-tuned, other models learn their own task.
_OF_ENCODERS = ("SEQUENCE_CLASSIFICATION", "MASKED_LM")
_OF_OTHERS = ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")

_REMEDY = "give MODULE:FUNCTION, a function of yours that returns (model, batch)"


class ResolvedModel(NamedTuple):
    """A model and a batch for it.

    Attributes:
        model: Model on the device "meta", unless the user's function needs real weights.
        batch: Batch as the Trainer would pass it, usually on the device "meta" too.
        compute_loss: Loss function as for the Trainer; None for a model that returns its loss.
        origin: Short description of the model and its source.
    """

    model: torch.nn.Module
    batch: Any
    compute_loss: ComputeLoss | None
    origin: str


def resolve(
    name: str, *, batch_size: int | None = None, seq_len: int | None = None, dtype: torch.dtype | None = None
) -> ResolvedModel:
    """Find the model that `name` refers to and create it, without memory for weights.

    Args:
        name: A file with a model's config (JSON), a folder with `config.json`, a name on the Hub (whose cache is
            searched first), or `module:function`, which is called without arguments and returns a `torch.nn.Module`,
            `(module, batch)` or `(module, batch, compute_loss)`.
        batch_size: Samples of the batch; None for 8, or those of the function's own batch.
        seq_len: Tokens of each sequence; None for 512, or the model's positions if they are fewer.
        dtype: Dtype of the weights; None for the config's, else float32.

    Returns:
        The model and its batch.

    Raises:
        ValueError: If there is no such model, its config cannot be read, or the sizes do not suit it.
        TypeError: If the function returns another type.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return _from_config(_read(path), name, batch_size, seq_len, dtype)
    if re.fullmatch(r"[\w.]+:[\w.]+", name):
        return _from_function(name, batch_size, seq_len, dtype)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) or name.endswith(".json"):
        hint = "; for a function write MODULE:FUNCTION, with dots and without .py" if ":" in name else ""
        raise ValueError(f"there is no file or folder {name!r}{hint}")
    return _from_config(_from_hub(name), name, batch_size, seq_len, dtype)


# From a config


def _read(path: Path) -> Any:
    """Read the config in a file or folder."""
    from transformers import CONFIG_MAPPING, AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"the folder {path} has no config.json, which says what model it is")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{file} has no model_type, so that it is no config of a transformers model; {_REMEDY}")
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{file} has model_type {kind!r}, which the installed transformers does not know; {_REMEDY}")
    try:
        return AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # each config has its own checks
        raise ValueError(f"{file} is no config of a model: {_one_line(error)}") from error


def _from_hub(name: str) -> Any:
    """Load the config from the cache, else from the Hub: a machine without a network must not wait for one."""
    from transformers import AutoConfig

    try:
        with contextlib.suppress(OSError):
            return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # from the network, the Hub or the config
        raise ValueError(
            f"there is no file, folder or function {name!r}, and no such config came from the Hub or its cache: "
            f"{str(error).strip().partition(chr(10))[0] or type(error).__name__}"
        ) from error


def _from_config(
    config: Any, name: str, batch_size: int | None, seq_len: int | None, dtype: torch.dtype | None
) -> ResolvedModel:
    kind, task = _choose(config, name)
    dtype = dtype or _dtype_of(config)
    _give_tokens(config)
    with torch.device("meta"), _default_dtype(dtype):
        try:
            model = kind(config).to("meta")  # a few models ignore the default device
        except Exception as error:  # a model may raise any error
            raise ValueError(f"{kind.__name__} cannot be made from the config of {name}: {_one_line(error)}") from error
    batch = fake_batch(model, task, batch_size or SAMPLES, seq_len)
    return ResolvedModel(model.train(), batch, None, f"{kind.__name__} from {name}, weights in {str(dtype)[6:]}")


def _choose(config: Any, name: str) -> tuple[Callable[[Any], torch.nn.Module], str]:
    """Return the class that a config selects for training, and its task."""
    import transformers

    tables = _tables()
    architecture = next(iter(getattr(config, "architectures", None) or []), None)
    for task in _TASKS:
        if architecture in tables[task].values():
            return getattr(transformers, str(architecture)), task
    kind = config.model_type
    if architecture in (None, tables["BASE"].get(kind), tables["PRETRAINING"].get(kind)):
        is_encoder = kind in tables["MASKED_LM"] and kind not in tables["SEQ_TO_SEQ_CAUSAL_LM"]
        for task in _OF_ENCODERS if is_encoder else _OF_OTHERS:
            if kind in tables[task]:
                return getattr(transformers, tables[task][kind]), task
    raise ValueError(f"{name}: no batch can be made for a {architecture or kind} from its config alone; {_REMEDY}")


def _tables() -> dict[str, dict[str, str]]:
    """Return the class of each model type, by task."""
    from transformers.models.auto import modeling_auto

    names = {task: f"MODEL_FOR_{task}_MAPPING_NAMES" for task in (*_TASKS, "PRETRAINING")}
    names["BASE"] = "MODEL_MAPPING_NAMES"
    return {
        task: {kind: one if isinstance(one, str) else one[0] for kind, one in getattr(modeling_auto, table).items()}
        for task, table in names.items()
    }


def _dtype_of(config: Any) -> torch.dtype:
    """Return the dtype of a config; transformers 5 calls it `dtype`, earlier versions `torch_dtype`."""
    value = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    return value if isinstance(value, torch.dtype) else DTYPES.get(str(value), torch.float32)


def _give_tokens(config: Any) -> None:
    """Set missing token ids: decoders' classifiers need one for padding, decoders one to start; any value serves."""
    text = config.get_text_config()
    for token in ("pad_token_id", "decoder_start_token_id"):
        if getattr(text, token, None) is None:
            setattr(text, token, 0)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Batches


def fake_batch(model: Any, task: str, samples: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Return a batch on the device "meta" for a transformers model.

    Args:
        model: A transformers model with its config.
        task: Task of the model, such as "CAUSAL_LM".
        samples: Number of samples.
        seq_len: Tokens of each sequence; None for 512, or the model's positions if they are fewer.

    Returns:
        `input_ids` and `attention_mask`, shape [samples, seq_len], with `labels` of the same shape, of shape [samples],
            or
        two positions for each sample; or `pixel_values`, shape [samples, channels, height, width], and `labels`.

    Raises:
        ValueError: If the sequences are longer than the model's positions, or `seq_len` is given for images.
    """
    config, holds = model.config, _TASKS[task]
    if holds == "image":
        if seq_len is not None:
            raise ValueError(f"--seq-len {seq_len} has no meaning for {type(model).__name__}, which sees images")
        return {"pixel_values": _images(config, samples), "labels": _whole(samples)}
    length = _length(type(model).__name__, config, seq_len)
    batch = {"input_ids": _whole(samples, length), "attention_mask": _whole(samples, length)}
    if holds == "span":
        return {**batch, "start_positions": _whole(samples), "end_positions": _whole(samples)}
    return {**batch, "labels": _whole(samples, length) if holds == "tokens" else _labels(config, samples)}


def _whole(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _labels(config: Any, samples: int) -> torch.Tensor:
    """Return one class per sample, or labels for `problem_type`; transformers regresses with a single class."""
    problem = config.problem_type or ("regression" if config.num_labels == 1 else None)
    if problem is None or problem == "single_label_classification":
        return _whole(samples)
    shape = (samples,) if config.num_labels == 1 else (samples, config.num_labels)
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _images(config: Any, samples: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224  # training size of convolutional models without one
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.empty((samples, getattr(vision, "num_channels", 3), height, width), device="meta")


def _length(kind: str, config: Any, seq_len: int | None) -> int:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return seq_len or TOKENS
    if seq_len is not None and seq_len > positions:
        raise ValueError(f"--seq-len {seq_len} is longer than the {positions} positions of {kind}")
    return seq_len or min(TOKENS, positions)


# From a function


def _from_function(name: str, batch_size: int | None, seq_len: int | None, dtype: torch.dtype | None) -> ResolvedModel:
    made = _call(name, _find(name), dtype or torch.get_default_dtype())
    model, batch, compute_loss = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
    is_wrong = isinstance(made, tuple) and (len(made) not in (2, 3) or not callable(compute_loss or len))
    if is_wrong or not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{name} returned {_described(made)}; it must return a torch.nn.Module, (module, batch) or "
            "(module, batch, compute_loss)"
        )
    origin = f"{type(model).__name__} from {name}"
    if batch is None:
        config = getattr(model, "config", None)
        task = next((task for task in _TASKS if type(model).__name__ in _tables()[task].values()), None)
        if config is None or task is None:
            raise TypeError(f"{name} returned a {type(model).__name__}, whose batch is unknown; return (module, batch)")
        return ResolvedModel(model, fake_batch(model, task, batch_size or SAMPLES, seq_len), compute_loss, origin)
    if seq_len is not None:
        raise ValueError(f"--seq-len {seq_len} has no effect: {name} brings a batch of its own")
    if not samples_of(batch):
        raise ValueError(f"the batch that {name} returned has no samples; return one such as the Trainer would give")
    return ResolvedModel(model, resized(batch, batch_size) if batch_size else batch, compute_loss, origin)


def _find(name: str) -> Callable[[], Any]:
    """Return the function `module:function`; modules of the current folder are found too, as with `python -m`."""
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = "; write its name with dots and without .py" if module_name.endswith(".py") else ""
        raise ValueError(f"{name}: there is no module {error.name!r} here or installed{hint}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: the module {module_name!r} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is of type {_described(found)}; give a function that returns a torch.nn.Module")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TypeError(f"{name} is called without arguments, but it is {error}") from error
    function: Callable[[], Any] = found
    return function


def _call(name: str, function: Callable[[], Any], dtype: torch.dtype) -> Any:
    """Call the function on the device "meta", or on the CPU if it needs the weights' values."""
    with _default_dtype(dtype):
        try:
            with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
                return function()
            return function()  # it reads values, or loads weights
        except Exception as error:  # the function is the user's own
            raise ValueError(f"{name} raised {described(error)}") from error


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_described(each) for each in value)})"
    return "None" if value is None else type(value).__name__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
