"""Output of `trainer-kit verify`."""

from __future__ import annotations

import textwrap

from trainer_kit.tools.verify.compare import PARTS, Difference
from trainer_kit.tools.verify.kill_plan import MOMENTS
from trainer_kit.tools.verify.verification import Result

_WIDTH = 100


def describe(result: Result, command: str) -> str:
    """Format the result for a terminal.

    Args:
        result: Result of the verification.
        command: Command line that repeats it.
    """
    facts = _difference(result) if result.difference is not None else {"compared": _compared(result)}
    facts |= {"killed": _killed(result), "resumed": _resumed(result), "again": command}
    width = max(map(len, facts))
    lines = [_headline(result)]
    for name, text in facts.items():
        if text:
            indent = " " * (width + 4)
            body = text if name == "again" else textwrap.fill(text, _WIDTH - len(indent), break_on_hyphens=False)
            lines.append(f"  {name:{width}}  " + body.replace("\n", f"\n{indent}"))
    return "\n".join(lines)


def _headline(result: Result) -> str:
    difference = result.difference
    if difference is None:
        return f"bitwise equal: {result.steps} of {result.total_steps} steps, killed and resumed"
    if difference.is_restored:
        return f"diverged: at the resume from checkpoint-{difference.step}, before its first step"
    if difference.step == 0:
        return "diverged: before the first step"
    if result.resumed_from is None:
        return f"diverged: in step {difference.step}, without a kill"
    return f"diverged: in step {difference.step}, number {difference.step - result.resumed_from} after the resume"


def _difference(result: Result) -> dict[str, str]:
    difference, cause = result.difference, result.cause
    assert difference is not None
    assert cause is not None
    what = ": ".join(filter(None, (PARTS[difference.part], difference.name)))
    what += f" differs {result.amount}" if result.amount else f" is {_values(difference)}"
    if difference.others:
        what += f"; {difference.others:,} more of this kind differ{'s' * (difference.others == 1)}"
    if difference.rank:
        what += f" (process {difference.rank})"
    return {"first": what, "likely": f"{cause.name}: {cause.reason}"}


def _values(difference: Difference) -> str:
    """Return both values; a float's bits, the second word of its mark, only if the values print alike."""
    found, expected = (
        ("missing" if mark is None else mark).split() for mark in (difference.found, difference.expected)
    )
    if len(found) == len(expected) == 2 and found[0] != expected[0] and found[1].startswith(("0x", "-0x")):
        found, expected = found[:1], expected[:1]
    return f"{' '.join(found)} instead of {' '.join(expected)}"


def _compared(result: Result) -> str:
    counts = result.counts
    return (
        "after each step: sample ids, batches, loss, gradient norm, learning rate, the model's weights and buffers "
        f"({counts['model'] + counts['unsaved']:,} tensors), the optimizer ({counts['optimizer']:,} values), states of "
        f"callbacks, run.stateful and the schedule ({counts['states']:,} values), logged losses"
    )


def _killed(result: Result) -> str:
    kill = result.kill
    return f"in step {kill.step}, {MOMENTS[kill.moment]}, by SIGKILL" if kill is not None else ""


def _resumed(result: Result) -> str:
    at, kill = result.resumed_from, result.kill
    return f"from checkpoint-{at}" if at is not None and kill is not None else ""
