"""The tree of exceptions has each one below its base."""

from __future__ import annotations

from site_builder.exceptions import exceptions, tree

from trainer_kit import errors


def test_the_tree_is_complete() -> None:
    kinds = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}
    assert {kind for _, kind in tree()} == kinds


def test_an_exception_stands_below_its_base_with_its_built_in_class() -> None:
    page = exceptions()
    assert page.startswith("- [`TrainerKitError`](#trainer_kit.errors.TrainerKitError): ")
    assert "\n    - [`CheckpointError`](#trainer_kit.errors.CheckpointError) (`ValueError`): " in page
    assert "\n        - [`UnreadableError`](#trainer_kit.errors.UnreadableError): " in page
