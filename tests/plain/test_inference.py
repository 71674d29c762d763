from __future__ import annotations

from tests.flows.flow import Flow

SOURCE = """
    import duoka, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = TensorDataset(torch.randn(10, 4), torch.randint(2, (10,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=4):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for source in (data, data.tensors[0], DataLoader(data, batch_size=3)):
        outputs = duoka.predict(model, source, batch_size=3).stack()
        print(f"{tuple(outputs.shape)} {outputs.sum():.4f} {model.training}")
    """


def test_predict_in_a_plain_script_gives_what_one_device_gives(flow: Flow) -> None:
    script = flow.write("script.py", SOURCE)
    alone = flow.python([script]).ok()
    assert alone.stdout.count("(10, 2)") == 3
    for count in (2, 3):
        assert flow.run(["run", "--quiet", "--devices", f"cpu:{count}", script]).ok().stdout == alone.stdout
