"""An evaluator of plans, written apart from the planner: it is handed a plan and says tokens per second.

It takes from the planner only records of hardware and workload, and has rooflines and figures of its own. It is not a
stranger to it: both rest on the same published formulas (bytes, FLOPs, a pipeline's bubble, the age window), and after
plans of ours had lost by its mistakes it was made to see mixed pipelines' stages and classes' lags as the planner does.
"""
