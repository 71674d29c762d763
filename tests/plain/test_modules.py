from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.plain.said import as_python, said

TRAIN = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(22, 6), torch.randn(22, 2))
    model = {}
    x, y = next(iter(DataLoader(data, 8)))
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(data, 8):
        loss = (model(x) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{{loss.item():.4f}}", [f"{{float(b.sum()):.3f}}" for b in model.buffers()])
    print(f"{{model.eval()(x).sum().item():.4f}}")
"""
MODELS = {
    "batch norm": "nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))",
    "batch norm first": "nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 2))",
    "lazy": "nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(5, 2))",
    "dropout": "nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.RReLU(), nn.Linear(5, 2))",
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models_train_as_on_one_device(flow: Flow, model: str) -> None:
    as_python(flow, TRAIN.format(model))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_a_model_that_lists_its_parameters_itself(flow: Flow, strategy: str) -> None:
    """As textbooks do that build a model and an optimizer from tensors alone."""
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        class Scratch(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.normal(0, 0.01, (4, 3), requires_grad=True)
                self.b = torch.zeros(3, requires_grad=True)

            def parameters(self):
                return [self.w, self.b]

            def forward(self, x):
                return x.reshape(-1, 4) @ self.w + self.b

        torch.manual_seed(0)
        net = Scratch()
        data = TensorDataset(torch.randn(22, 4), torch.randint(0, 3, (22,)))
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.5 * parameter.grad
                    parameter.grad.zero_()
            print(f"{loss.item():.4f} {net.w.norm().item():.4f}")
        """
    as_python(flow, source, "--strategy", strategy)


def test_batch_norm_of_each_share_if_asked_for(flow: Flow) -> None:
    source = TRAIN.format(MODELS["batch norm"])
    whole = said(flow, source)
    local = said(flow, source, "--batch-norm", "local")
    assert whole[0].splitlines()[0].split()[0] != local[0].splitlines()[0].split()[0]


def test_packed_sequences_are_padded_to_the_longest_of_the_batch(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        from torch.utils.data import DataLoader, TensorDataset

        class Net(nn.Module):
            def __init__(self, dropout):
                super().__init__()
                self.rnn = nn.GRU(3, 4, 2, batch_first=True, dropout=dropout)
                self.out = nn.Linear(8, 2)
            def forward(self, x, lengths):
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                every, last = self.rnn(packed)
                every, _ = pad_packed_sequence(every, batch_first=True)
                return self.out(torch.cat([every.mean(1), last[-1]], 1))

        torch.manual_seed(0)
        # The longest of each batch are among the last rows; those of the first batch are all alike.
        lengths = torch.tensor([5] * 8 + [2, 3, 2, 3, 4, 6, 4, 6] + [1, 2, 1, 2, 7, 3, 7, 3])
        data = TensorDataset(torch.randn(24, 7, 3), lengths)
        for dropout in (0.0, 0.3):
            net = Net(dropout)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for x, n in DataLoader(data, 8):
                loss = net(x, n).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"{loss.item():.4f}")
        """
    as_python(flow, source)


def test_functions_are_checkpointed_where_their_batches_are(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint, checkpoint_sequential
        from torch.utils.data import DataLoader, TensorDataset

        class Block(nn.Sequential):
            def __init__(self):
                super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))

        def checkpointed(function, how):
            try:
                return checkpoint(**how)(function)
            except TypeError:  # before torch 2.15
                return lambda *args: checkpoint(function, *args, **how)

        class Net(nn.Module):
            def __init__(self, reentrant):
                super().__init__()
                self.first, self.second, self.out = Block(), Block(), nn.Linear(6, 2)
                self.how = {"use_reentrant": reentrant}
            def forward(self, x, y):  # gives its loss, so it is opened
                x = checkpoint(self.first, x.requires_grad_(), **self.how)
                x = checkpointed(lambda x: (F.dropout(self.second(x), 0.1), x), self.how)(x)[0]
                return F.mse_loss(self.out(x), y)

        torch.manual_seed(0)
        data = TensorDataset(torch.randn(28, 6), torch.randn(28, 2))
        for reentrant in (False, True):
            net = Net(reentrant)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for x, y in DataLoader(data, 7):
                loss = net(x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"{loss.item():.4f} {net.first[0].weight.grad.norm():.3f} {torch.rand(1).item():.5f}")
            for x, y in DataLoader(data, 7):
                x = checkpoint_sequential(nn.Sequential(net.first, net.second), 2, net.first(x), **net.how)
                net.zero_grad()
                F.mse_loss(net.out(x), y).backward()
                print(f"{net.first[0].weight.grad.norm():.3f} {net.second[1].weight.grad.norm():.3f}")
        """
    as_python(flow, source)


def test_a_part_that_a_model_is_given_later_is_kept_in_step(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        data = TensorDataset(torch.randn(22, 4), torch.randn(22, 2))
        for part in (nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))):
            print(f"{sum(net(x).sum().item() for x, _ in DataLoader(data, 8)):.4f}")
            net[2] = part
            net[0].scale = nn.Parameter(torch.ones(()))
            for x, _ in DataLoader(data, 8):  # no optimizer knows of it
                loss = (net(x) * net[0].scale).pow(2).mean()
                net.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
                print(f"{loss.item():.4f}")
        """
    as_python(flow, source)


def test_a_sparse_adjacency_is_not_cut(flow: Flow) -> None:
    source = """
        import torch, warnings
        from torch import nn
        from torch.nn import functional as F

        warnings.simplefilter("ignore")  # it is in beta

        class Graph(nn.Module):
            def __init__(self, adjacency):
                super().__init__()
                self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
                self.register_buffer("adjacency", adjacency)
            def forward(self, x, adjacency):
                x = F.dropout(torch.sparse.mm(adjacency, self.first(x)).relu(), 0.2)
                return self.adjacency @ self.second(x)

        torch.manual_seed(0)
        x, y = torch.randn(9, 5), torch.randint(0, 3, (9,))
        adjacency = (torch.rand(9, 9) > 0.5).float()
        for sparse in (adjacency.to_sparse(), adjacency.to_sparse_csr()):
            net = Graph(sparse)
            whole = nn.Linear(5, 3)
            optimizer = torch.optim.SGD([*net.parameters(), *whole.parameters()], lr=0.1)
            for _ in range(3):
                loss = F.cross_entropy(net(x, sparse)[:6], y[:6]) + F.cross_entropy(sparse @ whole(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(f"{loss.item():.4f}")
        """
    as_python(flow, source)


def test_sizes_that_the_batch_tells_are_the_whole_batch_s(flow: Flow) -> None:
    source = """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from torch.utils.data import DataLoader, TensorDataset

        class Net(nn.Module):
            def __init__(self, cut):
                super().__init__()
                self.layer, self.cut = nn.Linear(3, 4), cut
            def forward(self, x, lengths):
                return self.layer(self.cut(x, lengths)).mean(1)

        cuts = [
            lambda x, n: x[:, : n.max()],
            lambda x, n: x[:, torch.arange(n.max())],
            lambda x, n: x.narrow(1, 0, n.max()),
            lambda x, n: x[:, : F.one_hot(n - 1).shape[1]],
            lambda x, n: x[:, : torch.bincount(n).numel() - 1],
            lambda x, n: x[:, (torch.arange(8) < n[:, None]).any(0)],
            lambda x, n: x[:, : torch.zeros(n.max()).numel()],
            lambda x, n: x[:, : n.unique().numel() + 4],
            lambda x, n: torch.stack([x[:, i] for i in range(n.max())], 1),
            lambda x, n: x * F.one_hot(n, 9)[:, :8, None],  # as large as it says
        ]
        lengths = torch.tensor([5] * 20 + [8] * 4)  # the longest are another rank's, and not in the first batch
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(24, 8, 3), lengths)
        for cut in cuts:
            net = Net(cut)
            print([f"{net(x, n).sum().item():.4f}" for x, n in DataLoader(data, 8)])
        """
    as_python(flow, source)


CHECKPOINTS = """
    import torch
    from functools import partial
    from torch import nn
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    norm = nn.BatchNorm1d(4)
    net, scale = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), norm), nn.Parameter(torch.ones(4))
    weights, calls = [*net.parameters(), scale], []

    def block(x, factor):
        calls.append(len(x))
        return (net(x) * factor * scale).sin(), x * scale.sum()

    for rows in (16, 5):
        for x in DataLoader(torch.randn(2 * rows, 3), rows):
            x.requires_grad_()
            for how in (
                {"use_reentrant": True},
                {"use_reentrant": False},
                {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"},
                {"use_reentrant": False, "early_stop": False},
                {"use_reentrant": False, "context_fn": partial(
                    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])},
            ):
                factor = scale.exp()
                a, b = checkpoint(block, x, factor, **how)
                (a.pow(2).mean() + factor.sum()).backward()
                checkpoint(net, x, **how).sum().backward()
                checkpoint_sequential(net, 2, x, use_reentrant=how["use_reentrant"]).pow(2).mean().backward()
                print(f"{sum(p.grad.abs().sum() for p in weights):.9f}", f"{x.grad.sum():.9f}", len(calls))
                print(f"{norm.running_mean.sum():.9f}", norm.num_batches_tracked.item(), torch.rand(1).item())
    """


@pytest.mark.parametrize("strategy", ["ddp", "exact", "fsdp"])
def test_checkpoints_compute_again_what_one_device_does(strategy: str, flow: Flow) -> None:
    as_python(flow, CHECKPOINTS, "--strategy", strategy)


def test_inputs_of_other_kinds_are_not_split(flow: Flow) -> None:
    source = """
        import torch, warnings
        from torch import nn
        from torch.utils.data import DataLoader

        class Apply(nn.Module):
            def __init__(self, function):
                super().__init__()
                self.function = function

            def forward(self, *args):
                return self.function(*args)

        warnings.simplefilter("ignore")
        quantize = Apply(lambda x: torch.quantize_per_tensor(x, 0.5, 10, torch.quint8))
        roll = Apply(lambda x: torch.cat([x[1:], x[:1]]).dequantize())
        pad = Apply(lambda x: x.to_padded_tensor(0.0))
        nest = Apply(lambda x: torch.nested.nested_tensor([row.repeat(2, 1) for row in x]))
        linear = nn.Linear(2, 2, bias=False)
        nn.init.eye_(linear.weight)
        for x in DataLoader(torch.arange(24.0).view(12, 2), 6):
            print(nn.Sequential(linear, quantize, roll)(x).tolist(), linear(x.to_sparse()).tolist())
            print(nn.Sequential(linear, nest, pad)(x).tolist(), nn.Sequential(linear, pad)(nest(x)).tolist())
            try:
                x.backward()
            except RuntimeError as error:
                print(error)
        """
    as_python(flow, source)
