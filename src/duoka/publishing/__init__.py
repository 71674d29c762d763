"""What a script shows of itself to `duoka watch` and reports.

publisher   the functions that observe the script and write to the status board
"""
