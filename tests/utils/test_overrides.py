"""Names of transformers' and Lightning's classes that training here would not call are refused, with what does it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit import Callback, Trainer, TrainingArguments
from trainer_kit.utils.overrides import _OWN_ATTRIBUTES, _OWN_METHODS, REPLACEMENTS, check_lightning_module

CALLED_BY_USERS = {
    "train", "predict", "args", "log_metrics", "save_metrics", "save_state", "create_model_card",
    "is_world_process_zero", "is_local_process_zero",
}  # fmt: skip
"""Names of transformers' Trainer that have the same meaning here."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean()


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True
    )


def make(kind: type[Trainer], folder: Path, model: nn.Module | None = None, **given: Any) -> Trainer:
    return kind(model or Model(), arguments(folder), [{"x": torch.ones(2)}] * 8, **given)


def transformers_trainer() -> tuple[type, set[str], set[str]]:
    """The class, the names that it and its bases define, and the attributes that it sets on itself."""
    from transformers import Trainer as Theirs

    methods = {name for kind in Theirs.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    source = ast.parse(textwrap.dedent(inspect.getsource(Theirs)))
    attributes = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return Theirs, methods, attributes


def test_every_name_of_the_installed_transformers_has_a_replacement() -> None:
    _, methods, attributes = transformers_trainer()
    assert len(methods) > 80
    assert len(attributes) > 40
    missing = (methods | attributes) - set(REPLACEMENTS) - CALLED_BY_USERS
    assert not missing, f"without a replacement: {sorted(missing)}"


def test_the_names_taken_as_own_are_the_trainers(tmp_path: Path) -> None:
    assert {name for name in REPLACEMENTS if hasattr(Trainer, name)} == _OWN_METHODS
    settable = {name for name in _OWN_METHODS if getattr(getattr(Trainer, name), "fset", None)}
    assert {name for name in REPLACEMENTS if name in vars(make(Trainer, tmp_path))} | settable == _OWN_ATTRIBUTES


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_a_subclass_with_a_name_that_is_not_called_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"^Mine defines {name}, which training here does not call: ") as caught:
        type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
    assert REPLACEMENTS[name] in str(caught.value)


def test_a_mixin_before_or_after_the_trainer_is_refused() -> None:
    class Weighted:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any: ...

        def training_step(self, *args: Any) -> Any: ...

    sentence = (
        r"defines compute_loss \(in Weighted\), training_step \(in Weighted\).*compute_loss=function.*on_step_end"
    )
    for bases in ((Weighted, Trainer), (Trainer, Weighted)):
        with pytest.raises(TypeError, match=sentence):
            type("Mine", bases, {})


def test_a_class_that_is_changed_later_is_refused_when_its_object_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(Trainer):
        pass

    make(Mine, tmp_path)
    for kind in (Mine, Trainer):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "training_step", lambda *args: None, raising=False)
            with pytest.raises(TypeError, match="defines training_step"):
                make(Mine, tmp_path)


def test_subclasses_with_names_of_their_own_train(tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, *args: Any, scale: float, **kwargs: Any) -> None:
            self.scale = scale
            super().__init__(*args, compute_loss=self.scaled, **kwargs)

        def scaled(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return self.scale * model(**batch)  # type: ignore[no-any-return]

        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    model = Model()
    assert make(Mine, tmp_path, model, scale=0.0).train().training_loss == 0.0


def test_attributes_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    trainer = make(Trainer, tmp_path)
    with pytest.raises(AttributeError, match=r"Trainer.compute_loss_func is set, which .*compute_loss=function"):
        trainer.compute_loss_func = lambda *args: None
    with pytest.raises(AttributeError, match="train_dataset="):
        trainer.train_dataset = []
    with pytest.raises(AttributeError, match="on_substep_end"):
        trainer.training_step = types.MethodType(lambda self, model, inputs: None, trainer)

    class Mine(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.label_names = ["labels"]

    with pytest.raises(AttributeError, match=r"^Mine.label_names is set"):
        make(Mine, tmp_path)


def test_what_the_trainer_reads_can_be_set(tmp_path: Path) -> None:
    model = Model()
    trainer = make(Trainer, tmp_path, model)
    trainer.compute_loss = lambda model, batch: model(**batch) * 0 + 3
    assert trainer.train().training_loss == 3.0


def test_the_parts_of_a_trainer_cannot_be_replaced(tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, name: str, value: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.run = self.run
            setattr(self, name, value)

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for name, value, sentence in (
        ("run", "a tracker's", "Mine.run is set, which holds the model"),
        ("events", [], "Mine.events is set, which holds the callbacks"),
        ("args", TrainingArguments(), "Mine.args is set, but holds the arguments of the run"),
    ):
        with pytest.raises(AttributeError, match=sentence):
            Mine(name, value, model=Model(), args=args)
    with pytest.raises(TypeError, match=r"metrics\['train'\] is a list without update"):
        Mine("metrics", {"train": []}, model=Model(), args=args).evaluate([{"x": torch.ones(2)}])
    assert Mine("args", args, model=Model(), args=args).args is args
    assert Mine("objective", "mine", model=Model(), args=args).objective == "mine"


@pytest.mark.slow
def test_refusing_needs_no_transformers() -> None:
    code = (
        "import sys\n"
        "from trainer_kit import Trainer\n"
        "try:\n    class Mine(Trainer):\n        def log(self, logs): ...\n"
        "except TypeError as error: print(error)\n"
        "assert 'transformers' not in sys.modules and 'lightning' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "Mine defines log" in done.stdout


def test_transformers_own_subclass_moved_here_is_refused() -> None:
    """Every override of transformers' own Trainer subclass is found when its methods stand under the Trainer here."""
    from transformers import Seq2SeqTrainer

    methods = {name: value for name, value in vars(Seq2SeqTrainer).items() if not name.startswith("__")}
    with pytest.raises(TypeError, match=r"evaluate.*prediction_step|prediction_step.*evaluate") as caught:
        type("Moved", (Trainer,), methods)
    assert "metrics=" in str(caught.value)


def test_transformers_arguments_mean_what_they_mean_there() -> None:
    from transformers import TrainingArguments as Theirs

    args = Trainer(Model(), Theirs(use_cpu=True, bf16=True, seed=3), []).args
    assert (args.use_cpu, args.mixed_precision, args.seed) == (True, "bf16", 3)
    with pytest.raises(TypeError, match=r"args is a builtins.dict; give trainer_kit's TrainingArguments"):
        Trainer(Model(), {"seed": 3}, [])


def test_a_transformers_callback_is_told_the_way(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Watching(TrainerCallback):  # type: ignore[misc]
        pass

    for given in (Watching(), Watching):
        with pytest.raises(TypeError, match=r"give trainer_kit.callbacks.from_transformers\(Watching\)"):
            make(Trainer, tmp_path, callbacks=[given])


def test_methods_named_like_hooks_that_are_none_are_warned_of(tmp_path: Path) -> None:
    class Counting(Callback):
        def on_train_batch_end(self, *args: Any) -> None: ...

        def on_steps_end(self, run: Any) -> None: ...

    with pytest.warns(UserWarning, match="which is no hook of a Callback and is never called") as caught:
        make(Trainer, tmp_path, callbacks=[Counting()])
    sentences = [str(each.message) for each in caught]
    assert any("Counting defines on_train_batch_end, which is no hook" in each for each in sentences)
    assert any("defines on_steps_end" in each and "the nearest is on_step_end" in each for each in sentences)


class LightningModule(nn.Module):
    """Stands for Lightning's, whose name and module tell what it is."""

    __module__ = "lightning.pytorch.core.module"

    def training_step(self, *args: Any) -> Any:
        raise NotImplementedError

    def validation_step(self, *args: Any) -> Any: ...

    def configure_optimizers(self) -> Any: ...

    def on_train_epoch_end(self) -> None: ...

    def train_dataloader(self) -> Any: ...

    def optimizer_zero_grad(self, *args: Any) -> None: ...

    def log(self, *args: Any) -> None: ...

    @property
    def current_epoch(self) -> int:
        return 0

    @classmethod
    def load_from_checkpoint(cls, path: str) -> Any: ...


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self(batch["x"]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_lightning_module_is_refused_until_its_methods_are_given(tmp_path: Path) -> None:
    module = Module()
    with pytest.raises(TypeError, match=r"LightningModule \(Module\).* training_step: give .* or configure_optimizers"):
        make(Trainer, tmp_path, module)
    loss = {"compute_loss": lambda module, batch: module.training_step(batch, 0)}
    with pytest.raises(TypeError, match=r"and not configure_optimizers: give optimizer="):
        make(Trainer, tmp_path, module, **loss)
    result = make(Trainer, tmp_path, module, **loss, optimizer=module.configure_optimizers()).train()
    assert result.training_loss > 0


def test_what_else_a_lightning_module_overrides_is_warned_of(tmp_path: Path) -> None:
    class Validating(Module):
        def validation_step(self, batch: Any, number: int) -> None: ...

    given = {"compute_loss": lambda module, batch: module.training_step(batch, 0), "optimizer": torch.optim.SGD}
    with pytest.warns(UserWarning, match="does not call validation_step of the LightningModule Validating"):
        make(Trainer, tmp_path, Validating(), **given)


class Logging(Module):
    """As the models of pytorch-forecasting: it overrides what its own methods or the user call, too."""

    def log(self, *args: Any) -> None: ...

    @property
    def current_epoch(self) -> int:
        return 1

    @classmethod
    def load_from_checkpoint(cls, path: str) -> Any: ...


class Hooked(Logging):
    def on_train_epoch_end(self) -> None: ...

    def train_dataloader(self) -> Any: ...

    def optimizer_zero_grad(self, *args: Any) -> None: ...


def test_methods_that_lightning_does_not_call_are_not_in_the_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_lightning_module(Logging(), has_loss=True, has_optimizer=True)
    with pytest.warns(
        UserWarning, match="does not call on_train_epoch_end, optimizer_zero_grad, train_dataloader of the"
    ):
        check_lightning_module(Hooked(), has_loss=True, has_optimizer=True)


def test_a_plain_module_with_a_method_of_that_name_trains(tmp_path: Path) -> None:
    class Stepping(Model):
        def training_step(self) -> None: ...

    assert make(Trainer, tmp_path, Stepping()).train().global_step == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokenizer": None}, "Trainer has no argument 'tokenizer': give processing_class="),
        ({"optimizers": (None, None)}, "Trainer has no argument 'optimizers': give optimizer= and lr_scheduler=, each"),
        ({"compute_loss_func": None}, "Trainer has no argument 'compute_loss_func': give compute_loss=function; "),
        (
            {"max_epochs": 3},
            "Trainer has no argument 'max_epochs': give Trainer(args=TrainingArguments(max",
        ),
        (
            {"learning_rate": 3},
            "Trainer has no argument 'learning_rate': give Trainer(args=Training",
        ),
        ({"flavour": 3}, "Trainer has no argument 'flavour'"),
        (
            {"flavour": 3, "tokenizer": 1},
            "Trainer has no argument 'flavour'; Trainer has no argument 'tokenizer': ",
        ),
    ],
)
def test_an_argument_of_another_trainer_is_refused_with_its_replacement(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TypeError) as raised:
        Trainer(nn.Linear(2, 2), **arguments)
    assert str(raised.value).startswith(sentence)


@pytest.mark.parametrize("name", ["model", "run", "compute_loss", "optimizer"])
def test_an_attribute_that_is_read_too_early_says_so(name: str) -> None:
    class Mine(Trainer):
        def __init__(self) -> None:
            getattr(self, name)

    with pytest.raises(AttributeError, match=f"^Mine.{name} is read before Trainer.__init__ has run; call super"):
        Mine()


@pytest.mark.parametrize("name", ["add_callback", "remove_callback", "pop_callback", "state", "log"])
def test_an_attribute_of_another_trainer_is_missing_with_its_replacement(name: str, tmp_path: Path) -> None:
    trainer = Trainer(nn.Linear(2, 2), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    with pytest.raises(AttributeError) as raised:
        getattr(trainer, name)
    assert str(raised.value) == f"'Trainer' object has no attribute {name!r}: {REPLACEMENTS[name]}"
    assert not hasattr(trainer, "flavour")


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("push_to_hub", "PushToHub('me/my-model')"),
        ("neftune_hook_handle", "TrainingArguments(neftune_noise_alpha=)"),
    ],
)
def test_what_stands_for_the_hub_and_for_neftune(name: str, todo: str) -> None:
    assert todo in REPLACEMENTS[name]
