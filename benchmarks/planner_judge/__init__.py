"""An evaluator of plans that shares no arithmetic with the planner: it is handed a plan and says tokens per second."""
