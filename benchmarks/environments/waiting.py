"""Environments that wait, as the tools of real agents do, and some that misbehave."""

from __future__ import annotations

import os
import time

from offbeat.environments.latency import find_law
from offbeat.environments.protocol import Done


class Waiting:
    """Waits before each reply, by a law of latency; over after a number of turns that depends on the seed."""

    deterministic = True

    def __init__(self, law: str = "constant", scale: float = 0.0, cut_s: float = 60.0, mean_turns: int = 8):
        self.latency, self.mean_turns = find_law(law, scale=scale, cut_s=cut_s), mean_turns

    def begin(self, problem, seed):
        self.seed = seed
        self.num_turns = 1 + seed % (2 * self.mean_turns - 1)

    def step(self, turn):
        time.sleep(self.latency.seconds(self.seed, turn.number))
        return Done(1.0) if turn.number + 1 >= self.num_turns else "ok"


class Faulty:
    """Answers at once, except that the seeds 1, 2 and 3 hang, fork and eat memory."""

    def begin(self, problem, seed):
        self.seed = seed

    def step(self, turn):
        if self.seed == 1:
            time.sleep(1000)
        elif self.seed == 2:
            for _ in range(3):
                if os.fork() == 0:
                    time.sleep(1000)
            time.sleep(1000)
        elif self.seed == 3:
            hoard = []
            while True:
                hoard.append(bytearray(10 << 20))
        return "ok"


def nap(number: int) -> int:
    """Sleeps for half a minute."""
    time.sleep(30)
    return number
