from __future__ import annotations

import math

from trainer_kit.report import wording


def test_words() -> None:
    assert [wording.size(gib) for gib in (0.35, 12.3)] == ["358.4 MiB", "12.3 GiB"]
    assert [wording.percent(share) for share in (0.931, 0.39, 0.00077, 0)] == ["93.1 %", "39 %", "0.08 %", "0 %"]
    assert wording.moment(math.nan) == "unknown"
    assert wording.capitalized("a b") == "A b"
