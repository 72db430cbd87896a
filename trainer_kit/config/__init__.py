"""Configuration of a run: arguments, their validation, and the launcher's environment."""
