"""Builds the documentation site: pages of `docs/`, a reference made from the code, and checks of the result."""
