"""Read by every Python process whose PYTHONPATH names this directory: the table of stages leads to the rehearsal."""

import dataclasses

from eyrie_workers.catalog import CATALOG

for _name, _stage in list(CATALOG.items()):
    CATALOG[_name] = dataclasses.replace(_stage, module="rehearsal_stage",
                                         together="rehearsal_stage")
