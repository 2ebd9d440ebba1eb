"""A plan for people: in words, with what holds it back, and as a picture."""
