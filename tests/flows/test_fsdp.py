"""`duoka run --strategy fsdp`: what each rank holds, what is computed again, what is refused."""

from __future__ import annotations

import pytest

from tests.flows.flow import Flow

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.drop(torch.tanh(self.norm(self.inner(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)

model = Net()
loader = DataLoader(TensorDataset(torch.randn(36, 8), torch.randint(0, 4, (36,))), batch_size=12)
"""
TRAINED = (
    MODEL
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f} {model.blocks[0].norm.running_var.sum().item():.4f}")
"""
)
HELD = """
held = [*model.parameters(), *(p.grad for p in model.parameters())]
held += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
print("bytes", sum(tensor.untyped_storage().nbytes() for tensor in held), len(held))
"""


@pytest.mark.cpu_and_cards
def test_each_rank_holds_its_part_of_parameters_gradients_and_moments(flow: Flow) -> None:
    script = flow.script(flow.write("held.py", TRAINED + HELD))
    one = flow.python([script]).ok().stdout.splitlines()
    parts = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", script]).ok().stdout.splitlines()
    assert parts[:-1] == one[:-1]
    (_, whole, count), (_, part, same) = one[-1].split(), parts[-1].split()
    assert count == same
    assert int(part) * 2 == int(whole)


NORMS = (
    MODEL
    + """

other = Net()
other.itself, nets = [other], [model, other]  # deleted when this rank collects garbage
del other
parameters = [*model.parameters()]
for step, (x, y) in enumerate(loader):
    for net in nets:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if step == 2:
            parameters[0].grad = None
        for way in range(3):
            mine = [p for p in net.parameters() if p.grad is not None]
            norms = [(p.grad.data.norm(), p.grad.norm(float("inf")), p.grad.detach().norm(1)) for p in mine]
            norms[0][0].zero_()
            print(step, way, f"{sum(p.grad.norm().item() ** 2 for p in mine):.4g}", f"{sum(map(sum, norms)):.4g}")
            print(f"{mine[1].grad[:4].norm():.4g} {mine[2].grad.t().norm():.4g} {(mine[2].grad * 2).norm():.4g}")
            mine[-1].grad.data.mul_(2)
            print(f"{mine[-1].grad.norm():.4g} {torch.stack([p.grad.norm() for p in mine]).norm():.4g}")
            if way == 1:
                mine[0].grad = torch.ones_like(mine[0])
    if step == 1:
        del nets[1], net, mine
"""
)


def test_norms_of_gradients_that_are_read_one_by_one(flow: Flow) -> None:
    script = flow.write("norms.py", NORMS)
    expected = flow.python([script]).ok().stdout
    assert flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", script]).ok().stdout == expected


def test_with_cpu_offload_the_numbers_are_the_same(flow: Flow) -> None:
    script = flow.write("offloaded.py", TRAINED.replace("optimizer =", "model.to('cpu')\noptimizer ="))
    one = flow.python([script]).ok().stdout
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", "--cpu-offload", script]).ok()
    assert ran.stdout == one
    assert "parameters of Net in the memory of the host, in 5 blocks" in ran.stderr


@pytest.mark.cpu_and_cards
def test_blocks_by_name_compute_their_activations_again(flow: Flow) -> None:
    ends = "model(torch.ones(9, 8)).sum().backward()\n"  # no batch of a loader
    ends += "print([f'{block.norm.running_var.sum().item():.2f}' for block in model.blocks])\n"
    calls = "print('calls', [block.calls for block in model.blocks])"
    script = flow.script(flow.write("again.py", TRAINED + ends + calls))
    one = flow.python([script]).ok().stdout.splitlines()
    options = ["--strategy", "fsdp", "--blocks", "Block", "--checkpoint-activations"]
    ran = flow.run(["run", "--devices", "cpu:3", *options, script]).ok()
    again = ran.stdout.splitlines()
    assert again[:-1] == one[:-1]
    assert (one[-1], again[-1]) == ("calls [4, 4, 4]", "calls [8, 8, 8]")
    assert "each rank holds 1/3 of 1,124 parameters of Net, in 5 blocks" in ran.stderr
    none = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", "--blocks", "Block,Blok", script]).ok()
    assert "--blocks: Net has no Blok; its classes are Net, Linear, ModuleList, Block, BatchNorm1d" in none.stderr


def test_vectors_of_spectral_norm_move_once(flow: Flow) -> None:
    source = TRAINED.replace(
        "nn.Linear(16, 16), nn.Batch", "nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Batch"
    )
    source = source.replace("self.norm(self.inner(x))", "self.inner(x)")  # BatchNorm would undo the scale
    script = flow.write("spectral.py", source)
    one = flow.python([script]).ok().stdout
    words = ["run", "--devices", "cpu:2", "--strategy", "fsdp", "--checkpoint-activations", script]
    assert flow.run(words).ok().stdout == one


LISTS = """
import torch
from torch import nn

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(x)

model = nn.Sequential(*(Block() for _ in range(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 5, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
"""


def test_a_list_in_a_block_is_computed_again_with_it(flow: Flow) -> None:
    script = flow.write("lists.py", LISTS)
    one = flow.python([script]).ok().stdout
    words = ["run", "--devices", "cpu:2", "--strategy", "fsdp", "--checkpoint-activations", script]
    assert flow.run(words).ok().stdout == one


META = """
with torch.device("meta"):
    model = Net()
model.to_empty(device="cpu")
for part in model.modules():
    if hasattr(part, "reset_parameters"):
        part.reset_parameters()
first = next(model.parameters())
nn.init.trunc_normal_(first, std=0.5)
print(first.is_meta, first.is_cpu)
"""


def test_a_model_on_the_meta_device_never_is_whole(flow: Flow) -> None:
    script = flow.write("meta.py", MODEL.replace("model = Net()\n", META) + TRAINED[len(MODEL) :])
    one = flow.python([script]).ok()
    ran = flow.run(["run", "--devices", "cpu:3", "--strategy", "fsdp", script]).ok()
    assert ran.stdout == one.stdout
    assert "each rank holds 1/3 of 1,124 parameters of Net" in ran.stderr


def test_an_optimizer_that_is_made_before_the_model_has_values_is_named(flow: Flow) -> None:
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    early = META.replace('model.to_empty(device="cpu")\n', f'{made}model.to_empty(device="cpu")\n')
    step = "model(torch.ones(4, 8)).sum().backward()\noptimizer.step()\n"
    source = "import torch\nfrom torch import nn\n" + early.replace("Net()", "nn.Sequential(nn.Linear(8, 4))") + step
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", flow.write("early.py", source)]).ok()
    assert ran.stderr.count("SGD was made before its parameters had values") == 1
    late = source.replace(made, "").replace(step, made + step)
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", flow.write("late.py", late)]).ok()
    assert "before its parameters had values" not in ran.stderr


def test_a_model_that_stays_whole_is_named(flow: Flow) -> None:
    shared = MODEL + "other = Net().share_memory()\nother(torch.ones(4, 8))\n"
    shared += "vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()\n"
    shared += "torch.nn.utils.vector_to_parameters(vector, model.parameters())\n"  # views of one memory
    script = flow.write("shared.py", shared + TRAINED[len(MODEL) :])
    one = flow.python([script]).ok()
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", script]).ok()
    assert ran.stdout == one.stdout
    assert "strategy fsdp: Net stays whole on every rank" in ran.stderr
    sparse = MODEL + "print(nn.Embedding(9, 4, sparse=True)(torch.arange(6).view(2, 3)).shape)"
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", flow.write("sparse.py", sparse)]).ok()
    assert "Embedding stays whole on every rank" in ran.stderr
    assert "or sparse gradients" in ran.stderr


PADDED = """
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
x, padding = torch.randn(12, 5, 8), torch.arange(5) >= torch.randint(2, 6, (12, 1))
encoder(x, src_key_padding_mask=padding).square().mean().backward()
optimizer.step()
encoder.eval()
with torch.no_grad():
    for rows, left_out in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, padding), batch_size=6):
        out = encoder(rows, src_key_padding_mask=left_out)
        print(f"{out.sum().item():.4f} {out.abs().sum().item():.3f} {(out == 0).sum().item()}")
    print(f"{encoder(x[:3], src_key_padding_mask=padding[:3]).abs().sum().item():.3f}")
print([type(p).__name__ for p in encoder.parameters()][:2])
"""


PACKED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
embedding = nn.Embedding(20, 16)
recurrent = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
optimizer = torch.optim.SGD([*embedding.parameters(), *recurrent.parameters()], 0.1)
data = TensorDataset(torch.randint(20, (41, 12)), torch.randint(3, 12, (41,)))
held = torch.zeros(1)
for words, lengths in DataLoader(data, 6):
    packed = pack_padded_sequence(embedding(words), lengths, batch_first=True, enforce_sorted=False)
    loss = pad_packed_sequence(recurrent(packed)[0], batch_first=True)[0].pow(2).mean()
    held *= 4  # the pass uses these weights
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f} {recurrent.weight_hh_l0.grad.norm():.4f}")
    optimizer.zero_grad()
    held = recurrent.weight_hh_l0.data[0]
"""


def test_a_pass_gathers_a_block_once_whatever_the_lengths_of_sequences_on_a_rank(flow: Flow) -> None:
    script = flow.write("train.py", PACKED)
    expected = flow.python([script]).ok().stdout
    assert flow.run(["run", "--quiet", "--devices", "cpu:2", "--strategy", "fsdp", script]).ok().stdout == expected


CHECKPOINTED = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.down, self.up = nn.Parameter(torch.randn(2, 8) / 10), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        _, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, _ = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(x[row]))
        return out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.adapted, self.norm, self.head = Experts(), Adapted(), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(self.adapted, self.experts(x), use_reentrant=False))

torch.manual_seed(0)
net, data = Net(), torch.randn(24, 8)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for x in DataLoader(data, 4):
    loss = net(x).square().mean() + net.experts(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f}")
"""


def test_a_checkpointed_layer_whose_weight_and_bias_are_in_two_blocks(flow: Flow) -> None:
    script = flow.write("script.py", CHECKPOINTED)
    expected = flow.python([script]).ok().stdout
    assert flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", "--quiet", script]).ok().stdout == expected


def test_padding_is_left_out_as_by_torchs_fast_path(flow: Flow) -> None:
    script = flow.write("padded.py", PADDED)
    one = flow.python([script]).ok()
    assert int(one.stdout.split()[2]) > 0
    ran = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", script]).ok()
    assert ran.stdout == one.stdout
    assert "each rank holds 1/2" in ran.stderr


AFTER_A_STEP = """
import io, warnings
import torch
from torch import nn
from torch.func import jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
temperature = nn.Parameter(torch.tensor([1.5]))
optimizer = torch.optim.Adam(net.parameters(), 0.05)
scaling = torch.optim.LBFGS([temperature], lr=0.05, max_iter=5)

def train():
    for rows, labels in DataLoader(TensorDataset(x, y), batch_size=5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(rows), labels)
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")

def of_file(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)

train()
made = [torch.jit.trace(net, x[:2]), torch.jit.script(net)]
print([f"{module(x).sum().item():.3f}" for module in made])
train()
print([f"{of_file(module)(x).sum().item():.3f}" for module in made])
train()
for module in made:
    module.save("made.pt")
    print(f"{torch.jit.load('made.pt')(x).sum().item():.3f}")
train()
print([f"{module(x).sum().item():.3f}" for module in made])
for rows, _ in [(x, y), *DataLoader(TensorDataset(x, y), batch_size=5)]:
    net.zero_grad()
    jacobian = vmap(jacrev(net))(rows)
    jacobian.square().mean().backward()
    print(jacobian.shape, f"{jacobian.abs().sum().item():.2f}", f"{net[0].weight.grad.abs().sum().item():.3f}")

for rows, labels in DataLoader(TensorDataset(x, y), batch_size=5):
    def closure():
        scaling.zero_grad()
        loss = nn.functional.cross_entropy(net(rows) / temperature, labels)
        loss.backward()
        return loss
    scaling.step(closure)
    print(f"{temperature.item():.3f}")
"""


@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_made_of_a_model_after_a_step(flow: Flow, workers: int) -> None:
    script = flow.write("after.py", AFTER_A_STEP)
    one = flow.python([script]).ok()
    ran = flow.run(["run", "--devices", f"cpu:{workers}", "--strategy", "fsdp", script]).ok()
    assert ran.stdout == one.stdout
    assert f"each rank holds 1/{workers}" in ran.stderr


REFUSED = {
    "traced": (
        "x, y = next(iter(loader))\nmodel(x)\ntorch.jit.trace(model, x, check_trace=False)(x).sum().backward()",
        "has copies of its parameters, which cannot be trained",
    ),
    "exported": (
        "x, y = next(iter(loader))\nmodel(x)\ntorch.export.export(model, (x,))",
        "torch.export cannot read a sharded model",
    ),
    "lbfgs": (
        "optimizer = torch.optim.LBFGS(model.parameters())\n"
        "x, y = next(iter(loader))\n"
        "optimizer.step(lambda: F.cross_entropy(model(x), y))",
        "makes one vector of all parameters, which no rank holds with strategy fsdp",
    ),
    "too large": (
        "with torch.device('meta'):\n    large = nn.Linear(10**7, 10**6)\nlarge.to_empty(device='cpu')",
        "has 37,252.9 GiB, and a device",
    ),
    "address": (
        "model.to('cpu')\n"
        "import ctypes\n"
        "print(sum((ctypes.c_float * 128).from_address(model.start.weight.data_ptr())))",
        "in <module>",
    ),
    "shared": (
        "model.to('cpu')\nmodel.share_memory()",
        "a parameter that is shared before its model is moved to a device or called stays whole",
    ),
    "elsewhere": (
        "model.to('cpu')\n"
        "class Features(torch.utils.data.Dataset):\n"
        "    __len__ = lambda self: 4\n"
        "    __getitem__ = lambda self, index: model.end(torch.ones(16)).detach()\n"
        "print(next(iter(DataLoader(Features(), num_workers=1, multiprocessing_context='fork'))))",
        "in a process that the script started",
    ),
}


def test_a_refusal_that_the_script_catches_still_ends_the_run_badly(flow: Flow) -> None:
    source = """
model(next(iter(loader))[0])
try:
    torch.optim.LBFGS(model.parameters())
except Exception:
    print("caught")
"""
    found = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", flow.write("script.py", MODEL + source)])
    assert (found.returncode, found.stdout) == (1, "caught\n")
    assert "the script caught this, and went on: LBFGS makes one vector of all parameters" in found.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(flow: Flow, name: str) -> None:
    text, expected = REFUSED[name]
    found = flow.run(["run", "--devices", "cpu:2", "--strategy", "fsdp", flow.write(f"{name}.py", MODEL + text)])
    assert found.returncode != 0
    assert found.stdout == ""
    assert expected in found.stderr
