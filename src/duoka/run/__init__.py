"""The API: duoka.start and the Run that it returns.

starting            find this process's rank, open a run; api_session: its interceptions
run                 Run
models              run.model
backward            checks after each backward pass
collect             reductions of values that differ between ranks
logs                destinations of `run.log`
agreement           exchange of Python objects, and checks that ranks agree
"""

from duoka.run.run import Run
from duoka.run.starting import start

__all__ = ["Run", "start"]
