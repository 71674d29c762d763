"""Start workers, watch them and report how they ended.

inline.py         one worker, in the command process itself
local.py          several workers on this machine or on several, or one that may be restarted: forked from the command
                  process of their machine and watched by it
function.py       duoka.launch: the same for a function

The parts of local.py:

joining.py        the commands of several machines connect and compare their settings
machines.py       their connections, and what they exchange during the run
workers.py        the workers of one attempt: started, listened to, ended
processes.py      how they are forked, told of signals, and ended if the command process is killed; log files
hangs.py          finds the rank that others wait for
verdict.py        finds out why a run ended
restarts.py       restarts a run after a fault
report.py         the messages about a run that ended badly (hints.py, divergence.py)
"""
