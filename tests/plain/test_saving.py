from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, run


def test_saved_once_and_loaded_by_all(flow: Flow) -> None:
    source = """
        import io, pathlib, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        (x,) = next(iter(DataLoader(TensorDataset(torch.randn(5, 3)), 5)))
        torch.save({"model": model.state_dict(), "x": x, "out": model(x)}, "a.pt")
        found = torch.load("a.pt")
        print(type(found["x"]), found["out"].shape, torch.equal(found["x"], x), sorted(found["model"]))
        torch.save(model, pathlib.Path("whole.pt"))
        print(type(torch.load("whole.pt", weights_only=False)))
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        print(torch.load(buffer).sum().item())
        with open("b.pt", "wb") as file:
            torch.save({"x": x}, f=file)
        torch.save(obj=x, f="c.pt")
        print(torch.load("b.pt")["x"].sum().item(), torch.load("c.pt").shape)
        """
    as_python(flow, source)


def test_a_file_that_cannot_be_written_is_one_error(flow: Flow) -> None:
    result = run(flow, "import torch\ntorch.save([1], 'none/a.pt')")
    assert result.returncode == 1
    assert "none" in result.stderr
    assert result.stderr.count("Traceback") == 1
