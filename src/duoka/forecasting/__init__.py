"""`duoka forecast`: the time of a training step on 1, 2, 4, … devices, measured on a script's first steps.

timer     in each worker, beside the script (a trial, `duoka.trials`): the times at which steps end, and their costs
forecast  all runs, one after the other; why more devices are slower than the ideal; the table, JSON, a page
memory    `duoka forecast --memory`: the peak memory under each strategy, instead of times
"""
