"""`duoka forecast --memory`: the peak memory of a device under each strategy, from a script's first steps on a CPU.

recorder  in the worker, beside the script (a trial, `duoka.trials`): the kind of each storage, and its events
moments   the bytes at each moment, which strategies divide among devices or add to; a peak under a strategy
forecast  the trial, and the peaks of each strategy; which to take; the table and the same as JSON
"""
