"""Training logs of any framework → `Curves` under canonical names: ``read(path)``.

`read` finds the reader (`sniff`), which turns lines into records; `assemble` makes runs of them.
"""

from diagnose.logs.importer import MAX_REJECTED, read
from diagnose.logs.model import Counts, Import, Record, Rejected, Run
from diagnose.logs.store import read_curves, write_curves

__all__ = [
    "MAX_REJECTED",
    "Counts",
    "Import",
    "Record",
    "Rejected",
    "Run",
    "read",
    "read_curves",
    "write_curves",
]
