"""Launcher of a run's processes: `config` sets what to start, `processes` starts and watches it.

Each process that runs a script imports this package first: the import must stay cheap, so it imports nothing.
"""
