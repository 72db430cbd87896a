from __future__ import annotations

import pytest

from trainer_kit.config.optimizer_options import optimizer_options, parse_options


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("momentum=0.9, nesterov=True", {"momentum": 0.9, "nesterov": True}),
        ("ns_steps=5", {"ns_steps": 5.0}),
        ("momentum", None),
        ("=1", None),
        ("momentum=x", None),
        ("momentum=1,momentum=2", None),
    ],
)
def test_parsing(text: str, parsed: dict[str, float | bool] | None) -> None:
    assert parse_options(text) == parsed


def test_options_have_the_types_of_torchs_arguments() -> None:
    options = optimizer_options("muon", "ns_steps=6,momentum=0.5,nesterov=false")
    assert repr(options) == "{'ns_steps': 6, 'momentum': 0.5, 'nesterov': False}"
    assert optimizer_options("adamw_torch", None) == {}


@pytest.mark.parametrize(
    ("optim", "text", "message"),
    [
        ("adamw_torch", "momentum=0.9", "has no effect with optim='adamw_torch'; set optim to one of 'sgd', "),
        ("sgd", "ns_steps=5", "has ns_steps; SGD takes momentum, dampening, nesterov, see also weight_decay"),
        ("muon", "dampening=0.5", "has dampening; Muon takes momentum, nesterov, ns_steps, see also weight_decay"),
        ("muon", "ns_steps=2.5", "has ns_steps=2.5; give a whole number from 1 to 99"),
        ("muon", "ns_steps=true", "has ns_steps=True; give a whole number from 1 to 99"),
        ("muon", "ns_steps=0", "has ns_steps=0.0; give a whole number from 1 to 99"),
        ("muon", "nesterov=1", "has nesterov=1.0; give true or false"),
        ("sgd", "momentum=true", "has momentum=True; give a number from 0"),
        ("sgd", "momentum=-1", "has momentum=-1.0; give a number from 0"),
        ("sgd", "nesterov=true", "has nesterov without momentum, or with dampening; set momentum above 0 alone"),
    ],
)
def test_what_is_refused(optim: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_options(optim, text)
