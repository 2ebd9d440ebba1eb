"""The planner: chooses the machines that train and those that generate, and proves how good its plan is.

Words: a *class* is a kind of identical nodes, and a *card* one accelerator. A *gang* is a set of nodes that train
together, and a *replica* a copy of the model that generates, on one or more cards. The *period* is the time from one
step to the next. Imports no torch.
"""
