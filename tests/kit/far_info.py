"""A device that a step must not wait for."""

from __future__ import annotations

from trainer_kit.strategies.device_info import DeviceInfo


class FarInfo(DeviceInfo):
    """A CPU on which reading counts as waiting."""

    @property
    def reads_without_sync(self) -> bool:
        return False
