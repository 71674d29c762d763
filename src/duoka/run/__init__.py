"""The API: duoka.start and the Run that it returns.

starting            find this process's rank, open a run; api_session: its interceptions
run                 Run
models              run.model
backward            checks after each backward pass
logs                destinations of `run.log`
agreement           values of all ranks: objects, checks that they are equal, reductions
"""

from duoka.run.run import Run
from duoka.run.starting import start

__all__ = ["Run", "start"]
