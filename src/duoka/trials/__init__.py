"""The first steps of a script, run to learn something about it; nothing that it writes stays.

In each worker, beside the script:
    accompany    what is done to the script: it is seeded, looked at, and ended after so many steps
    loaders      the batches that it takes from its loaders
    scratch      what it writes goes to a folder that is removed
    redirecting  the functions by which it writes, made to write there

In the command process:
    stage        runs trials, one after the other, as `duoka run` would
    drawn        a table as text
"""
