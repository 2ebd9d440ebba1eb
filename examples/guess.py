"""An environment: the model guesses a number, and is told whether the number is higher or lower."""

import random

from offbeat.environments.protocol import Done


class Guess:
    deterministic = True

    def __init__(self, highest: int = 31, guesses: int = 5):
        self.highest, self.guesses = highest, guesses

    def begin(self, problem, seed):
        self.secret = random.Random(seed).randint(1, self.highest)
        return f"1 to {self.highest}: "

    def step(self, turn):
        guess = int(turn.text)  # a text that is no number raises; the model is told, and may try again once
        if guess == self.secret:
            return Done(1.0)
        if turn.number + 1 == self.guesses:
            return Done(0.0)
        return ">" if guess < self.secret else "<"
