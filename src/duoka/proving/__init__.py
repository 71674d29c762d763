"""`duoka prove`: whether a script computes on some devices what it computes on another, shown step by step.

Each run is a trial (`duoka.trials`).

In each worker, beside the script:
    recorder    what a step has made of the models, into files
    naming      names for the tensors that are trained
    batches     a digest of what the script was given to train on
    nudge       weights moved by one unit in the last place: what rounding alone does

In the command process:
    recording   the files of one run, written and read
    sides       one run of the script, as it is to be recorded
    comparing   two recordings, tensor by tensor
    bounds      which difference is rounding
    causes      why two runs part
    proof       all runs, their comparisons and the verdict
    showing     the table, and the same as data
"""
