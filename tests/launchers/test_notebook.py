"""`duoka.launch` and `duoka.start` in the cells of a notebook: a real kernel of Jupyter's."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

LONGEST = 120.0  # seconds that a cell may take


@dataclass(frozen=True)
class Notebook:
    """A kernel, and what its cells come to."""

    client: Any

    def cell(self, source: str) -> str:
        """Run a cell; return its standard output, and the text of the error that ended it."""
        said: list[str] = []

        def hear(message: Any) -> None:
            content = message["content"]
            if content.get("name") != "stderr":  # its messages come between the standard output's
                said.append(content.get("text", "") or "\n".join(content.get("traceback", [])))

        self.client.execute_interactive(textwrap.dedent(source), timeout=LONGEST, output_hook=hear)
        return "".join(said)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[:1] = [sys.executable]
    folder: Path = tmp_path_factory.mktemp("notebook")
    # A kernel that a test starts does not read its descriptors, a user's does.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager.start_kernel(cwd=str(folder), env=environment)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=LONGEST)
        yield Notebook(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_sweep_of_launches_and_a_run_of_its_own(notebook: Notebook) -> None:
    said = notebook.cell(
        """
        import torch
        from torch import nn
        import duoka

        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))

        class Net(nn.Linear):  # of the notebook
            pass

        def fit(lr):
            with duoka.start(seed=0, log=[]) as run:
                model = run.model(Net(3, 1))
                optimizer = torch.optim.SGD(model.parameters(), lr=lr)
                for (rows,) in run.loader(x, batch_size=5):
                    optimizer.zero_grad()
                    loss = model(rows).square().mean()
                    loss.backward()
                    optimizer.step()
                return run.world_size, round(loss.item(), 4)

        print([duoka.launch(lambda: fit(lr), devices="cpu:2") for lr in (0.1, 0.2)])
        """
    )
    found = eval(said.strip().splitlines()[-1])
    assert [[size for size, _ in ranks] for ranks in found] == [[2, 2], [2, 2]]
    assert all(one == other for one, other in found)
    here = eval(notebook.cell("print([fit(lr) for lr in (0.1, 0.2)])").strip().splitlines()[-1])
    assert here == [(1, loss) for (_, loss), _ in found]


def test_an_error_comes_with_the_cell_that_raised_it(notebook: Notebook) -> None:
    said = notebook.cell(
        """
        import duoka

        def broken():
            run = duoka.start(log=[])
            for line in range(500):
                print("rank", run.rank, line)
            run.barrier()  # the error of one rank ends the others
            if run.rank == 1:
                raise KeyError("no such column")
            run.barrier()

        try:
            duoka.launch(broken, devices="cpu:2")
        except KeyError as error:
            print(error, "rank 1" in str(error.__cause__), 'raise KeyError("no such column")' in str(error.__cause__))
        print(duoka.launch(lambda: duoka.start(log=[]).rank, devices="cpu:2"))  # and on it goes
        """
    )
    # Rank 0's lines are in the cell, whole and in order; the others' output is in files.
    lines = [line for line in said.splitlines() if line.startswith("rank")]
    assert lines == [f"rank 0 {line}" for line in range(500)]
    assert said.strip().splitlines()[-2:] == ["'no such column' True True", "[0, 1]"]
