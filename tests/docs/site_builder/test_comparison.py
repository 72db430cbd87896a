"""A recorded output fits one that differs in times, paths and rounding only."""

from __future__ import annotations

import pytest
from site_builder.comparison import differences

SVG = (
    '<figure><svg viewBox="0 0 1 1" role="img" aria-label="Loss by step. last {last} at step 456."><path d="M1"/></svg>'
)
SAMPLED = "sampled text\n------------\n{}\n------------\nperplexity 581.6"


@pytest.mark.parametrize(
    ("recorded", "seen"),
    [
        ("loss 0.5000", "loss  0.5001"),
        ("accuracy 98.50%", "accuracy 98.25%"),
        ("12,000 steps", "12,000 steps"),
        ("456 steps in 9.1 s, 1,480 samples/s", "456 steps in 1,027 s, 96.2 samples/s"),
        ("456 steps in 9.1 s, peak", "456 steps in 2 min 3 s, peak"),
        ("loss=1, 9.1 s, 22 samples/s, peak 1 GiB;", "loss=1, 1 min 3 s, 1.5 samples/s, peak 900 MiB;"),
        ("Time: 3.21\nSamples/second: 99.00", "Time: 30.21\nSamples/second: 9.00"),
        ("checkpoint-38  2026-03-01 10:05  1.391 GiB  valid", "checkpoint-38  2027-01-01 00:00  25 KiB  valid"),
        ("weights: 00c1ab72de59f0aa", "weights: 11c1ab72de59f0bb"),
        ("time\ndata   1.2 s   80%\nloop 0.3 s  20%\n\nend", "time\nloop 2.3 s  100%\n\nend"),
        ("at 71.2 GFLOP/s, that\ntakes 0.37 s", "at 1,071.2 GFLOP/s,\nthat takes 0.4 s"),
        (SAMPLED.format("the cat"), SAMPLED.format("the\n dog sat")),
        ("model continues 'A class definition':\na b\nend", "model continues 'A class definition':\na c d\nend"),
        ("newest checkpoint: step 15", "newest checkpoint: step 10"),
        ("1 process, torch 2.13.0+cpu, saved", "1 process, torch 2.13.0+cu130, saved"),
        ("1 process, torch 2.13.0+cpu, saved", "1 process, torch 2.13.0, saved"),
        ("the best is checkpoint-266", "the best is checkpoint-342"),
        (
            "checkpoint-266  1 s  valid, the best (accuracy 0.995)",
            "checkpoint-76  1 s  valid, the best (accuracy 0.99)",
        ),
        (SVG.format(last="0.50"), SVG.format(last="0.51").replace("M1", "M2")),
    ],
)
def test_what_may_differ(recorded: str, seen: str) -> None:
    assert differences(recorded, seen) == []


@pytest.mark.parametrize(
    ("recorded", "seen"),
    [
        ("loss 0.5", "loss 0.6"),
        ("loss 0.5", "loss -0.5"),
        ("loss 0.5", "loss nan"),
        ("loss 0.5", "error 0.5"),
        ("456 steps", "500 steps"),
        ("456 steps in 9.1 s", "500 steps in 9.1 s"),
        ("weights 2 GiB of the model\n", "gradients 2 GiB of the model\n"),
        ("a\nb", "a"),
        ("a", "a\nb"),
        ("bin/python -m module", "bin/python3 -m module"),
        ("weights: 00c1ab72de59f0aa: the same", "weights: 00c1ab72de59f0aa: DIFFERENT"),
        (SAMPLED.format("the cat"), SAMPLED.format("the cat").replace("581", "681")),
        ("model continues 'A class definition':\na b\nend", "model continues 'A class definition':\na b\nother"),
        (SVG.format(last="0.5"), SVG.format(last="0.7")),
    ],
)
def test_what_must_not_differ(recorded: str, seen: str) -> None:
    assert len(differences(recorded, seen)) == 1
