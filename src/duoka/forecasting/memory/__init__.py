"""`duoka forecast --memory`: the peak memory of a device under each strategy, from a script's first steps on a CPU.

live       the storages of tensors, from the operator that makes each to the moment it is freed
recorder   in the worker, beside the script (a trial, `duoka.trials`): the kind of each storage, and when it was made,
used and freed record     the file of one run, written and read replay     the same events, with the bytes that each
would have under a strategy on several devices gathered   the blocks that are gathered at a moment, with fsdp forecast
the trial, and the peaks of each strategy; which to take showing    the table and the verdict, and the same as JSON
"""
