"""Likely causes of a difference between two starts of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainer_kit.tools.verify.compare import Difference, Line
from trainer_kit.tools.verify.fingerprints import GENERATOR
from trainer_kit.utils.units import join_names

_DATA = ("train_dataset", "data_collator", "the script", "run.stateful")
_MODEL = ("model", "compute_loss", "the script", "run.stateful")
_LISTENERS = ("callback", "run.stateful", "the script", "compute_loss", "model")

_USE_THE_GLOBAL_ONE = "draw from torch's global generator, which is seeded for every step"
_USE_THE_GLOBAL_ONES = "draw from the global generators of torch, numpy or random, which are seeded for every sample"


@dataclasses.dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        name: Category, in two or three words.
        reason: Evidence for it, and the remedy.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Records of the starts by step, for the process that differs.

    Attributes:
        difference: The first difference.
        straight: Uninterrupted run.
        again: Repetition of the uninterrupted run, up to the difference.
        stopped: Killed run.
        found: Run that differs: `stopped`, or the resumed run.
        restored_at: Step that the resumed run started from; None if there was no resume yet.
        is_reproducible: Whether uninterrupted runs are equal.
    """

    difference: Difference
    straight: Mapping[int, Line]
    again: Mapping[int, Line]
    stopped: Mapping[int, Line]
    found: Mapping[int, Line]
    restored_at: int | None
    is_reproducible: bool

    def suspects(self, owners: tuple[str, ...]) -> list[str]:
        """Return the attributes of these objects that explain the difference, in the order of the owners.

        In a reproducible script these are attributes that a resume changes but no straight run. Otherwise they are
        random generators that begin differently in each start.

        Args:
            owners: Prefixes of the objects' names.
        """
        if self.is_reproducible and self.restored_at is not None:
            before, after = self.straight[self.restored_at], self.found[self.restored_at]
            usual = self._differing(before, self.stopped.get(self.restored_at, before))
            names = [name for name in self._differing(before, after) if name not in usual]
        else:
            first = min(self.straight)
            others = [lines[first] for lines in (self.again, self.stopped) if first in lines]
            names = [name for other in others for name in self._differing(self.straight[first], other)]
            names = [name for name in dict.fromkeys(names) if self.is_generator(name)]
        return [*dict.fromkeys(name for owner in owners for name in names if name.startswith(owner))]

    def is_generator(self, name: str) -> bool:
        """Return whether an attribute is a random generator."""
        return any(
            line.hints["attributes"].get(name, "").startswith(GENERATOR)
            for lines in (self.straight, self.found)
            for line in lines.values()
        )

    @staticmethod
    def _differing(one: Line, other: Line) -> list[str]:
        marks, others = one.hints["attributes"], other.hints["attributes"]
        return [name for name in {**marks, **others} if marks.get(name) != others.get(name)]


def find_cause(evidence: Evidence) -> Cause:
    """Return the likely cause, which depends on the part that differs."""
    difference = evidence.difference
    if difference.step == 0 and difference.part in ("model", "unsaved"):
        return _other_beginning()
    if difference.part == "ids":
        return _other_ids()
    if difference.part == "batch":
        return _other_batch(evidence)
    if not evidence.is_reproducible:
        return _not_reproducible(evidence)
    if difference.is_restored:
        return _not_restored(evidence)
    return _other_loss(evidence) if difference.part == "loss" else _other_step(evidence)


def _other_beginning() -> Cause:
    return Cause(
        "other weights at the beginning",
        "two starts of the script make different models, though the generators of torch, numpy and random are seeded "
        "before: something else that is random makes them",
    )


def _other_ids() -> Cause:
    return Cause(
        "data order",
        "the step was made of other samples; give the dataset the same length and the Trainer the same seed in every "
        "start",
    )


def _other_batch(evidence: Evidence) -> Cause:
    when = "" if evidence.is_reproducible else "; two uninterrupted runs differ as well"
    suspects = evidence.suspects(_DATA)
    generators = [name for name in suspects if evidence.is_generator(name)]
    if _is_stream(evidence):
        what = "the stream gave another batch"
        if _are_known_samples(evidence) or (suspects and not generators):
            details = (
                f", and {_have(suspects)} another value after the resume than in the straight run" if suspects else ""
            )
            remedy = "let its order follow from a seed, and its state_dict() tell how far it was read"
            return Cause("data order", f"{what}{details}{when}; {remedy}")
    else:
        what = "the same sample ids gave another batch"
        if _are_known_samples(evidence):
            remedy = "let the dataset have the same order in every start: sort what it lists, shuffle by a fixed seed"
            return Cause("data order", f"{what}, of samples that the straight run had elsewhere{when}; {remedy}")
    if generators:
        return Cause("dataset randomness", f"{what}: {_are_generators(generators)}{when}; {_USE_THE_GLOBAL_ONES}")
    if suspects:
        return Cause(
            "dataset randomness",
            f"{what}: {_have(suspects)} another value after the resume than in the straight run{when}; let a sample "
            "follow from its index alone, or keep the object in run.stateful",
        )
    return Cause(
        "dataset randomness",
        f"{what}: dataset or collator draw from a generator of their own, read the clock, or have another order in "
        f"each start{when}; {_USE_THE_GLOBAL_ONES}",
    )


def _is_stream(evidence: Evidence) -> bool:
    """Return whether there are no sample ids."""
    ids = evidence.found[evidence.difference.step].parts["ids"]
    return not any(indices for name, indices in ids.items() if name.startswith("micro-batch"))


def _are_known_samples(evidence: Evidence) -> bool:
    """Return whether most differing samples occur elsewhere in the straight run."""
    step = evidence.difference.step
    usual = evidence.straight[step].hints["samples"]
    others = [mark for place, mark in evidence.found[step].hints["samples"].items() if mark != usual.get(place)]
    known = {mark for line in evidence.straight.values() for mark in line.hints.get("samples", {}).values()}
    return bool(others) and 2 * sum(mark in known for mark in others) >= len(others)


def _not_reproducible(evidence: Evidence) -> Cause:
    suspects = evidence.suspects(_MODEL + _LISTENERS)
    if suspects:
        return Cause(
            "RNG",
            f"{_are_generators(suspects)}, seeded otherwise in every start; {_USE_THE_GLOBAL_ONE}",
        )
    if evidence.difference.part == "states":
        return Cause(
            "a state that depends on the clock or the machine",
            f"{_owner(evidence.difference)} differs though model and optimizer are equal, and it does so in two "
            "uninterrupted runs: keep in it only what follows from the training, no times, speeds, memory or paths",
        )
    return Cause(
        "nondeterministic kernel",
        "all was equal before, and two uninterrupted runs differ as well: an operation of the device that gives "
        "other bits each time (torch.use_deterministic_algorithms(True) names it), or something that draws from the "
        "system's randomness or reads the clock",
    )


def _not_restored(evidence: Evidence) -> Cause:
    part, name = evidence.difference.part, evidence.difference.name
    if part == "states" and not name.startswith("the schedule"):
        return Cause(
            "a state that does not come back",
            f"{_owner(evidence.difference)} is not after load_state_dict() what it was before: let its two methods "
            "fit, and change nothing that counts in on_save or on_train_begin",
        )
    suspects = evidence.suspects(_LISTENERS)
    details = f"; {_have(suspects)} another value than in the straight run" if suspects else ""
    return Cause(
        "a state that does not come back",
        "the resumed run begins otherwise than the straight run continued: something changes it after the checkpoint "
        f"was made or loaded, such as a callback in on_save or on_train_begin{details}",
    )


def _other_loss(evidence: Evidence) -> Cause:
    suspects = evidence.suspects(_MODEL)
    generators = [name for name in suspects if evidence.is_generator(name)]
    buffers = _buffers_not_saved(evidence)
    same = "the same weights and the same batch gave another loss"
    if generators:
        return Cause("RNG", f"{same}: {_are_generators(generators)}; {_USE_THE_GLOBAL_ONE}")
    if not (suspects or buffers):
        return Cause(
            "RNG",
            f"{same}: the model or the loss draw from a generator of their own, or hold another state that cannot be "
            f"seen from outside; {_USE_THE_GLOBAL_ONE}",
        )
    return Cause(
        "an object without state",
        f"{same}: {_have([*buffers, *suspects])} another value after the resume than in the straight run; make it a "
        "buffer that is saved, or keep the object in run.stateful",
    )


def _other_step(evidence: Evidence) -> Cause:
    suspects = [*_buffers_not_saved(evidence), *evidence.suspects(_LISTENERS)]
    remedy = "give the callback state_dict() and load_state_dict(), or keep the object in run.stateful"
    if suspects:
        return Cause(
            "a callback or object without state",
            f"{_have(suspects)} another value after the resume than in the straight run; {remedy}",
        )
    return Cause(
        "a callback or object without state",
        "batch, loss and all before it are equal: a callback, the optimizer or the schedule counts on its own, and no "
        f"checkpoint keeps that; {remedy}",
    )


def _owner(difference: Difference) -> str:
    """Return the owner of the differing state: "callback EMA", "run.stateful counter"."""
    kind, _, rest = difference.name.partition(" ")
    return f"{kind} {rest.partition('.')[0]}"


def _buffers_not_saved(evidence: Evidence) -> list[str]:
    """Return the buffers with persistent=False that a resume changes."""
    if evidence.restored_at is None:
        return []
    lines = evidence.straight[evidence.restored_at], evidence.found[evidence.restored_at]
    one, other = (line.parts["unsaved"] for line in lines)
    return [
        f"the buffer {name} of the model, which is not saved,"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]


def _have(names: list[str]) -> str:
    """Return subject and verb of a sentence whose object follows."""
    return f"{_listed(names)} {'has' if len(names) == 1 else 'have'}"


def _are_generators(names: list[str]) -> str:
    what = "is a generator" if len(names) == 1 else "are generators"
    return f"{_listed(names)} {what} of random numbers that no checkpoint keeps"


def _listed(names: list[str]) -> str:
    """Join names as a user writes them: train_dataset.noise, the script's rng."""
    return join_names(name.replace("the script: ", "the script's ").replace(": ", ".", 1) for name in names)
