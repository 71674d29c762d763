"""`duoka forecast`: what a script's first steps (a trial, `duoka.trials`) tell about a run on other devices.

timer            in each worker, beside the script: the times at which steps end, and their costs
forecast         all runs, one after the other; why more devices are slower than the ideal; the table, JSON, a page

memory_recorder  for --memory, in a worker on one CPU: the kind of each storage, and its events
moments          the bytes at each moment, which strategies divide among devices or add to; a peak under a strategy
memory           the trial, and the peaks of each strategy; which to take; the table and the same as JSON
"""
