"""Updates of weights to measure the codec with: recorded, read or made up; and what else could code them."""
