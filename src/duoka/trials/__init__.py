"""Trials: the first steps of a script, run to measure something; files that it writes are removed.

In each worker, beside the script:
    observer  seeds the script, observes it and its batches, and ends it after a number of steps
    scratch   redirects the files that it writes to a scratch folder that is removed

In the command process:
    runner    runs trials one after the other, as `duoka run` would; formats their tables
"""
