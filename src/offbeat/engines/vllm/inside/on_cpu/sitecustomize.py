"""Makes vLLM's processes on CPUs sleep instead of yield; Python imports this by its name. Only tests run vLLM on CPUs.

Scheduler and worker wait for one another by yielding in a loop. Linux (seen with 6.18) may give two such loops two
cores for seconds, and the server's front end and its callers stand still. A sleep of 0 costs a step about 50
microseconds.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0)
