"""Composer: the page "Coming from Composer" names what exists, and its script trains as ours does."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path

import pytest
from kit.name_tables import Names, example, named, problems, public, version

pytest.importorskip("composer")
pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.filterwarnings("ignore:Cannot split tensor of length"),
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize object:pytest.PytestUnraisableExceptionWarning"),
]
"""The warnings are Composer's own."""


def names() -> Names:
    import composer
    from composer import algorithms, callbacks, optim

    scopes = (callbacks, algorithms, optim, composer, composer.ComposerModel)
    return Names({"trainer": composer.Trainer}, scopes, (composer.Trainer,), {"composer": ("-n",)})


def test_each_name_exists() -> None:
    assert problems("composer", names()) == []
    assert importlib.metadata.version("mosaicml").startswith(f"{version('composer').split()[1]}.")


def test_what_is_public_is_on_the_page() -> None:
    import composer
    from composer import algorithms, callbacks

    parts = {
        "AugmentAndMixTransform",
        "ColOutTransform",
        "RandAugmentTransform",
        "SqueezeExcite2d",
        "SqueezeExciteConv2d",
    }
    wanted = {*inspect.signature(composer.Trainer).parameters, *composer.Event.__members__}
    assert (wanted | public(callbacks) | (public(algorithms) - parts)) - named("composer") == set()


def test_the_script_trains_the_same(tmp_path: Path) -> None:
    before = example("composer_before")(str(tmp_path / "before"), shuffle=False)
    after = example("composer_after")(str(tmp_path / "after"), shuffle=False)
    for name in ("eval_loss", "eval_accuracy"):
        assert after[name] == pytest.approx(before[name], rel=1e-4)
