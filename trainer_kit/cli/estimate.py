"""Estimate the memory of training a model: what it is made of, whether it fits, and what would save how much.

A step is computed on tensors that have shapes and no memory, as the Trainer computes it: a model with 70 billion
parameters is estimated on a laptop, and a GPU without one. MODEL is one of:

  FILE             a model's config.json of transformers
  FOLDER           one with a config.json, such as a checkpoint
  NAME             a model on the Hub, such as google-bert/bert-large-uncased, from its cache or by the network
  MODULE:FUNCTION  a function of yours that takes nothing and returns a torch.nn.Module that returns its loss, with a
                   batch: (module, batch), or (module, batch, compute_loss); modules are found in the current folder
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer_kit.utils.units import format_size, parse_size

if TYPE_CHECKING:
    from trainer_kit.config.arguments import TrainingArguments
    from trainer_kit.memory import Anatomy
    from trainer_kit.tools.model_resolver import ResolvedModel

# Option, its field of TrainingArguments, and its settings for argparse.
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("batch-size", "per_device_train_batch_size",
     {"type": int, "metavar": "N",
      "help": "samples of a micro-batch on one device (default: 8; for MODULE:FUNCTION, those of its batch)"}),
    ("optim", "optim",
     {"metavar": "NAME",
      "help": "optimizer: adamw_torch, adamw_8bit, adafactor, muon or sgd (default: adamw_torch)"}),
    ("optim-args", "optim_args",
     {"metavar": "OPTIONS",
      "help": "options of sgd or muon, separated by commas, such as momentum=0.9 (default: torch's own)"}),
    ("mixed-precision", "mixed_precision",
     {"choices": ("no", "fp16", "bf16", "fp8"),
      "help": "precision of the forward pass; no: that of the weights (default: no)"}),
    ("gradient-checkpointing", "gradient_checkpointing",
     {"action": "store_true",
      "help": "recompute activations in the backward pass, which needs less memory (default: keep them)"}),
    ("chunked-cross-entropy", "chunked_cross_entropy",
     {"action": "store_true",
      "help": "compute logits and loss of a causal language model in chunks of tokens, which needs less memory"}),
    ("gradient-accumulation-steps", "gradient_accumulation_steps",
     {"type": int, "metavar": "N", "help": "micro-batches of an optimizer step (default: 1)"}),
)  # fmt: skip

EXIT_CODES = {0: "estimated; a step that does not fit is no error"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model and the options of training, each with dashes and with underscores."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.allow_abbrev = False
    parser.add_argument("model", metavar="MODEL", help="FILE, FOLDER, NAME or MODULE:FUNCTION, see above")
    for name, field, settings in _OPTIONS:
        _add(parser, name, dest=field, default=argparse.SUPPRESS, **settings)
    tokens = "tokens of each sequence (default: 512, or the model's positions if they are fewer)"
    _add(parser, "seq-len", type=_count, metavar="N", help=tokens)
    weights = "dtype of the weights (default: that of the config, else float32)"
    _add(parser, "dtype", choices=("float32", "bfloat16", "float16"), help=weights)
    processes = "processes of the run, each with a device of its own (default: %(default)s)"
    _add(parser, "num-processes", type=_count, default=1, metavar="N", help=processes)
    shared = (
        "processes over which FSDP shards the model; must divide --num-processes, if given (default: 1, not sharded)"
    )
    _add(parser, "fsdp", type=_count, default=1, metavar="N", help=shared)
    kind = "kind of device to train on (default: %(default)s)"
    _add(parser, "device", choices=("cuda", "cpu"), default="cuda", help=kind)
    inference = "estimate a forward pass without gradients instead of a training step"
    _add(parser, "inference", action="store_true", help=inference)
    copies = "also print the host memory that the callback PeerCopies takes on each process"
    _add(parser, "peer-copies", action="store_true", help=copies)
    size = "memory of one device, such as 24GiB or 80GB (default: that of this machine's device, if there is one)"
    _add(parser, "device-memory", type=_size, metavar="SIZE", help=size)
    _add(parser, "json", action="store_true", help="print JSON, with all sizes in bytes, instead of tables")


def run(options: argparse.Namespace) -> int:
    """Print the estimate and return 0."""
    import torch

    from trainer_kit.config.arguments import TrainingArguments
    from trainer_kit.loss.batch import samples_of
    from trainer_kit.memory.advice import advise
    from trainer_kit.tools.model_resolver import resolve

    fields = {field for _, field, _ in _OPTIONS}
    args = TrainingArguments(**{name: value for name, value in vars(options).items() if name in fields})
    subject = resolve(
        options.model,
        batch_size=getattr(options, "per_device_train_batch_size", None),
        seq_len=options.seq_len,
        dtype=getattr(torch, options.dtype) if options.dtype else None,
    )
    args.per_device_train_batch_size = samples_of(subject.batch)
    if not options.json:
        print(subject.origin, flush=True)  # estimates of large models are slow
    if options.inference:
        return _print_inference(options, subject, args)
    estimate = advise(
        subject.model,
        args,
        subject.batch,
        device_memory=options.device_memory,
        compute_loss=subject.compute_loss,
        device=options.device,
        world_size=options.num_processes,
        fsdp=options.fsdp,
    )
    copies = estimate.anatomy.peer_copies(options.num_processes) if options.peer_copies else None
    if options.json:
        more = {} if copies is None else {"peer_copies": copies}
        print(json.dumps({"model": options.model, "origin": subject.origin, **estimate.to_dict(), **more}, indent=2))
        return 0
    print(estimate.table())
    if copies is not None:
        print(
            f"\nhost memory of PeerCopies: {format_size(copies)} a process, for two copies of its part of a checkpoint "
            "and of its peer's; half of it on one machine"
        )
    print("\nhow this was found", *_sources(estimate.anatomy), sep="\n")
    return 0


def _print_inference(options: argparse.Namespace, subject: ResolvedModel, args: TrainingArguments) -> int:
    from trainer_kit.memory import estimate

    found = estimate(
        subject.model, args, subject.batch, compute_loss=subject.compute_loss, device=options.device,
        world_size=options.num_processes, fsdp=options.fsdp, inference=True,
    )  # fmt: skip
    if options.json:
        print(json.dumps({"model": options.model, "origin": subject.origin, "anatomy": found.to_dict()}, indent=2))
        return 0
    print(found.table())
    if options.device_memory is not None:
        fits = "fits" if found.peak <= options.device_memory else "does not fit"
        print(f"\n{format_size(found.peak)} {fits} into {format_size(options.device_memory)}")
    print("\nhow this was found", *_sources(found), sep="\n")
    return 0


def _sources(anatomy: Anatomy) -> Iterator[str]:
    """Yield a line for each source of figures, without the descriptions that the table holds."""
    from trainer_kit.memory.anatomy import KINDS

    names: dict[str, list[str]] = {}
    for component in anatomy.components:
        names.setdefault(component.source.removesuffix(f": {KINDS[component.name]}"), []).append(component.name)
    for source, found in names.items():
        yield f"{', '.join(found)}: {source}"


def _add(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    parser.add_argument(f"--{name}", **settings)
    if "-" in name:
        hidden = {**settings, "dest": settings.get("dest", name.replace("-", "_")), "default": argparse.SUPPRESS}
        parser.add_argument(f"--{name.replace('-', '_')}", **{**hidden, "help": argparse.SUPPRESS})


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give one such as 24GiB or 80GB") from error
