"""`duoka prove`: compare the computations of a script on several devices with those on one, step by step.

Each run is a trial (`duoka.trials`).

In each worker, beside the script:
    recorder    writes the models' tensors after each step to files
    naming      names the trained tensors
    batches     writes digests of the training batches
    nudge       moves weights by one unit in the last place, as rounding does

In the command process:
    recording   the files of one run, written and read
    runs        a run of the script to record, and the recording of it
    comparing   compares two recordings, tensor by tensor
    bounds      limits of differences that rounding explains
    causes      finds causes of larger differences
    proof       makes all runs, compares them, and decides
    showing     formats the table, and the result as JSON
    data        compares the batches of two runs
"""
