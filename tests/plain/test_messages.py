"""Number of messages between ranks in a step, on which its time in a slow network depends."""

from __future__ import annotations

from tests.flows.flow import Flow

STEPS = """
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset
    from duoka.collectives.process import ProcessCollectives

    came, enter = [], ProcessCollectives._enter
    ProcessCollectives._enter = lambda self, text, told: (came.append(text), enter(self, text, told))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    for reports in ("none", "loss", "all"):
        counts = []
        for x, y in DataLoader(data, batch_size=8):
            before = len(came)
            scores = net(x)
            loss = F.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            if reports == "all":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if reports != "none":
                loss.item()
            if reports == "all":
                (scores.argmax(1) == y).float().mean().item()
            counts.append(len(came) - before)
        print(reports, counts[-1])
"""


def test_a_step_meets_for_its_loss_its_gradients_and_each_other_number(flow: Flow) -> None:
    """The loss once, with how many targets count and whether one is no class; clipping not at all."""
    command = ["run", "-q", "--kind", "plain", "--devices", "cpu:2", flow.write("script.py", STEPS)]
    assert flow.run(command).ok().stdout == "none 2\nloss 2\nall 3\n"
