"""A plain script that fails shows what python shows: its own frames, once."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from tests.flows.flow import Flow
from tests.plain.said import as_python, run

SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Odd(Exception):
        def __init__(self, one, *, two):
            super().__init__(f"{one} and {two}")

    class Samples(Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, index):
            if index == 13:
                fail("dataset")
            return torch.arange(3.0) + index, index % 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)
        def forward(self, x):
            fail("forward")
            return self.layer(x)

    def collate(samples):
        fail("collate")
        return torch.utils.data.default_collate(samples)

    class Step(torch.optim.SGD):
        def step(self):
            fail("step")
            super().step()

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            fail("backward")
            return grad

    def fail(where):
        if where == WHERE:
            RAISE

    def hook(module, args, output):
        fail("hook")

    def train():
        torch.manual_seed(0)
        model = Model()
        if WHERE == "hook":
            model.layer.register_forward_hook(hook)
        options = {"collate_fn": collate} if WHERE == "collate" else {}
        loader = DataLoader(Samples(), 4, num_workers=WORKERS, **options)
        optimizer = Step(model.parameters(), lr=0.1)
        for x, y in loader:
            out = model(x)
            if WHERE == "backward":
                out = Bad.apply(out)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            fail("loop")

    if __name__ == "__main__":
        train()
"""

RAISED = {
    "key": "raise KeyError('missing')",
    "odd": "raise Odd(1, two=2)",
    "chained": """
        try:
            {}[1]
        except KeyError as error:
            raise RuntimeError('chained') from error""",
    "torch": "torch.zeros(2) @ torch.zeros(3)",
    "index": "[][1]",
}
CASES = [
    ("dataset", "chained", 0),
    ("dataset", "key", 1),
    ("collate", "odd", 1),
    ("forward", "torch", 0),
    ("hook", "key", 0),
    ("backward", "odd", 0),
    ("step", "index", 0),
]


@pytest.mark.parametrize(("where", "raised", "workers"), CASES)
def test_errors_look_as_in_python(flow: Flow, where: str, raised: str, workers: int) -> None:
    body = textwrap.indent(textwrap.dedent(RAISED[raised]).strip(), " " * 12).strip()
    source = SCRIPT.replace("RAISE", body).replace("WHERE", repr(where)).replace("WORKERS", str(workers))
    expected = flow.python([flow.write("script.py", source)])
    found = run(flow, source)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert clean(found.stderr) == clean(expected.stderr)


def clean(trace: str) -> str:
    """Without addresses, duoka's lines that tell the ranks, and torch's lines that call the dataset."""
    trace = re.sub(r"duoka: raised on .*\n(?:  rank .*\n)*", "", trace)
    trace = re.sub(r'  File ".*_utils/(?:fetch|worker).py".*\n(?:    .*\n)*', "", trace)
    return re.sub(r"0x[0-9a-f]+", "0x", trace)


def test_what_a_script_sees_of_its_own_errors(flow: Flow) -> None:
    source = """
        import inspect, sys, traceback, warnings
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        class Model(nn.Linear):
            def forward(self, x):
                if len(x) and self.bad:
                    raise KeyError("in forward")
                return super().forward(x)

        model = Model(3, 2)
        model.bad = False
        for x, in DataLoader(TensorDataset(torch.randn(4, 3)), 4):
            model(x), model(x).sum()
            model.bad = True
            try:
                model(x)
            except KeyError as error:
                kind, value, trace = sys.exc_info()
                print(kind, value is error, error.__context__, [f.name for f in traceback.extract_tb(trace)])
                print(traceback.format_exc().splitlines()[-1])
            model.bad = False
        one, other = torch.zeros(2, 3), torch.zeros(4, 5)
        for action in (lambda: open("none"), lambda: torch.load("none"), lambda: one @ other):
            try:
                action()
            except Exception as error:
                print(type(error).__name__, error, error.__cause__, error.__context__)
        try:
            raise ExceptionGroup("two", [ValueError(1), KeyError(2)])
        except* KeyError as group:
            print(group.exceptions)
        except* ValueError:
            pass
        warnings.warn("mine")
        warnings.warn("mine")
        print(inspect.stack()[0].function, __name__, __file__, sys.argv)
        sys.exit("the end")
        """
    if sys.version_info < (3, 11):  # which has groups of errors
        source = re.sub(r"(?m)^ +try:\n +raise ExceptionGroup(?:.*\n){5}", "", source)
    expected = flow.python([flow.write("script.py", source)])
    found = run(flow, source)
    same = "['<module>'"
    assert same in found.stdout
    assert strip_frames(found.stdout) == strip_frames(expected.stdout)
    assert (found.returncode, clean(found.stderr)) == (1, clean(expected.stderr))


def strip_frames(text: str) -> str:
    """Without the frames that torch's and duoka's ways to call a module have."""
    return re.sub(r"\['<module>'.*'forward'\]", "[...]", text)


def test_the_surroundings_of_a_script(flow: Flow) -> None:
    flow.write("neighbour.py", "VALUE = 5\n\ndef where():\n    return __file__\n")
    flow.write("package/__init__.py", "")
    flow.write("package/part.py", "from . import __name__ as above\nfrom neighbour import VALUE\n")
    source = """
        import concurrent.futures, multiprocessing, os, pickle, sys
        import neighbour
        from package import part

        class Own:
            def __init__(self, value):
                self.value = value

        def square(x):
            return x * x

        if __name__ == "__main__":
            import torch  # not in new processes, in which it takes seconds
            print(__name__, __file__, sys.argv, sys.path[0], neighbour.VALUE, neighbour.where(), part.above)
            print(pickle.loads(pickle.dumps(Own(3))).value, Own.__module__, sys.modules["__main__"].Own is Own)
            torch.save(Own(4), "own.pt")
            print(torch.load("own.pt", weights_only=False).value)
            for method, count in (("fork", 2), ("spawn", 1)):
                with multiprocessing.get_context(method).Pool(count) as pool:
                    print(method, pool.map(square, range(5)))
            with concurrent.futures.ProcessPoolExecutor(2) as pool:
                print(list(pool.map(square, range(4))))
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                print(list(pool.map(square, range(4))), pool.submit(os.path.exists, "own.pt").result())
            queue = multiprocessing.Queue()
            process = multiprocessing.Process(target=queue.put, args=(7,))
            process.start()
            print(queue.get())
            process.join()
            print(process.exitcode)
        """
    as_python(flow, source)


def test_an_error_that_only_one_rank_has_met_is_told_where_the_script_catches_it(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Samples(Dataset):
            def __len__(self):
                return 16
            def __getitem__(self, index):
                if index == 5:
                    raise ValueError(f"sample {index} is corrupt")
                return torch.tensor([float(index)])

        batches = iter(DataLoader(Samples(), 4))
        while True:
            try:
                print(next(batches).sum().item())
            except ValueError as error:
                print(error)
            except StopIteration:
                break
        """
    result = run(flow, source)
    assert result.returncode == 1
    assert "after ValueError at script.py:" in result.stderr
    as_python(flow, source, "--loading", "whole")
