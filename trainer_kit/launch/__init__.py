"""Starts the processes of a run: `config` says what to start, `processes` starts and watches it.

Each process that runs a script begins in this package: importing it must stay cheap, so it imports nothing.
"""
