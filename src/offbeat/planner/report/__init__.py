"""A plan for people: as text, with the reasons for its limits, and as a plot."""
