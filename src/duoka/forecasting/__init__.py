"""`duoka forecast`: whether more devices make a script faster, measured on its first steps.

timer      in each worker, beside the script (a trial, `duoka.trials`): when steps end, and what they have cost
timing     the files of one run, written and read; a step's time
forecast   all runs, one after the other
reasons    why a step on more devices does not take its part of the time
showing    the table and the verdict, and the same as data
"""
