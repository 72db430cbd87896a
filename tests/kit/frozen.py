"""Imported last by a server that forks processes: their garbage collections leave alone what it has imported.

A collection writes to each object that it visits, so that the system copies the memory that the processes share.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
