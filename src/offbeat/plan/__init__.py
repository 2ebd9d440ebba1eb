"""Which machines do what: from an inventory and a workload to a plan with a proof of how good it is. No torch here."""
