"""Work outside this process: the caller's executor runs tasks, and a checkpoint folder keeps their results.

Rooms that have work to hand out ask `crew()` for the one in charge. `compile`, `plan`, `build`, `attack` and `recheck` put one in
charge for as long as they run.
"""

from partita.workers.checkpoint import Checkpoint
from partita.workers.content import Uncertain, content_of, keyed
from partita.workers.executors import processes, scheduler
from partita.workers.in_charge import Crew, crew, crew_of

__all__ = ["Checkpoint", "Crew", "Uncertain", "content_of", "crew", "crew_of", "keyed", "processes", "scheduler"]
