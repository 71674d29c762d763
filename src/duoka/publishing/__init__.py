"""What a script shows of itself to `duoka watch` and reports.

publisher   the functions that observe the script and write to the status board
epochs      the loop over epochs around a loop over a loader, read from the script's frames
"""
