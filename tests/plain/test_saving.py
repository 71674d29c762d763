from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, run, said


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


def test_what_writes_files_without_open(flow: Flow) -> None:
    source = """
        import os, threading, time, torch, warnings
        from safetensors.torch import load_file, save_file
        from torch import nn

        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit, since torch 2.15
        @torch.jit.script
        def double(x):
            return x * 2

        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        exported = torch.export.export(nn.Linear(300, 200).eval(), (torch.ones(2, 300),))
        is_rank_0 = os.readlink("/proc/self/fd/0") != os.devnull
        for step in range(20):
            save_file({"step": torch.full((10_000,), float(step))}, "steps.safetensors")
            assert load_file("steps.safetensors")["step"][-1] == step  # nobody writes it any more
            for scripted in (torch.jit.script(model), double):
                torch.jit.save(scripted, "scripted.pt", {"writer": str(os.getpid())})
                found = {"writer": ""}
                torch.jit.load("scripted.pt", _extra_files=found)
                assert (found["writer"] == str(os.getpid()).encode()) == is_rank_0
            torch.jit.script(model).save("scripted.pt")
            torch.export.save(exported, "exported.pt2")
            torch.export.load("exported.pt2")
            torch.save(torch.full((100_000,), float(step)), "large.pt")
            assert torch.load("large.pt")[-1] == step
            assert torch.equal(torch.jit.load("scripted.pt").weight, model.weight)
        def save():
            time.sleep(0.1 * (os.getpid() % 2))
            torch.save({"weight": model.weight}, "thread.pt")

        for _ in range(3):
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
            print(torch.load("thread.pt")["weight"].sum().item())
            os.remove("thread.pt")
        """
    as_python(flow, source)


def test_all_ranks_write_a_sharded_model(flow: Flow) -> None:
    source = """
        import os, torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 14), nn.BatchNorm1d(14), nn.Linear(14, 6))
        net.append(nn.Linear(6, 11))
        net[4].weight = net[0].weight
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for (ids,) in DataLoader(TensorDataset(torch.arange(11)), batch_size=11):
            out = net(ids)
            out.square().mean().backward()
            optimizer.step()
        names = ("state.pt", "net.pt", "/dev/null", "none/a.pt")
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "ids": ids, "out": out}
        state |= {"detached": out.detach(), "column": out[:, 0]}
        for name, value in zip(names, (state, net, net, net)):
            try:
                torch.save(value, name)
            except RuntimeError as error:
                print("no", str(error).split()[0])
        found, whole = torch.load("state.pt"), torch.load("net.pt", weights_only=False)
        print(found["ids"].tolist(), [found[name].requires_grad for name in ("out", "detached", "column")])
        print(len({found[name].untyped_storage().data_ptr() for name in ("out", "detached", "column")}))
        torch.save({"weight": net[1].weight}, "protocol.pt", pickle_protocol=3)
        print(type(torch.load("protocol.pt", weights_only=False)["weight"]).__name__)
        print(found["out"].shape, f"{found['net']['0.weight'].sum():.4f}")
        print(f"{found['optimizer']['state'][1]['momentum_buffer'].abs().sum():.4f}")
        print(whole[4].weight is whole[0].weight, [type(it).__name__ for it in whole.parameters()])
        print(f"{whole[3].weight.sum():.4f}", whole[3].weight.requires_grad, os.path.getsize("net.pt"))
        """
    as_python(flow, source, "--strategy", "fsdp")


def test_a_directory_of_dcp(flow: Flow) -> None:
    source = """
        import os, torch, warnings
        import torch.distributed.checkpoint as dcp

        warnings.simplefilter("ignore", UserWarning)  # of saving without torch.distributed
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for path in ("a", "b", "a", "asynchronous"):
            state = {"model": model.state_dict(), "steps": torch.tensor(3)}
            if path == "asynchronous":
                dcp.async_save(state, checkpoint_id=path).result()
            else:
                dcp.save(state, checkpoint_id=path)
            found = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
            dcp.load(found, checkpoint_id=path)
            print(sorted(os.listdir(path)), torch.equal(found["model"]["weight"], model.weight))
            torch.nn.init.normal_(model.weight)
        """
    as_python(flow, source)
    as_python(flow, source, "--strategy", "fsdp")


def test_a_file_that_cannot_be_written_is_one_error(flow: Flow) -> None:
    result = run(flow, "import torch\ntorch.save([1], 'none/a.pt')")
    assert result.returncode == 1
    assert "none" in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_checkpoints_and_weights_of_a_plain_script(flow: Flow) -> None:
    source = """
        import os, torch, duoka
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        def train(epochs):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            loader = DataLoader(TensorDataset(torch.randn(12, 3).double()), 4, shuffle=True)
            total = torch.zeros((), dtype=torch.double)
            with duoka.Checkpoint("out", {"model": model, "optimizer": optimizer, "total": total}) as saved:
                for epoch in saved.epochs(epochs):
                    for (x,) in loader:
                        loss = model(x).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        total += loss.detach()
                        saved.step()
                    print(epoch, f"{total.item():.6f}")
            return model

        train(2)
        model = train(4)
        duoka.save_weights(model, "w.safetensors")
        print(len(duoka.load_weights(nn.Sequential(*model), "w.safetensors").loaded))
        print(sorted(name for name in os.listdir("out") if name.startswith("step")))
        """
    script = flow.write("script.py", source)
    expected = flow.python([script]).ok().stdout
    for file in ("out", "w.safetensors"):
        (flow.folder / file).rename(flow.folder / f"python-{file}")
    assert said(flow, source) == [expected] * 2


def test_a_profile_is_written_once(flow: Flow) -> None:
    source = """
        import json, os, torch
        with torch.profiler.profile() as profile:
            torch.nn.Linear(3, 2)(torch.ones(1, 3))
        profile.export_chrome_trace("trace.json")
        assert json.load(open("trace.json"))["traceEvents"]
        os.remove("trace.json")
        """
    run(flow, source).ok()
