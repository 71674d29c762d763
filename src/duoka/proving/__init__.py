"""`duoka prove`: compare the computations of a script on several devices with those on one, step by step.

Each run is a trial (`duoka.trials`).

In each worker, beside the script:
    recorder   writes the models' tensors after each step, and digests of the training batches; moves weights by one
               unit in the last place, as rounding does

In the command process:
    recording  the files of one run, written and read
    comparing  compares two recordings, and judges whether rounding explains a difference
    proof      makes all runs, compares them, and finds the cause of a larger difference
    showing    formats the table, the same as JSON and as a page
"""
