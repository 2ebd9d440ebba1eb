"""The parts of the attack benchmark: one run, its honest workers, its adversaries, and the account of the ledger."""
