"""The planner: chooses the machines that train and those that generate, and proves how good its plan is.

Words: a *class* is a set of identical nodes, and a *card* one accelerator. A *gang* is a set of nodes that train
together, and a *replica* a copy of the model that generates, on one or more cards. A *column* is one way to use
machines: a candidate gang, or a shape of replica on one class. The *period* is the time from one step to the next, and
a *lag* the time until a class has a new version. Imports no torch.
"""
