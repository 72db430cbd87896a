"""The parts of pages that are made from the code, by the name that a page gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from site_builder import api
from site_builder.arguments import arguments
from site_builder.checkpoint_format import checkpoint_format
from site_builder.commands import command_line, exit_codes
from site_builder.environment import environment
from site_builder.exceptions import exceptions
from site_builder.hooks import callbacks_page
from site_builder.packages import packages
from site_builder.records import records
from site_builder.settings import (
    attributes_of_transformers,
    methods_of_transformers,
    settings_of_lightning,
    settings_of_transformers,
)

MAKERS: Mapping[str, Callable[[], str]] = {
    "trainer": functools.partial(api.listing, "trainer"),
    "arguments": arguments,
    "callbacks": callbacks_page,
    "strategies": functools.partial(api.listing, "strategies"),
    "accelerator": api.accelerator,
    "accelerator-utils": api.accelerator_utils,
    "memory": functools.partial(api.listing, "memory"),
    "trackers": functools.partial(api.listing, "trackers"),
    "commands": command_line,
    "checkpoint-format": checkpoint_format,
    "packages": packages,
    "records": records,
    "exceptions": exceptions,
    "exit-codes": exit_codes,
    "environment": environment,
    "settings-of-transformers": settings_of_transformers,
    "attributes-of-transformers": attributes_of_transformers,
    "methods-of-transformers": methods_of_transformers,
    "settings-of-lightning": settings_of_lightning,
}
