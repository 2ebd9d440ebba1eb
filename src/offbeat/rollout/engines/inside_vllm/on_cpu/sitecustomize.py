"""Has vLLM's processes sleep where they wait for one another; Python imports this by its name, in each of them.

On CPUs a scheduler and a worker wait for one another by yielding in a loop. Linux (seen with 6.18) may let two such
loops have two cores for seconds: the server's own front end, and whoever calls it, stand still meanwhile. A sleep of no
length costs a step some 50 microseconds and gives the core away.
"""

import os
import time


def _give_way() -> None:
    time.sleep(0)


os.sched_yield = _give_way
