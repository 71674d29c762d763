"""The devices of this machine, and the choice of devices for a request.

spec.py         the grammar of --devices
gpu.py          a device; a GPU and its users, at one moment
vendors/        what each vendor of GPUs has its own way for
locks.py        a file lock for each GPU, so that two runs never take the same, and a queue
inventory.py    all devices of this machine, at one moment
machine.py      its processor and memory, and the limits of a container or a scheduler
choice.py       the devices for a request, one for each worker
allocation.py   reads the inventory, chooses, and locks, in one step; waits until devices are free
accelerator.py  the accelerator of this process, in torch's own words; copies to and from it
"""
