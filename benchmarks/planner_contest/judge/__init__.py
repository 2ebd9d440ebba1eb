"""An evaluator of plans, written separately from the planner: it computes the tokens per second of a given plan.

It uses only the planner's records of hardware and workload, and has its own rooflines and constants. It is not fully
independent: both rest on the same published formulas (bytes, FLOPs, a pipeline's bubble, the age window). Also, after
its mistakes had made our plans lose, it was changed to treat mixed pipelines' stages and classes' lags as the planner
does.
"""
