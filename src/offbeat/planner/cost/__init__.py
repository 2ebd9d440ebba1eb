"""The cost model: times and memory of machine shapes, as functions in SI units without any search."""
