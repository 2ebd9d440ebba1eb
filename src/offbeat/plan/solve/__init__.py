"""From a problem in numbers to counts that are proven near the best, and the check that needs no solver."""
