"""Compilation of a model, or of the blocks that it repeats, by `torch.compile`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.torch_version import TorchVersion

from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.utils.repeated_blocks import repeated_blocks
from trainer_kit.utils.transformers_models import place_of_use_cache
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class

# Gradients of a tensor of which several norms of a model take parts (github.com/pytorch/pytorch/issues/193061).
_FUSES_NORMS_WRONGLY = "2.10" <= TorchVersion(torch.__version__) < "2.15"


def compile_model(model: torch.nn.Module, options: CompileOptions) -> None:
    """Compile a model in place, so that the names of its weights stay; its code is compiled at its first call.

    Args:
        model: The user's model.
        options: What to compile, and how.

    Raises:
        ValueError: If torch lacks the backend or would compute wrong gradients, or the options are regional and the
            model repeats no block.
    """
    _avoid_wrong_gradients(model, options)
    _check_backend(options.backend)
    if not options.regional:
        _compile(model, options)
        return
    blocks = [*repeated_blocks(model)]
    if not blocks:
        raise ValueError(
            f"torch_compile has regional=True, but {model_class(model).__name__} repeats no block (a ModuleList or "
            "Sequential of modules of one class); use regional=False"
        )
    for block in blocks:
        _compile(block, options)
    for module in model.modules():
        if (place := place_of_use_cache(module)) is not None:
            module.register_forward_pre_hook(functools.partial(_without_cache, place), with_kwargs=True)


def _check_backend(name: str) -> None:
    from torch._dynamo.backends.registry import lookup_backend  # takes long to import
    from torch._dynamo.exc import InvalidBackend

    try:
        lookup_backend(name)
    except InvalidBackend as error:
        known = join_names(map(repr, torch.compiler.list_backends()), most=None)
        raise ValueError(f"torch_compile has backend={name!r}, unknown to torch; use one of {known}") from error


def _avoid_wrong_gradients(model: torch.nn.Module, options: CompileOptions) -> None:
    """Refuse, or turn off, what torch is known to compile to wrong gradients without a word."""
    from torch._functorch import config  # takes long to import, and so do inductor's

    if config.activation_memory_budget < 1:  # github.com/pytorch/pytorch/issues/190758
        wrong = (
            f"with torch._functorch.config.activation_memory_budget={config.activation_memory_budget}, torch.compile "
            "draws other random numbers in the backward pass than in the forward pass, which makes the gradients of "
            "dropout wrong; set it to 1, and gradient_checkpointing=True to save memory"
        )
        if any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules()):
            raise ValueError(wrong)
        warn(wrong)
    if options.backend == "inductor" and _FUSES_NORMS_WRONGLY:
        from torch._inductor import config as inductor

        inductor.triton.mix_order_reduction = False


def _compile(module: torch.nn.Module, options: CompileOptions) -> None:
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options.for_torch())
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # The compiler skips functions of torch.nn unless other code calls them, so that module.compile() has no effect.
    module._compiled_call_impl = torch.compile(call, **options.for_torch())


def _without_cache(place: int, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make no key-value cache unless the caller asks for one: each block's part of it would be compiled separately.

    Args:
        place: Place of `use_cache` among the parameters.
        module: The module.
        args: Arguments by position.
        kwargs: Arguments by name.
    """
    if len(args) <= place and kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs["use_cache"] = False
    return args, kwargs
