"""Tells Python what `card.c` tells CUDA's runtime, where SHARED_CARD is set: NVIDIA's driver has several cards."""

import os

if os.environ.get("SHARED_CARD"):
    import importlib.abc
    import importlib.machinery
    import sys

    CARDS = int(os.environ["SHARED_CARD"])

    def uuid(real, card):
        return real if card == 0 else f"{real[:4]}{card:08x}{real[12:]}"

    def show_driver(pynvml):
        ask_handle, ask_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetUUID

        def handle_of(index):
            if index >= CARDS:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            handle = ask_handle(0)
            handle.card = index
            return handle

        pynvml.nvmlDeviceGetCount = lambda: CARDS
        pynvml.nvmlDeviceGetHandleByIndex = handle_of
        pynvml.nvmlDeviceGetUUID = lambda handle: uuid(ask_uuid(handle), getattr(handle, "card", 0))
        # Every process is on all cards, as they are one.
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            setattr(pynvml, name, lambda handle: [])

    def show_torch(cuda):
        ask_uuids = cuda._raw_device_uuid_nvml
        cuda._raw_device_count_nvml = lambda: CARDS
        cuda._raw_device_uuid_nvml = lambda: [uuid(ask_uuids()[0], card) for card in range(CARDS)]

    SHOW = {"pynvml": show_driver, "torch.cuda": show_torch}

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name not in SHOW:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None:
                load = spec.loader.exec_module

                def exec_module(module):
                    load(module)
                    SHOW[name](module)

                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder())
