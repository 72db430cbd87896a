"""From `args.strategy` to a Strategy."""

from __future__ import annotations

from trainer_kit import environment
from trainer_kit.arguments import TrainingArguments
from trainer_kit.precision import Precision
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.single import SingleDevice


def choose_strategy(args: TrainingArguments, strategy: Strategy | None = None) -> Strategy:
    """The strategy for this run: the user's own one, else the one that `args.strategy` and the environment ask for.

    Raises:
        TypeError: If `strategy` is no Strategy.
        ValueError: If a launcher started several processes, which would each train alone.
    """
    if strategy is None:
        if environment.world_size() > 1:
            raise ValueError(
                f"a launcher started {environment.world_size()} processes, but strategy={args.strategy!r} trains with "
                "one: each would train alone; start the script without the launcher"
            )
        strategy = SingleDevice("cpu" if args.use_cpu else None)
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy={strategy!r} is no Strategy; give an instance such as SingleDevice('cuda:1')")
    if strategy.precision is None:
        strategy.precision = Precision(args.mixed_precision)
    return strategy
