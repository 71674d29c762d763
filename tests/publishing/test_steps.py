"""In processes of their own, as torch's hooks and loaders stay observed."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.flows.flow import Flow

SCRIPT = """
import json, os, sys
from duoka.publishing.publisher import publish
from duoka.supervision.status_board import StatusBoard

board = StatusBoard.create(1)
publish(board, 0, shows_script=True)
assert "torch" not in sys.modules
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

seen = []
model = torch.nn.Linear(1, 1)
optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        if os.fork() == 0:  # writes nothing
            optimizer.step()
            next(iter(loader))
            print("from a child")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    for x in loader:  # an evaluation
        pass
    other.step()
    seen.append((*board.counters(0), *board.batches(0)))

class Stream(IterableDataset):
    def __iter__(self): return iter(range(3))
    def __len__(self): return 3
for x in DataLoader(Stream(), batch_size=None):
    seen.append(board.batches(0))
print("hooks", model.register_forward_hook(print).id)
print(json.dumps([seen, board.script_output.loops(), [line.text for _, line in board.script_output.printed(0)]]))
"""


def test_steps_batches_and_epochs() -> None:
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen, _, lines = json.loads(done.stdout.splitlines()[-1])
    (steps, waited, loaded, samples, *place), second, *stream = seen
    assert (steps, waited, samples) == (3, 0, 24)
    assert loaded > 0
    assert place == [3, 3, 3, 3]
    assert (second[0], second[3]) == (6, 48)
    assert stream == [[number, 0, 3, 3] for number in (1, 2, 3)]  # nobody vouches for the length of a stream
    assert lines[-1] == "hooks 0"


def test_the_compiler_traces_steps_that_are_counted(flow: Flow) -> None:
    source = """
        import warnings
        import torch
        from duoka.publishing.publisher import publish
        from duoka.supervision.status_board import StatusBoard

        board = StatusBoard.create(1)
        publish(board, 0, shows_script=True)
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        warnings.simplefilter("error", UserWarning)  # as of what the compiler cannot trace
        torch.compile(lambda: optimizer.step(), backend="eager")()
        print(board.counters(0)[0])
        """
    assert flow.python([flow.write("script.py", source)]).ok().stdout == "1\n"
