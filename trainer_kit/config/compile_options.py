"""`CompileOptions`: the options of `TrainingArguments.torch_compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from trainer_kit.config.validation import Rule, check_values, read_options

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclasses.dataclass
class CompileOptions:
    """Options of `torch.compile`, and what is compiled.

    Args:
        mode: See `torch.compile`; "reduce-overhead" and "max-autotune" use CUDA graphs on GPUs.
        backend: Name of the compiler.
        dynamic: Whether sizes may vary without a compilation; None: a size that varies becomes dynamic.
        fullgraph: Whether code that cannot be compiled is an error.
        regional: Whether only the blocks that the model repeats are compiled. Their code is compiled once.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not allowed, alone or in combination with others.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    backend: Annotated[str, Rule("a name that is not empty", bool)] = "inductor"
    dynamic: bool | None = None
    fullgraph: bool = False
    regional: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        if self.regional and self.mode in _WITH_CUDA_GRAPHS:
            raise ValueError(
                f"regional=True is not possible with mode={self.mode!r}, whose CUDA graphs would share the memory of "
                "outputs between blocks; use mode='max-autotune-no-cudagraphs', or regional=False"
            )

    @classmethod
    def read(cls, setting: bool | Mapping[str, Any]) -> CompileOptions:
        """Return the options that `torch_compile` gives; True gives the defaults.

        Raises:
            TypeError: If a key is unknown, or a value has the wrong type.
            ValueError: If a value is not allowed.
        """
        return read_options(cls, "torch_compile", setting)

    def for_torch(self) -> dict[str, Any]:
        """Return the keyword arguments of `torch.compile`."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "regional"}
