"""Trials: the first steps of a script, run to measure something; files that it writes are removed.

In each worker, beside the script:
    observer     seeds the script, watches it, and ends it after a number of steps
    loaders      observes the batches that the script takes from its loaders
    scratch      maps written files to a scratch folder that is removed
    redirecting  replaces the functions of Python that write files

In the command process:
    runner       runs trials one after the other, as `duoka run` would
    tables       formats a table as text
"""
