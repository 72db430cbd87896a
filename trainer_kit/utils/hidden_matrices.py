"""The matrices of a model's hidden layers, without those of embeddings and the head."""

from __future__ import annotations

from torch import nn

from trainer_kit.utils.wrappers import without_wrappers


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the 2-D parameters but those of embeddings, biases, and the head.

    The head is the output embeddings of a transformers model, else the last module with a 2-D parameter.
    """
    model = without_wrappers(model)
    found: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    last: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        own = {f"{path}.{name}".lower(): each for name, each in module.named_parameters(recurse=False)}
        two = {name: each for name, each in own.items() if each.ndim == 2}
        found.update(two.values())
        last = set(two.values()) or last
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        others.update(each for name, each in two.items() if is_table or "embed" in name or "bias" in name)
    head = _output_embeddings(model)
    return found - others - (last if head is None else set(head.parameters()))


def _output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the output embeddings of a transformers model that has some, else None."""
    try:
        head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return head
