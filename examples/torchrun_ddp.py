"""A script that does its own DistributedDataParallel, as the guides write it. duoka starts it, and leaves it alone.

    duoka run --devices 0,3 examples/torchrun_ddp.py                  # instead of the next two
    torchrun --nproc_per_node=2 examples/torchrun_ddp.py
    python -m torch.distributed.launch --nproc_per_node=2 examples/torchrun_ddp.py
    python examples/torchrun_ddp.py                                   # one process, no group

Here all that duoka does for a plain script is done by hand: the batch size is that of each process, the sampler has
to know the epoch, numbers have to be added up over the ranks, and rank 0 alone saves.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--limit", type=int, default=1437, help="use only the first so many images")
    parser.add_argument("--save", metavar="PATH", help="where to save the trained weights")
    args = parser.parse_args()

    if "RANK" not in os.environ:  # started by hand: a group of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[: args.limit], dtype=torch.float32).flatten(1) / 8 - 1
    data = TensorDataset(images, torch.tensor(digits.target[: args.limit]))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(net, device_ids=[args.local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3, device=device)  # loss, correct, count
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = torch.tensor(len(y), device=device)
            sums += torch.stack([loss.detach() * seen, (scores.argmax(1) == y).sum(), seen])
        dist.all_reduce(sums)
        if rank == 0:
            loss_sum, correct, count = sums.tolist()
            print(
                f"epoch {epoch + 1}: loss {loss_sum / count:.4f}, accuracy {correct / count:.4f}, {world_size} ranks"
            )
    if args.save and rank == 0:
        torch.save(model.module.state_dict(), args.save)
    del model  # before its group: gloo's thread may wait for Python's lock, and the model's end for gloo's thread
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
