"""Random generators that objects keep for themselves, of torch, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def is_generator(value: Any) -> bool:
    """Return whether an object is a random generator with a state, which the system's does not have."""
    kinds = (random.Random, torch.Generator, np.random.RandomState, np.random.Generator)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def is_global_generator(generator: Any) -> bool:
    """Return whether it is the generator that the functions of torch, numpy or `random` draw from."""
    return any(generator is each for each in (random._inst, torch.default_generator, np.random.mtrand._rand))


def state_of_generator(generator: Any) -> Any:
    """Return the state of a generator, for `set_state_of_generator`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(False)


def set_state_of_generator(generator: Any, state: Any) -> None:
    """Restore a state that `state_of_generator` returned.

    Raises:
        TypeError, ValueError, RuntimeError, KeyError: If it is the state of another kind of generator.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
