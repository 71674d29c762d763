"""Watching workers and reporting how they ended.

status_board.py      shared memory in which each rank shows its collectives, steps and checkpoints
rings.py             in the same memory: output of rank 0's script, samples of other machines
flight_recorder.py   the status of scripts that call torch.distributed themselves, from torch's flight recorder
ending.py            the record of how a worker's script ended
tracebacks.py        tracebacks without duoka's own frames, and the variables in the script's
script_errors.py     errors of breakpoints in several workers, and of DataLoader workers that die
"""
