"""The cost model: seconds and bytes of machine shapes, as functions in SI units without any search."""
