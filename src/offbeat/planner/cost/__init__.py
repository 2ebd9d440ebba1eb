"""The cost model: functions that predict the times and the memory of training gangs and replicas, in SI units."""
