"""Watching workers and reporting how they ended.

status_board.py      shared memory in which each rank shows its collectives, steps and checkpoints
value_ring.py        the last values that a script has logged, in the same memory
flight_recorder.py   the same for scripts that call torch.distributed themselves, read from torch's flight recorder
ending.py            the record of how a worker's script ended
tracebacks.py        tracebacks without duoka's own frames
loader_deaths.py     errors of DataLoader workers that die
debugging.py         errors for breakpoints in several workers, which share one terminal
"""
