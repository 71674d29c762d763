"""Programs that ranks once ran otherwise than one device, made small: statements in a loop over batches of x."""

from __future__ import annotations

from tests.fuzz.program import Program


def on(shape: str, *body: str, header: tuple[str, ...] = ()) -> Program:
    """Return a program of statements on four batches x of this shape, such as "(6, 4, 4)"; x is printed, too."""
    sizes = [int(size) for size in shape.strip("()").split(",") if size.strip()]
    total = 4
    for size in sizes:
        total *= size
    rest = ", ".join(map(str, sizes[1:]))
    data = f"data = (torch.arange({total}.) % 23 - 11).view({', '.join(filter(None, [str(4 * sizes[0]), rest]))})"
    loop = f"for step, x in enumerate(DataLoader(data, batch_size={sizes[0]})):"
    statements: list[str] = []
    for line in body:
        if line.startswith((" ", "except ")):  # goes on with a statement
            statements[-1] += f"\n{line}"
        else:
            statements.append(line)
    return Program((data, *header), loop, (*statements, "print(x.tolist())"))


REVERSING = (  # a module that writes to its input, through a view of a function of the script
    "class Same(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    def forward(ctx, x):\n"
    "        return x.view_as(x)\n"
    "    @staticmethod\n"
    "    def backward(ctx, gradient):\n"
    "        return gradient\n"
    "class Reversing(nn.Linear):\n"
    "    def forward(self, x):\n"
    "        return super().forward(F.relu(Same.apply(x), inplace=True))",
    "torch.manual_seed(0); net = Reversing(3, 3)",
)

WRITING = (  # a function of the script that raises after it has written to its input
    "class Writing(torch.autograd.Function):\n"
    "    @staticmethod\n"
    "    def forward(ctx, x):\n"
    "        x.mul_(2)\n"
    "        raise ValueError"
)

LAYOUTS = {
    "recorded contiguous": on(
        "(6, 4, 4)",
        "h = x + 0",
        "for _ in range(3): h.contiguous()",
        "t = h.transpose(1, 2).contiguous()",
        "t.mul_(10)",
        "print(h.tolist(), t.tolist())",
    ),
    "contiguous of a transposed batch": on(
        "(6, 4, 4)",
        "y = x.transpose(1, 2).contiguous()",
        "y += 1",
        "y.flatten(1).add_(2)",
        "print(y.tolist())",
    ),
    "view of columns": on("(6, 4, 4)", "print(x[:, 1:].view(-1).shape)"),
    "view of an expanded batch": on("(6, 1, 4)", "print(x.expand(6, 2, 4).view(6, -1).shape)"),
    "view of an expanded batch of matrices": on(
        "(6, 4, 4)", "print(x.unsqueeze(1).expand(6, 2, 4, 4).view(6, -1).shape)"
    ),
    "view of a transposed batch": on("(6, 4, 4)", "print(x.transpose(1, 2).view(6, 16).shape)"),
    "row of an expanded batch": on("(6, 4, 4)", "x.unsqueeze(1).expand(6, 2, 4, 4)[0].zero_()", "print(x.tolist())"),
    "what a Function keeps of its input": on(
        "(6, 3)",
        "out = Keeping.apply(x, b)",
        "x.mul_(2); x[0] = 1",
        "out.sum().backward()",
        "print(b.grad)",
        header=(
            "class Keeping(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x, b):\n"
            "        ctx.x = x.detach()\n"
            "        return x * b\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient):\n"
            "        return None, (gradient * ctx.x).sum(0)",
            "b = nn.Parameter(torch.ones(3))",
        ),
    ),
    "a batch as a Tensor": on(
        "(6, 4)",
        "y = torch.Tensor(x)",
        "y += 1; y[0] = 5",
        "print(y.tolist(), y is x, y._is_view(), x.data_ptr() == y.data_ptr(), torch.Tensor(x.T).stride())",
        "torch.FloatTensor(x).mul_(2)",
        "x = x.clone().requires_grad_()",
        "torch.Tensor(x * 2).sin().sum().backward()",
        "print(x.grad)",
    ),
    "stack of a number and a batch": on("(6, 4)", "print(torch.stack([x.sum(), x]))"),
    "strides of a dimension of size 1 in uneven shares": on(
        "(5, 1, 3)",
        "y = x[:, ::2]",
        "print(torch.zeros_like(y).stride(), (y + 1).stride(), y.flip(0).stride(), y.sin().stride())",
    ),
    "strides of a dimension of size 1": on(
        "(6, 1, 3)",
        "y = x[:, ::2]",
        "for _ in range(3): print((y + 1).stride(), y.double().stride(), y.clone().stride(), x[None].cos().stride())",
        "columns, pairs = x[:, 0, :1].H, x[..., :1].expand(6, 1, 2)",
        "print(columns.as_subclass(torch.Tensor).stride(), pairs.as_subclass(torch.Tensor).stride())",
    ),
    "strides of columns": on("(6, 4, 4)", "print(x[:, ::2].stride())"),
    "layout after flip": on("(6, 4, 4)", "y = x.transpose(1, 2).flip(1)", "print(y.stride(), y.is_contiguous())"),
    "layout after sort": on(
        "(6, 4, 4)", "y = x.transpose(1, 2).sort(1).values", "print(y.stride(), y.is_contiguous())"
    ),
    "layout of draws with a dimension of size 1": on(
        "(7, 1)",
        "a, b = torch.bernoulli(x.mT.sigmoid()), torch.rand_like(x.mT)",
        "print(a.tolist(), a.stride(), b.tolist(), b.stride(), torch.rand_like(x[:2].mT).stride(), torch.rand(1))",
        "print(F.dropout(x.mT).stride(), torch.normal(x.mT, 1.0).stride(), torch.poisson(x.mT.abs()).stride())",
    ),
    "layout after a mask": on(
        "(6, 4, 4)", "y = x.transpose(1, 2)[x[:, 0, 0] > 0]", "print(y.stride(), y.is_contiguous())"
    ),
    "expand to more rows": on("(4, 2)", "print(x[:, 0].expand(8, 2).shape)"),
    "squeeze out of range": on("(6, 4)", "print(x.squeeze(5).shape)"),
    "unsqueeze out of range": on("(6, 4)", "print(x.unsqueeze(5).shape)"),
    "flatten out of range": on("(6, 4)", "print(x.flatten(5).shape)"),
    "unflatten out of range": on("(6, 4)", "print(x.unflatten(5, (2, 2)).shape)"),
    "flatten backwards": on("(6, 4)", "print(x.flatten(1, 0).shape)"),
    "strides": on("(6, 4)", "print(x.t().stride(), x.t().is_contiguous())"),
    "channels last": on("(6, 2, 3, 3)", "y = x.contiguous(memory_format=torch.channels_last)", "print(y.stride())"),
    "storage offset": on("(6, 4)", "print(x[1:].storage_offset(), x[:, 1:].storage_offset())"),
    "out= a view of the argument": on("(6, 2)", "v = x.view_as(x)", "print(torch.sin(x, out=v) is v)", "v.t_()"),
    "unique_consecutive with arguments by place": on("(6,)", "print(torch.unique_consecutive(x, True))"),
    "an integer divided by zero in the rows of one rank": on(
        "(6, 2)",
        "y = x.long(); z = y.flip(0)",
        "for divide in (torch.remainder, torch.Tensor.__rfloordiv__, torch.lcm, torch.Tensor.__imod__):",
        "    try:",
        "        print(divide(z, y))",
        "    except RuntimeError as error:",
        "        print(error, z)",
    ),
    "a copy that outlives one of more of the same memory": on(
        "(6, 4)",
        "columns = x[:, 1:]; part, row = columns[0], x[0]",
        "del part; row.zero_()",
        "print(columns.tolist(), torch.cumsum(columns, 0)[-1].tolist())",
    ),
    "storages beside a copy of a view": on(
        "(6, 4)",
        "y = x[:, 1:]; rows = [*y]",
        "print(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())",
    ),
    "an argument that comes twice": on(
        "(6,)", "rows, columns = torch.meshgrid(x, x, indexing='ij'); del rows; columns[0] = 3; print(x.tolist())"
    ),
    "arguments of one memory": on(
        "(6,)",
        "rows, columns = torch.meshgrid(x, x.view_as(x), indexing='ij')",
        "columns[0] = 3; print(rows.tolist(), x.tolist())",
    ),
    "rows taken without recording": on(
        "(6, 3, 3)",
        "x.requires_grad_(); y = x * 1",
        "with (torch.no_grad, torch.inference_mode)[step % 2](): rows = x[0], y.diagonal(), *y.unbind()[:2], y[3]",
        "print([(row.requires_grad, row.is_leaf, row._is_view()) for row in rows])",
        "optimizer = torch.optim.SGD([rows[0]], 0.1)",
        "(y * rows[0]).sum().backward(); optimizer.step(); print(x.grad, rows[0].grad)",
        "rows[-1].add_(1)",
        "with torch.no_grad(): rows[-1].add_(1); print(y.tolist())",
    ),
    "isin of values that are not unique": on(
        "(6, 3)",
        "y = x.long() % 4",
        "print([torch.isin(*of, assume_unique=True).tolist() for of in ((y[:, 0], y), (y, torch.arange(40) % 7))])",
    ),
    "another shape in place of what requires gradients": on(
        "(6, 3, 1)",
        "x.requires_grad_(); y = x * 2",
        "x.squeeze_()",
        "y.transpose_(0, 1); y.squeeze_(2); print(y._is_view(), y.is_leaf)",
        "with torch.no_grad(): x.squeeze_().transpose_(0, 1)",
        "(y * x).sum().backward(); print(x._is_view(), x.shape, x.grad)",
    ),
    "rows of views in memory": on(
        "(6, 3, 4)",
        "views = x[:, 1:], x[..., 2], x.chunk(2, 2)[0], x.unbind(1)[2], x.diagonal(0, 1, 2), x.flatten(1)[:, 5:]",
        "rows = [view[4] for view in views]",
        "print([(row.storage_offset(), row.untyped_storage().nbytes()) for row in rows])",
        "array = torch.from_numpy(views[1].numpy()); print(array.data_ptr() - rows[1].untyped_storage().data_ptr())",
    ),
    "views of a single row's results": on(
        "(4, 3)",
        "h = (x.T.contiguous().T * w).exp(); z = torch.complex(h, x); y, a, b = h.detach(), z.real, z.detach().imag",
        "print([(t.requires_grad, t._is_view(), t.stride(), t.tolist()) for t in (y, a, b, z)])",
        "y.requires_grad_().sum().backward(); print(y.grad.tolist(), w.grad)",
        "a.mul(x).sum().backward(); print(w.grad); w.grad = None",
        "c = x.T.contiguous().T.neg().view(torch.int32); c += 1; print(c.stride(), c.tolist())",
        header=("w = torch.arange(1.0, 4.0, requires_grad=True)",),
    ),
    "address beside an empty view": on(
        "(4, 2, 3)", "y = x.narrow(2, 0, 0)", "z = y.reshape(y.shape)", "print(z.data_ptr() == x.data_ptr())"
    ),
    "memory of conjugates": on("(6, 4)", "print((x * 1j).mH.untyped_storage()[7] > 128)"),
    "written from its own columns": on(
        "(4, 4)",
        "try: x.copy_(x.mT)",
        "except RuntimeError as error: print('overlap' if 'single memory location' in str(error) else error)",
        "x.add_(x.T[0])",
    ),
    "written from overlapping parts of itself": on(
        "(4, 3)",
        "x[None] = x; x += x[..., :1]; x[:, :2] = x[:, 1:]; x[:, None, 0] = x[:, :1]",
        "x[:, 1:] += x[:, :-1]; x.T[1:] = x.T[:-1]; torch._foreach_add_([x], [x[:, :1]])",
    ),
    "written from overlapping parts of itself with a gradient": on(
        "(4, 3)",
        "w.grad = None; h = x * w",
        "h[:, 1:] += h[:, :-1].detach(); h -= h[:, :1]; h[:, :2] = h[:, 1:]; h.T[1:].sub_(h.T[:-1])",
        "h.scatter_add_(1, h[:, :1].argmax(1, keepdim=True), h[:, 1:2]); h.square().sum().backward()",
        "print(h.tolist(), w.grad)",
        "h = x * w; h.mul_(h[:, 1:2].detach()); h.sum().backward()",
        header=("w = torch.arange(1.0, 4.0, requires_grad=True)",),
    ),
    "a write that fails after a row was written with a gradient": on(
        "(6, 4)",
        "w.grad = None; row = x[-1]; y = x[:, :1]",
        "row.sub_(w[1])",
        "y.clamp_(max=3)",
        "y = x[:, :1]; y.mul_(2); (x * x).sum().backward(); print(row.tolist(), y.tolist(), w.grad)",
        header=("w = torch.arange(1.0, 4.0, requires_grad=True)",),
    ),
    "written beside other memory, then from itself": on(
        "(4, 3)", "y = x + 1", "for part in (y, y, y, y, x): x.sub_(part[:, :1])", "x.add_(x[:, 1:2])"
    ),
    "written beside an array of its data": on(
        "(4, 2, 2)",
        "array = x.data.numpy(); x.tril_(); print(x.sum().item(), array.sum().item())",
        "x.index_fill_(1, torch.tensor([0]), 9); print(x.sum().item(), array.sum().item())",
        "x.index_put_((torch.arange(4), torch.tensor([1])), torch.tensor(7.0)); print(array.sum().item())",
    ),
    "views of copies, and writes counted": on(
        "(5, 2, 3)",
        "y = x.transpose(0, 1).ravel(); print(y._is_view(), x.mT.reshape(-1)._is_view()); y += 1",
        "print([total._version for total in (x.sum(0), x.sum(), x.long().max(), (x > 1).sum())], y.tolist())",
    ),
    "strides of several blocks of a single row": on(
        "(4,)",
        "y = torch.cat([x[:, None], x[:, None]]); print(y.stride(), y.T.stride(), y.T.numpy().strides)",
        "z = x[:, None, None].repeat(2, 1, 3); print(z.stride(), (z + 1).stride(), z.sum(1, keepdim=True).stride())",
    ),
    "lines of what is printed": on(
        "(4, 13)",
        "x.requires_grad_(); y = x * 2; print(str(x), str(y), str(y.sum()), str(x[:, :9].square()))",
        "with torch.no_grad(): print(str(x), str(y), str(x + 1))",
        "with torch.inference_mode(): print(str(x), str(y), str(x + 1))",
    ),
    "strides of a view by a tensor's number": on(
        "(2, 3, 2)", "y = x.transpose(0, 1)[torch.tensor(1)]", "print(y.stride())", "y.contiguous().fill_(5)"
    ),
    "a model's input with gaps between its rows": on(
        "(3, 4, 4)",
        "print(net(x.transpose(0, 2).contiguous().transpose(0, 2)[:2]).tolist())",
        header=("torch.manual_seed(0)", "net = nn.Linear(4, 2)"),
    ),
    "a new tensor of a batch's size": on("(9, 3)", "print(x.new(x.shape).shape)"),
    "a hook on a leaf whose name is used again": on(
        "(6, 4)",
        "z = x.clone().requires_grad_()",
        "z.register_hook(lambda grad: print(grad.sum().item()))",
        "z = z * 3",
        "z.sum().backward()",
    ),
    "strided columns": on("(6, 3)", "print(x[:, 1:].as_strided((2, 2), (6, 1)).tolist())"),
    "squeeze of nothing": on("(6, 4)", "y = x.squeeze()", "y.name = 1", "print(y is x, hasattr(x, 'name'))"),
    "itself": on(
        "(6, 4)",
        "print(x.to(x.dtype) is x, x.float() is x, x.type(x.dtype) is x, x.cpu() is x)",
        "print(x.real is x, (+x) is x, x.resolve_conj() is x, x.flatten(1) is x)",
        "print(F.dropout(x, 0.5, training=False) is x, x.contiguous() is x, x.view(6, 4) is x)",
    ),
    "rows of one": Program(
        (),
        "for step, ids in enumerate(DataLoader(torch.arange(66).view(11, 6) % 4, batch_size=8)):",
        (
            "labels = ids[:, 1:].contiguous()",
            "labels[labels == 0] = -100",
            "print(ids.sum().item(), labels.sum().item())",
        ),
    ),
    "rows of one, reshaped": Program(
        (),
        "for step, ids in enumerate(DataLoader(torch.arange(66).view(11, 6) % 4, batch_size=8)):",
        ("ids[:, 1:].reshape(-1).mul_(2)", "ids[:, 1:].ravel().mul_(2)", "print(ids.tolist())"),
    ),
    "writes that torch does not count": on(
        "(5, 4)",
        "y = x.view(5, 2, 2).hsplit([1])[0]",
        "y.apply_(lambda value: value + 1)",
        "z = x * 2",
        "z.map_(x, lambda a, b: a - b)",
        "print(y.tolist(), z.tolist())",
    ),
    "another shape while rows are held": on(
        "(5, 4)", "row = x[0]", "row.add_(1)", "x.unsqueeze_(1)", "x.transpose_(0, 1)", "print(x.shape, x.tolist())"
    ),
    "lists of batches of which rows are held": on(
        "(6, 4)",
        "y, row = x + 1, x[0]",
        "y.reshape(-1)[::2] += 1",
        "torch._foreach_add_([y, y, x], 1)",
        "print(y.tolist(), x.tolist(), row.tolist())",
        "row = y[0]",
        "torch.add(x, 1, out=y)",
        "print(row.tolist())",
    ),
    "conjugate while rows are held": on(
        "(6, 4)",
        "z = torch.complex(x, x + 1)",
        "row = z[0]",
        "row.add_(1)",
        "print(z.conj().tolist(), z.mH.tolist())",
    ),
    "two batches computed whole": on(
        "(12, 3)",
        "h = x * weight",
        "order = torch.arange(12)",
        "print(torch.zeros_like(h).index_add_(0, (order + 1) % 12, h[order]).sum().item())",
        header=("weight = torch.ones(3, requires_grad=True)",),
    ),
    "memory shared by DLPack": on(
        "(6, 4)", "y = torch.from_dlpack(x)", "x.t().mul_(2)", "y.add_(1)", "print(x.tolist(), y.tolist())"
    ),
    "memory shared by a capsule": on(
        "(6, 4)",
        "y = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))",
        "x.mul_(2); y[0] = 7",
        "print(x.tolist(), y.tolist())",
    ),
    "data of another layout": on(
        "(6, 3, 4)",
        "y = x.chunk(2, 1)[0]",
        "y.data = y.clone()",
        "print(y.tolist(), y.stride())",
        "y.data = -y.mT.mT",
    ),
    "rows written between sums": on(
        "(6, 4)",
        "x[0].fill_(5); print(x.sum().item())",
        "x[5, 1].fill_(9); print(x.sum().item())",
        "x[5] += 1; x[2:4].mul_(2); print(x.sum().item())",
    ),
    "layout after a mask of other dimensions": on(
        "(7, 2, 1, 3)",
        "b = (x + 0).transpose(0, 2)",
        "d = b[torch.arange(b.shape[0]) % 2 == 0]; e = b[:, torch.tensor([step < 2, True])]",
        "print(d.stride(), d.is_contiguous(), e.tolist())",
    ),
    "masks of another size than their dimension": on(
        "(6, 4)",
        "print(x[:, torch.tensor([True, False])].tolist())",
        "print(x[:, torch.tensor([True] * 5)].tolist())",
        "print(x[:, None, torch.tensor([True, False, True, True])].tolist())",
    ),
    "memory of a view of doubled rows": on(
        "(6, 4)", "a = torch.cat([x, x])", "a.chunk(2, 1)[0].untyped_storage().fill_(0)", "print(a.tolist())"
    ),
    "lists of batches and other tensors": on(
        "(6, 4)", "a = x[x > 0]", "torch._foreach_add_([x, a, x], 1)", "print(a.tolist())"
    ),
    "garbage collected on one rank": on(
        "(6, 4)",
        "for bit in range(5):\n"  # numbers of processes that begin together differ in these
        "    out = torch.zeros(6, 2)\n"
        "    for memory in (x, out):\n"
        "        thing = Thing(); thing.itself = thing; thing.row = memory[0]; del thing\n"
        "    if os.getpid() >> bit & 1: gc.collect()\n"
        "    x.neg_(); out[:, 1] = x.sum(1)\n"
        "    print(out.tolist())",
        header=("import gc, os", "class Thing: pass", "gc.disable()"),
    ),
    "addresses of memory that arrays share": on(
        "(6, 4)",
        "array = x.numpy()",
        "print(x.data_ptr() == torch.from_numpy(array).data_ptr(), x.data_ptr() == x[:, :0].data_ptr())",
    ),
    "arrays of other types": on(
        "(6, 4)",
        "numbers, bits, bytes = x.numpy(), x.view(torch.int64).numpy(), x[:, 2:].view(torch.uint8).numpy()",
        "bits[2, 1] = 7; bytes[4] = 64; numbers[5] = 3",
        "print(x.tolist(), bits.tolist(), bytes.tolist())",
    ),
    "numbers of a conjugate": on(
        "(6, 4)",
        "z = torch.complex(x, x + 1)",
        "y = z.conj().resolve_conj().numpy()",
        "row, parts = z.conj()[1], torch.view_as_real(z)[2]",
        "print(row.tolist(), parts.tolist(), z.real[1].tolist(), z.conj().imag[1].tolist())",
    ),
    "an array in which only a sign changes": on(
        "(6, 4)", "array = x.zero_().numpy()", "array[2] = -0.0", "print(torch.signbit(x).tolist())"
    ),
    "storages": on(
        "(6, 4)",
        "storage = x[:, 1:].untyped_storage()",
        "storage.fill_(0); print(x.tolist())",
        "storage[3] = 64; x.add_(1); print(list(storage), x.tolist())",
        "print(len(x.t().untyped_storage()), x.view(torch.int32).untyped_storage().nbytes())",
        "x.storage()[6] = 2.0",
    ),
    "lists of a batch and of arrays and rows of it": on(
        "(6, 4)",
        "array, y = torch.from_numpy(x.numpy())[1:3], x[:, 1:]",
        "torch._foreach_mul_([array, y, array], 2.0)",
        "print(array.tolist(), y.tolist(), x.tolist())",
        "torch._foreach_add_([x[1], x, x[1]], 1)",
    ),
    "a hook on what requires no gradient": on("(6, 4)", "(x + 1).register_hook(print)", "x.register_hook(print)"),
    "tensors brought to one shape": on(
        "(6, 4)",
        "y, z = pair = torch.broadcast_tensors(x, x[:, :1])",
        "print(type(pair), y is x, z.stride())",
        "print(type(x.hsplit(2)), type(torch.atleast_2d(x, z)), torch.atleast_2d(x, z)[0] is x)",
    ),
    "a result in the memory of the other operand": on(
        "(6, 1, 3)", "torch.add(x.swapaxes(0, 1), 1, out=x.permute(1, 0, 2))"
    ),
    "a result in the memory of an argument": on(
        "(4, 2, 4)",
        "y = x[:, :1].expand(x.shape)",
        "torch.add(y, y, out=x)",
        "torch.cumsum(x[:, :, 1:], 0, out=x[:, :, :3])",
        "torch.cumprod(x[1:], 0, out=x[:3])",
    ),
    "one number of a batch": on("(6, 4)", "y = x[:, 2]", "print(torch.cat([y[:1], y]).tolist())"),
    "a row copied over its batch": on("(6, 4)", "x.copy_(x[0])"),
    "writes that fail": on(
        "(6, 4)",
        "columns = x.argmax(1, keepdim=True); columns[3] = 9",
        "x.index_put_((torch.tensor([0, 1, 9]),), torch.tensor(5.0))",
        "x[torch.arange(6), columns[:, 0]] = 6.0",
        "x[:, torch.tensor([0, 1, 9])] = 7.0",
        "x[[0, 1, 9]] = 8.0",
        "x.scatter_(1, columns, 9.0)",
        "x.scatter_(1, index=columns, value=4.0)",
        "x.scatter_add_(dim=1, index=columns, src=x.clone())",
        "x.index_fill_(5, torch.tensor([0]), 2)",
        "x.index_put_(indices=(torch.arange(6), columns[:, 0]), values=torch.tensor(3.0))",
        "x.index_add_(dim=0, index=torch.tensor([1]), source=x[:1] + 1)",
        "x.index_add_(1, torch.tensor([0, 1, 9]), x[:, :3] + 1)",
        "x.index_fill_(1, torch.tensor([0, 1, 9]), 2)",
        "x.index_copy_(0, torch.tensor([0, 1, 9]), x[:3] + 1)",
    ),
    "parts at positions in a tensor": on(
        "(4, 4)", "y = x.tensor_split(torch.tensor([1]), -1)[1]", "print(y.stride())", "y.add_(1)"
    ),
    "copies of what is not dense": on(
        "(5, 4)",
        "print(copy.deepcopy(x[:, ::2]).stride())",
        "y, columns = copy.deepcopy([x, x[:, 1:]])",
        "y.add_(1); print(columns.tolist())",
        header=("import copy",),
    ),
    "overlapping windows": on(
        "(6, 4)",
        "y = x.unfold(1, 2, 1)",
        "y.scatter_add_(0, torch.zeros_like(y, dtype=torch.long), y.clone())",
        "row = y[1]; row[1, 0] = 9.0; print(row.stride(), y.stride(), y.tolist())",
    ),
    "copies of conjugates": on(
        "(6, 4)",
        "z = torch.complex(x, x + 1)",
        "for _ in range(3): z.resolve_conj()",
        "y = z.conj().resolve_conj()",
        "y.mul_(2)",
        "print(y.is_conj(), z.tolist())",
    ),
    "put": on("(6, 4)", "x.put_(torch.tensor([1, 7]), torch.tensor([1.0, 2.0]))"),
    "a flag in a record": on(
        "(6, 4)",
        "with torch.set_grad_enabled(step % 2 == 0): h = x * weight",
        "print(h.requires_grad, h.is_leaf, h.detach().is_leaf, h.is_inference())",
        header=("weight = torch.ones(4, requires_grad=True)",),
    ),
    "shuffled channels, one of each group": on("(3, 2, 1, 3)", "y = F.channel_shuffle(x, 2); y += 1; print(y.sum())"),
    "a shallow copy of a view": on(
        "(6, 3, 2)",
        "y = copy.copy(x[:, 0]); y += 1",
        "print(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), y.stride())",
        "z = (x * 2).requires_grad_(); w = copy.copy(z * 3)",
        "w.square().sum().backward(); print(w.grad.tolist(), z.grad)",
        header=("import copy",),
    ),
    "where an empty view begins": on(
        "(4, 2, 3)",
        "print([y.storage_offset() for y in (x[:, 2:1, 2:1], x.T[1:1], x.transpose(0, 1)[2:2], x[:, 2:])])",
    ),
    "the address of an array beside a smaller copy": on(
        "(6, 3, 4)",
        "x.narrow(-1, 1, 2)[::2, :, 1].mul_(2); y = torch.from_numpy(x.numpy())",
        "print(y.data_ptr() == x.data_ptr(), x[:, 1].data_ptr() - y.data_ptr())",
    ),
    "an error of shapes that a single row raises otherwise": on("(4, 4)", "F.group_norm(x[:, :3], 2)"),
    "other data of a parameter between forward and backward": on(
        "(6, 3)",
        "y = (x / 8).requires_grad_(); h = net(y * v)",
        "v.data = v.data.flip(0); net.weight.data = net.weight.data * 2",
        "h.square().mean().backward(); print(y.grad.tolist(), v.grad.tolist(), net.weight.grad.tolist())",
        header=("torch.manual_seed(0); net, v = nn.Linear(3, 4), nn.Parameter(torch.randn(3))",),
    ),
    "data that is a plain tensor": on(
        "(5, 4)",
        "x.data = memory; memory[2] = 3",
        "print(x.tolist())",
        "x[1] = 5; row = x[0]; row += 1",
        "print(memory.tolist())",
        "if step: last.mul_(2)",
        "print(memory.tolist())",
        "last = x",
        header=("memory = torch.ones(5, 4)",),
    ),
    "a plain tensor whose data is a batch": on(
        "(6, 4)",
        "w.data = x; x.mul_(2); print(w.tolist())",
        "w.mul_(0.5); print(x.tolist())",
        header=("w = torch.ones(6, 4)",),
    ),
    "a gradient that is a plain tensor": on(
        "(6, 4)",
        "x.requires_grad_(); x.grad = memory",
        "(x * 2).sum().backward(); print(memory.tolist())",
        "memory.mul_(0.5); print(x.grad.tolist())",
        "x.grad.sub_(1); print(memory.tolist())",
        "del x.grad; print(x.grad)",
        "x.sum().backward(); x.grad.data = torch.ones(6, 4)",
        "(x * 2).sum().backward(); print(x.grad.tolist())",
        header=("memory = torch.ones(6, 4)",),
    ),
    "gradients and data that two batches share": on(
        "(6, 4)",
        "h, k, memory = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.zeros(6, 4)",
        "h.grad = k.grad = memory; (h * 2 + k * 3).sum().backward(); print(memory.tolist())",
        "grad = h.grad; h.grad = grad * 2; h.grad = grad; print(h.grad is grad)",
        "k.grad = h.grad; (h * 2 + k * 3).sum().backward(); print(h.grad.tolist())",
        "h.data = k.data = memory; h.data.add_(1); print(k.tolist(), memory.tolist())",
        "array = numpy.zeros((6, 4)); x.data = torch.from_numpy(array).float(); x.add_(1)",
        "double = x.double(); double.data = torch.from_numpy(array); double.add_(1); print(array.tolist())",
        "array[0] = 9; print(double.tolist())",
        header=("import numpy",),
    ),
    "a batch as the weight of a plain tensor's gradient": on(
        "(6, 4)",
        "w.grad = None; w.mul(2).backward(x); torch.autograd.backward(w, x); print(w.grad.tolist())",
        "print(torch.autograd.grad(w * 2, w, x)[0].tolist(), torch.autograd.grad([w * 3], [w], [x])[0].tolist())",
        "z = x.clone().requires_grad_(); print(torch.autograd.grad([w * 3, z * 2], [w, z], [x, x])[0].tolist())",
        header=("w = torch.ones(6, 4, requires_grad=True)",),
    ),
    "a hook that returns what the script holds": on(
        "(6, 4)",
        "(x @ w).sum().backward(); w.grad.mul_(2); print(w.grad.tolist(), mask.tolist())",
        "w.grad = None",
        header=(
            "w, mask = torch.ones(4, 2, requires_grad=True), torch.ones(4, 2)",
            "w.register_hook(lambda gradient: mask)",
        ),
    ),
    "a gradient transposed in place": on(
        "(6, 4)",
        "(x.requires_grad_() * 2).sum().backward(); x.grad.t_(); print(x.grad.shape)",
        "x.grad = None; (x * 3).sum().backward(); print(x.grad.shape)",
    ),
    "rows of a gradient over a backward pass": on(
        "(6, 4)",
        "(x.requires_grad_() * 2).sum().backward()",
        "row, array = x.grad[0], x.grad.numpy()",
        "(x * 2).sum().backward()",
        "print(row.tolist(), array.tolist())",
    ),
    "pieces and draws of no entries": on(
        "(4, 2, 0)", "print(x.unbind(2), [column for column in x.mT.transpose(0, 1)], x.bernoulli_(0.5).shape)"
    ),
    "draws with an impossible probability": on("(4, 2)", "x.bernoulli_(7)"),
    "the first batch of a loader detached in place": Program(
        ("data = torch.arange(24.).view(12, 2)",),
        "for step, x in enumerate(DataLoader(data, batch_size=4, shuffle=True)):",
        ("print(x.detach_().shape)",),
    ),
}

OTHERS = {
    "inputs of a pass that are no leaves": on(
        "(6, 2)",
        "w = torch.ones(2, requires_grad=True); h = w * 2; x.requires_grad_(); y = x * 3",
        "(h * y).sum().backward(inputs=[h]); print(h.grad, w.grad, x.grad)",
        "z = h * y; z.backward(torch.ones(6, 2), inputs=[h, y]); print(h.grad, y.grad.tolist(), w.grad, x.grad)",
    ),
    "gradients of a pass with a graph, beside a batch": on(
        "(6, 2)",
        "net = nn.Linear(2, 2); x.requires_grad_(); net(x).square().mean().backward(create_graph=True)",
        "print((net.weight.grad.sum(0) * x).tolist())",
        "fast = [p - 0.1 * p.grad for p in net.parameters()]; net.zero_grad()",
        "F.linear(x, *fast).square().mean().backward(); print(x.grad.tolist(), [p.grad for p in net.parameters()])",
        header=("torch.manual_seed(0)",),
    ),
    "gradients that torch refuses": on(
        "(6, 2)",
        "x.requires_grad_(); w = torch.ones(2, requires_grad=True); y = (x * w).sum()",
        "def grad(): torch.autograd.grad(y, w, allow_unused=False, materialize_grads=True)",
        "for refused in (grad, lambda: setattr(x, 'grad', 0), lambda: setattr(x, 'grad', w)):",
        "    try: refused()",
        "    except (TypeError, ValueError, RuntimeError) as error: print(type(error))",
    ),
    "a pass within a pass, which reads the gradient of its leaf": on(
        "(6, 3)",
        "x.requires_grad_(); mask = (x.detach() > 0).float(); z = Undone.apply(x, lambda x: net(x) * mask)",
        "def times(gradient):",
        "    with torch.enable_grad():",
        "        w = torch.ones(6, 3, requires_grad=True); (w * mask * w).sum().backward()",
        "    return gradient * w.grad",
        "z.register_hook(times); z.sum().backward()",
        "print(x.grad.tolist(), net.weight.grad.tolist())",
        header=(
            "class Undone(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x, function):\n"
            "        ctx.function = function; ctx.save_for_backward(x)\n"
            "        return function(x)\n"
            "    @staticmethod\n"
            "    def backward(ctx, gradient):\n"
            "        with torch.enable_grad():\n"
            "            x = ctx.saved_tensors[0].detach().requires_grad_(); y = ctx.function(x)\n"
            "        y.backward(gradient)\n"
            "        return x.grad, None",
            "torch.manual_seed(0); net = nn.Linear(3, 3)",
        ),
    ),
    "a mapping of what is computed whole": on(
        "(6, 2)",
        "x.requires_grad_(); y = pickle.loads(pickle.dumps(x)); (x * y).sum().backward()",
        "print(y.grad.tolist(), type(torch.vmap(lambda row: OrderedDict(a=row.sin()))(x.detach())))",
        header=("import pickle; from collections import OrderedDict",),
    ),
    "samples in another layout, of which a rank has one": Program(
        ("data = torch.arange(42).view(7, 1, 3, 1, 2).permute(3, 1, 4, 2, 0).contiguous().permute(4, 1, 3, 0, 2)",),
        "for step, (x,) in enumerate([*DataLoader(TensorDataset(data), batch_size=4)] * 2):",
        ("print(x.tolist(), x.stride(), x._is_view())",),
    ),
    "a plain tensor converted to the type of a batch": on(
        "(6, 3)",
        "z = x * w; m = x[:, 0] > 0; rows = z[m]; y = x.clone(); y[m] = (rows * w).to(y) + w.type_as(x)",
        "w.grad = None; (y**2).sum().backward(); print(y, w.grad, w.to(x.double()).dtype)",
        header=("w = torch.tensor([1.5, 2.0, -1.0], requires_grad=True)",),
    ),
    "a BatchNorm of another type than its batch": on(
        "(6, 3)", "print(bn(x.double()).dtype)", "print(bn(x.half()).dtype)", header=("bn = nn.BatchNorm1d(3)",)
    ),
    "a parameter that grows before a batch of few rows": on(
        "(3, 3)",
        "if step == 2: net.weight.data = torch.ones(4, 3); net.bias.data = torch.zeros(4)",
        "for rows in (data, x[:2]):\n    net.zero_grad(); net(rows).square().mean().backward(); print(net.bias.grad)",
        header=("torch.manual_seed(0); net = nn.Linear(3, 3)",),
    ),
    "weights stacked with a batch": on(
        "(4, 4)",
        "stacked = torch.column_stack([w, x]), torch.vstack([x, w]), torch.dstack([w, x[:, 0]])",
        "for t in stacked:\n"
        "    w.grad = None; (t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum().backward(); print(w.grad)",
        header=("w = torch.arange(1.0, 5.0, requires_grad=True)",),
    ),
    "draws that raise an error of types": on(
        "(6, 3)",
        "torch.manual_seed(step); y = x.long()",
        "F.dropout(y[:], 0.5, inplace=True)",
        "print(y.tolist(), torch.rand(2))",
        "x.expand(2, 6, 3).normal_()",
        "x.to(torch.complex64).bernoulli_(0.5)",
        "print(torch.rand(2))",
    ),
    "draws that raise an error of values": on(
        "(6, 3)",
        "torch.manual_seed(step); p = x.sigmoid(); p[3, 1] = 1 + step % 2",
        "print(torch.bernoulli(p).tolist())",
        "x.bernoulli_(p)",
        "print(torch.normal(x, 1.5 - p).tolist())",
        "print(torch.multinomial(1.5 - p, 1).tolist())",
        "print(torch.poisson(1.5 - p).tolist())",
        "print(torch.rand(2))",
    ),
    "samples that are read together": Program(
        (
            "class Centred(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 18\n"
            "    def __getitems__(self, indices): return list(rows[indices] - rows[indices].mean(0))",
            "rows = torch.arange(36.0).view(18, 2).square()",
        ),
        "for x in DataLoader(Centred(), batch_size=6):",
        ("print(x.tolist())",),
    ),
    "a dataset that remembers the sample read last": Program(
        (
            "class Differences(torch.utils.data.Dataset):\n"
            "    last = torch.zeros(2)\n"
            "    def __len__(self): return 18\n"
            "    def __getitem__(self, index):\n"
            "        before, self.last = self.last, rows[index]\n"
            "        return self.last - before",
            "rows = torch.arange(36.0).view(18, 2).square()",
        ),
        "for x in DataLoader(Differences(), batch_size=6):",
        ("print(x.tolist())",),
    ),
    "a dataset that requires a gradient": Program(
        ("rows = torch.arange(24.0).view(12, 2).requires_grad_()",),
        "for (x,) in DataLoader(TensorDataset(rows), batch_size=6):",
        ("x.square().sum().backward()",),
        ("print(rows.grad.tolist())",),
    ),
    "rows that are written and then saved by autograd": on(
        "(6, 3)",
        "x[0] = 1; x[4:].zero_(); x[:2] += 1",
        "net.zero_grad(); sum(net(row) for row in x.split(2)).square().sum().backward()",
        "print(net.weight.grad.tolist())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 2)",),
    ),
    "a tensor of a list of batches": on("(6,)", "print(torch.as_tensor([x, x]))"),
    "a batch kept as a buffer": on(
        "(5, 4)",
        "net = nn.Sequential(nn.Linear(4, 4))",
        "net[0].register_buffer('queue', torch.cat([x, x])[:5].double())",
        "net(x)",
        "print(net[0].queue.tolist())",
    ),
    "Dropout1d on columns": on("(6, 4)", "torch.manual_seed(step)", "print(F.dropout1d(x, 0.5).tolist())"),
    "Dropout3d on images": on("(6, 2, 3, 3)", "torch.manual_seed(step)", "print(F.dropout3d(x, 0.5).tolist())"),
    "noise like an expanded batch": on(
        "(6, 4)",
        "torch.manual_seed(step)",
        "std = x.abs().unsqueeze(1).expand(-1, 5, -1)",
        "print(torch.randn_like(std).tolist())",
        "print(torch.rand_like(std).tolist())",
        "print(torch.normal(std, std).tolist())",
        "print(torch.bernoulli(std / 100).tolist())",
    ),
    "sample of a mixture": on(
        "(6, 4)",
        "torch.manual_seed(step)",
        "D = torch.distributions",
        "mixture = D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, 1.0))",
        "print(mixture.sample().tolist())",
    ),
    "hook on a batch of fewer rows than shares": on(
        "(7, 3)",
        "weight.grad = None",
        "h = F.linear(x, torch.diag(weight), bias)",
        "h.register_hook(lambda g: g * 10)",
        "(h * 1).sum().backward()",
        "print(weight.grad.tolist())",
        header=("weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3)",),
    ),
    "hook on a leaf whose gradient is asked for": on(
        "(6, 3)",
        "loss = torch.tanh(x @ weight).square().sum()",
        "print(torch.autograd.grad(loss, [weight])[0].tolist())",
        header=(
            "torch.manual_seed(0); weight = torch.randn(3, 3, requires_grad=True)",
            "weight.register_hook(lambda g: g * 2)",
        ),
    ),
    "rows with noise of their own": Program(
        (
            "torch.manual_seed(1); data = torch.randn(20, 4)",
            "class Noisy(torch.utils.data.Dataset):\n"
            "    def __len__(self): return len(data)\n"
            "    def __getitem__(self, i): return data[i] + torch.randn(4) * 0.1",
            "torch.manual_seed(0); loader = DataLoader(Noisy(), batch_size=9, shuffle=True)",
        ),
        "for epoch, x in ((epoch, x) for epoch in range(2) for x in loader):",
        ("print(x.tolist(), torch.rand(1).item())",),
    ),
    "rrelu in inference mode": on(
        "(6, 4)",
        "with torch.inference_mode(): print(F.rrelu(x, training=True).tolist(), torch.rand(1).item())",
        header=("torch.manual_seed(0)",),
    ),
    "draws within other functions in inference mode": on(
        "(9, 4, 8)",
        "x = x / 8",
        "with torch.inference_mode(): print([f(x).tolist() for f in layers], torch.rand(1).item())",
        header=(
            "torch.manual_seed(0)",
            "encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)",
            "attend = lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)",
            "recurrent = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)",
            "layers = attend, encoder, lambda x: recurrent(x)[0], lambda x: F.gumbel_softmax(x, dim=-1)",
        ),
    ),
    "dimensions out of range": on(
        "(6, 2, 4)",
        "print(torch.cat([x, x], -4).shape)",
        "print(torch.cat([x, x], 3).shape)",
        "print(torch.stack([x, x], 4).shape)",
        "print(x.sum(3).shape)",
        "print(x.mean((1, 3)).shape)",
        "print(x.std(-4).shape)",
        "print(x.any(3).shape)",
        "print(torch.linalg.vector_norm(x, dim=3).shape)",
    ),
    "a batch whose shape changes in place": on(
        "(8, 4, 4)",
        "x.swapdims_(1, 2)",
        "print(x.stride(), x.is_contiguous())",
        "y = x",
        "x.unsqueeze_(1)",
        "print(y.shape, y is x)",
    ),
    "a backward pass that fails": on(
        "(6, 4)",
        "weight.grad = head.grad = None",
        "h = F.relu(x @ weight)",
        "(F.dropout(h, 0.5, inplace=True) @ head).sum().backward()",
        "print(None if head.grad is None else head.grad.tolist())",
        header=(
            "torch.manual_seed(0)",
            "weight, head = torch.randn(4, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)",
        ),
    ),
    "a backward pass that fails, and a hook": on(
        "(8, 4)",
        "weight.grad = None",
        "h = F.relu(x @ weight)",
        "(F.dropout(h, 0.5, inplace=True) @ head).sum().backward()",
        "print(None if head.grad is None else head.grad.tolist())",
        header=(
            "torch.manual_seed(0)",
            "weight, head = torch.randn(4, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)",
            "head.register_hook(lambda grad: grad * 2)",
        ),
    ),
    "parameters() that returns a list": on(
        "(6, 3)",
        "print(net(x).tolist())",
        header=(
            "class Net(nn.Linear):\n    def parameters(self): return [self.weight, self.bias]",
            "torch.manual_seed(0)",
            "net = Net(3, 2)",
        ),
    ),
    "computed whole in a call being recorded": on("(4, 4, 4)", "print(torch.vsplit(x, 2)[1].tolist())"),
    "addresses of nothing": on(
        "(5, 2, 3)",
        "a, b = x[:, :0], x[1:1]",
        "print(a.data_ptr(), b.data_ptr(), x[1:].data_ptr() - x.data_ptr(), x[:, 1].data_ptr() - x.data_ptr())",
    ),
    "a plain tensor into which rows are written in inference mode": on(
        "(5, 5)",
        "with torch.inference_mode(): queue[:] = x",
        "queue += 1; queue[:2] = x[:2]; print(queue, queue.is_inference())",
        "(queue * w).sum().backward(); print(w.grad)",
        header=("queue, w = torch.zeros(5, 5), nn.Parameter(torch.ones(5))",),
    ),
    "rows that are written before a read in inference mode, and in it": on(
        "(6, 4)",
        "z = x * w; z[1][0] = 0.5",
        "with torch.inference_mode(): y = x * 2; y[0][1] = 3; print(z.sum())",
        "print(torch.autograd.grad((z * z).sum(), w), y)",
        header=("w = torch.arange(1., 5.).requires_grad_()",),
    ),
    "a plain tensor written by a submodule in inference mode": on(
        "(5, 5)",
        "with torch.inference_mode(): print(net(x).tolist())",
        header=(
            "torch.manual_seed(0); data = torch.arange(45).view(9, 5) % 9",
            "net = nn.Sequential(nn.EmbeddingBag(9, 4, mode='sum'), nn.ReLU(inplace=True), nn.Linear(4, 3))",
        ),
    ),
    "a hook on what needs no gradient": on(
        "(5, 2)", "x[:1].sum(0).register_hook(print)", "x[0].register_hook(print)"
    ),
    "a parameter that is frozen after its use": on(
        "(5, 3)",
        "net.requires_grad_(True); net.weight.grad = None; out = net(x) + (x * v)[:, :2]",
        "net.requires_grad_(False); out.sum().backward(); print(net.weight.grad, v.grad.tolist())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 2); v = torch.ones(3).requires_grad_()",),
    ),
    "running statistics that another call has saved": on(
        "(5, 3)",
        "net.zero_grad(); h = torch.arange(12.).view(4, 3) * net.weight",
        "h = F.batch_norm(h, net.running_mean, net.running_var, net.weight, net.bias, True)",
        "(h.square().mean() + net(x).square().mean()).backward()",
        "print(net.weight.grad.tolist(), net.running_mean.tolist())",
        header=("net = nn.BatchNorm1d(3)",),
    ),
    "views that are saved and loaded": on(
        "(5, 3)",
        "buffer = io.BytesIO(); torch.save({'x': x, 'views': [x.t(), x[:, 1:]], 'y': x + 1}, buffer); buffer.seek(0)",
        "loaded = torch.load(buffer); loaded['x'].zero_(); print(loaded, loaded['views'][1].stride())",
        header=("import io",),
    ),
    "a write through data to a batch of which a function has saved a part": on(
        "(7, 3)",
        "w.grad = None; h = [part @ w for part in x.split(3)][0] * x[1]; x.data[:, 1] = 0; h.sum().backward()",
        "print(w.grad.tolist())",
        header=("w = (torch.arange(9.).view(3, 3) / 9).requires_grad_()",),
    ),
    "a loss in a function that is computed again": on(
        "(6, 3)",
        "checkpoint(lambda h: F.cross_entropy(net(h), x.argmax(1)), x, use_reentrant=False).backward()",
        "print(net.weight.grad.tolist())",
        header=("from torch.utils.checkpoint import checkpoint", "torch.manual_seed(0); net = nn.Linear(3, 3)"),
    ),
    "parameters in a batch's memory": on(
        "(6, 4)",
        "weight = nn.Parameter(x); weight.data.mul_(2); print(x.tolist())",
        "x.add_(1); print(weight.tolist())",
        "row = nn.Parameter(x[0]); row.data.zero_(); print(x.tolist())",
    ),
    "a write through data to what autograd has saved": on(
        "(6, 3)",
        "for function in (lambda h: torch.cdist(h, h), lambda h: h @ h.t(), lambda h: h.cumprod(0)):\n"
        "    w.grad = None; h = torch.tanh(x @ w / 20) * 1; out = function(h)\n"
        "    h.data.mul_(0.9); out.sum().backward(); print(w.grad.tolist())",
        header=("w = (torch.arange(9.).view(3, 3) / 9).requires_grad_()",),
    ),
    "x.data written in inference mode after autograd saved a gathered copy": on(
        "(6, 2)",
        "x.requires_grad_(); loss = torch.kron(x, x).sum()",
        "with torch.inference_mode(): x.data.add_(1)",
        "x.data.mul_(2); loss.backward(); print(loss.item(), x.grad.tolist())",
    ),
    "x.data written after x was written, of which autograd saved a gathered copy": on(
        "(6, 2)",
        "x.requires_grad_(); loss = torch.kron(x, x).sum()",
        "with torch.no_grad(): x.sub_(1)",
        "x.data.add_(3); print((x * 2).tolist())",
    ),
    "rows of x.data written after autograd saved a gathered copy": on(
        "(6, 4)",
        "y = (x / 8).requires_grad_(); loss = (y.logsumexp(0) ** 2).sum()",
        "y.data[0] *= 2; row = y.data[1]; row.mul_(3)",
        "loss.backward(); print(y.grad.tolist())",
        "y.grad = None; loss = (y.cumprod(0) ** 2).sum(); y.detach().numpy()[2] = 0.5",
        "print(torch.autograd.grad(loss, y)[0].tolist())",
    ),
    "batched gradients of what is not in the graph": on(
        "(5, 4)",
        "weights = torch.eye(5)",
        "of = (x @ w).sum(1), [w, v]; how = dict(materialize_grads=True, create_graph=True)",
        "out = torch.autograd.grad(*of, weights, is_grads_batched=True, **how)",
        "print([(gradient.shape, gradient.requires_grad) for gradient in out])",
        "print([gradient.requires_grad for gradient in torch.autograd.grad(of[0].sum(), of[1], **how)])",
        header=(
            "w, v = torch.ones(4, 2, requires_grad=True), torch.ones(3, requires_grad=True)",
            "v.register_hook(lambda gradient: print('not called'))",
        ),
    ),
    "gradients that are views, of a weight with a hook": on(
        "(5, 4)",
        "(x @ w).sum().backward()",
        "print(memory.tolist(), w.grad.tolist())",
        header=(
            "w, memory = torch.ones(4, 2, requires_grad=True), torch.zeros(8)",
            "w.grad = memory.view(4, 2); w.register_hook(lambda gradient: gradient * 2)",
        ),
    ),
    "rows that a module writes through a view of a function of the script": on(
        "(6, 3)",
        "h = data[step * 6 : step * 6 + 6]; out = net(h); print(h, out)",
        header=REVERSING,
    ),
    "a checkpoint of rows that a module keeps": on(
        "(6, 3)",
        "h = data[step * 6 : step * 6 + 6]; loss = checkpoint(net, h, use_reentrant=False).square().mean()",
        "net.zero_grad(); loss.backward(); print(loss.item(), net.weight.grad, net.kept)",
        header=(
            "from torch.utils.checkpoint import checkpoint; torch.manual_seed(0)",
            "class Keeping(nn.Linear):\n"
            "    kept = torch.ones(8, 3)\n"
            "    def forward(self, x):\n"
            "        out = super().forward(x) + (x @ self.kept.t()).softmax(1) @ self.kept\n"
            "        self.kept[: len(x)] = x.detach()\n"
            "        return out",
            "net = Keeping(3, 3)",
        ),
    ),
    "a plain tensor that a module keeps and returns": on(
        "(6, 3)",
        "for plain in (torch.ones(6, 3), x[:5], data[1:6], x[1:].t().contiguous().t(), w * 2):",
        "    given = {}; out, kept = net(plain, plain, given)",
        "    print(net.kept[0] is plain, net.kept[1].x is plain, kept['x'] is plain, given['x'] is plain)",
        "    w.grad = None; net.zero_grad(); (out.square().sum() + (net.kept[0] * w[: len(plain)]).sum()).backward()",
        "    print(net.weight.grad, w.grad)",
        header=(
            "import dataclasses\n@dataclasses.dataclass\nclass Pair:\n    x: torch.Tensor",
            "class Keeping(nn.Linear):\n"
            "    def forward(self, x, same, given):\n"
            "        self.kept = [x, Pair(x)]; given['x'] = x; print(x is same)\n"
            "        return super().forward(x), {'x': x}",
            "torch.manual_seed(0); net = Keeping(3, 2)",
            "w = (torch.arange(18.0).view(6, 3) / 9).requires_grad_()",
        ),
    ),
    "a plain tensor that is written to before the backward pass": on(
        "(6, 3)",
        "for write in writes:",
        "    for plain in (torch.ones(6, 3), x[:5], data[1:6], data[step * 6 :], w * 1):",
        "        out = net(plain).sum(); net.zero_grad()",
        "        try:",
        "            write(plain); out.backward()",
        "        except RuntimeError as error:",
        "            print(type(error).__name__, plain)",
        "        else:",
        "            print(net.weight.grad, plain)",
        header=(
            "torch.manual_seed(0); net = nn.Linear(3, 2); w = torch.ones(6, 3).requires_grad_()",
            "def by_array(plain): plain.detach().numpy()[0] = 2",
            "def by_batch(plain): x.add_(1)",
            "def by_data_of_batch(plain): x.data.mul_(2)",
            "by_data, by_row = lambda plain: plain.data.mul_(2), lambda plain: plain.detach()[0].zero_()",
            "writes = [by_data, by_array, by_row, by_batch, by_data_of_batch]",
        ),
    ),
    "a gradient of a batch that lies in another dimension, or has another order": on(
        "(5, 5)",
        "x.requires_grad_(); order = torch.arange(5).flip(0)",
        "print(torch.autograd.grad(x.square(), x, x.t()), torch.autograd.grad(x.t().square(), x, x))",
        "(x * 2).index_select(0, order).backward(x.detach() * 2); print(x.grad)",
        "x.grad = x.detach().t(); print(x.grad, x.grad.stride())",
        "x.grad = x.detach().index_select(0, order); (x * 3).sum().backward(); print(x.grad)",
        "y = x * 2; y.register_hook(lambda gradient: gradient.t()); (y * x).sum().backward(); print(x.grad)",
    ),
    "one running statistic of two": on(
        "(6, 3)",
        "net.running_mean = None",
        "try: net(x)",
        "except ValueError as error: print(error)",
        header=("net = nn.BatchNorm1d(3)",),
    ),
    "a weight of another size than running statistics": on(
        "(6, 3)",
        "net.weight = nn.Parameter(torch.ones(2, 3))",
        "net(x)",
        "net.weight = None; net.running_var = torch.ones(4)",
        "net(x)",
        "print(net.running_mean)",
        header=("net = nn.BatchNorm1d(3)",),
    ),
    "a Function that raises an error after a write": on(
        "(6, 3)",
        "try: Writing.apply(x)",
        "except ValueError: print(x)",
        header=(
            "class Writing(torch.autograd.Function):\n"
            "    def forward(ctx, x):\n"
            "        x.mul_(2)\n"
            "        raise ValueError",
        ),
    ),
    "a gradient of another shape than its batch": on(
        "(6, 3)",
        "y = x.requires_grad_() * 2",
        "for shape in ((1, 3), (12, 3), (6, 1), (6,)):",
        "    try: y.backward(torch.ones(shape))",
        "    except RuntimeError as error: print(error, x.grad)",
    ),
    "a write through data after a write that a backward pass has seen": on(
        "(6, 3)",
        "x.requires_grad_(); z = torch.zeros(6, 3); z[1] = x[-1] * w; z.square().sum().backward()",
        "torch.autograd.gradcheck(lambda rows: rows.square().sum(0), x.detach()[:2].requires_grad_())",
        "with torch.no_grad(): x.mul_(0.5)",
        "(x * w).sum().backward(); x.data.sub_(1)",
        header=(
            "torch.set_default_dtype(torch.float64); data = data.to(torch.float64)",
            "w = torch.ones(3, requires_grad=True)",
        ),
    ),
    "a transform of a function of columns": on(
        "(6, 3)",
        "y = (x * 2)[:, 1:]",
        "print(torch.func.grad(lambda w: F.linear(y, w).square().mean())(torch.ones(3, 2)))",
        "print(torch.func.jvp(lambda w: (y @ w).sum(0), (torch.ones(2, 3),), (torch.ones(2, 3),)))",
        "print(torch.vmap(lambda row: row.cumsum(0))(y))",
    ),
    "a row of a leaf that is written to": on(
        "(6, 3)",
        "x.requires_grad_()",
        "try: x[0] = 0.1",
        "except RuntimeError as error: print('a leaf Variable' in str(error))",
    ),
    "a Function of a batch that is no argument": on(
        "(6, 3)",
        "box['x'] = x; w.grad = None; h = Scale.apply(w, box)",
        "(h.square().mean() + Scale.apply(x * w, box).sum()).backward()",
        "print(h.requires_grad, h, w.grad)",
        header=(
            "class Scale(torch.autograd.Function):\n"
            "    def forward(ctx, w, box):\n"
            "        ctx.x, ctx.shape = box['x'], w.shape\n"
            "        return ctx.x * w\n"
            "    def backward(ctx, g):\n"
            "        return (g * ctx.x).sum_to_size(ctx.shape), None",
            "w = torch.arange(3.0, requires_grad=True); box = {}",
        ),
    ),
    "gradients of an expanded batch": on(
        "(6, 3)",
        "y = x.requires_grad_()[:, 0].expand(2, 6); y.retain_grad()",
        "torch.logdet(y.T @ y + torch.eye(6)).backward(); print(y.grad, x.grad)",
        "y = x[:, 0].expand(2, 6); print(torch.autograd.grad((y.T @ y + torch.eye(6)).logdet(), y))",
        "x = x.detach()",
    ),
    "a Function without a gradient for BatchNorm": on(
        "(6, 3)",
        "(Blocked.apply(norm(x)).sum() + norm.bias.sum()).backward(); print(norm.weight.grad, norm.bias.grad)",
        header=(
            "norm = nn.BatchNorm1d(3)",
            "class Blocked(torch.autograd.Function):\n"
            "    forward = staticmethod(lambda ctx, x: x * 2)\n"
            "    backward = staticmethod(lambda ctx, g: None)",
        ),
    ),
    "a checkpoint of what is no batch": on(
        "(6, 3)",
        "w.grad = v.grad = None; h = checkpoint(net, (w * x.sum(0)).cumsum(0), use_reentrant=True)",
        "h = checkpoint(lambda h, v: net(h) * v, h, v, use_reentrant=True)",
        "(h.norm() + checkpoint(lambda x, v: net(x) * v, x, v, use_reentrant=True).norm()).backward()",
        "print(w.grad, v.grad, net.weight.grad)",
        header=(
            "from torch.utils.checkpoint import checkpoint; torch.manual_seed(0); net = nn.Linear(3, 3)",
            "w, v = torch.randn(5, 3, requires_grad=True), nn.Parameter(torch.randn(3))",
        ),
    ),
    "a checkpoint of inputs without gradients": on(
        "(6, 3)",
        "checkpoint(net, x, use_reentrant=True).sum().backward() if step % 2 else net(x).sum().backward()",
        "checkpoint(net, x.requires_grad_(), use_reentrant=True).sum().backward() if step == 3 else None",
        "print(net.weight.grad.tolist())",
        header=("from torch.utils.checkpoint import checkpoint", "torch.manual_seed(0); net = nn.Linear(3, 2)"),
    ),
    "a checkpoint of a model with backward hooks": on(
        "(6, 3)",
        "x = x.requires_grad_(); h, k = checkpoint(lambda x: (net(x), net(x).sum(0)), x * 1, use_reentrant=True)",
        "((h * w).square().sum() + k.sum()).backward(); print(x.grad, w.grad, [p.grad for p in net.parameters()])",
        header=(
            "from torch.utils.checkpoint import checkpoint; torch.manual_seed(0)",
            "net, w = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), nn.Parameter(torch.ones(2))",
            "net.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))",
            "net[1].register_full_backward_hook(lambda module, of_input, of_output: print(of_output[0].sum()))",
        ),
    ),
    "a gradient penalty through a norm": on(
        "(8, 4)",
        "z = x.requires_grad_(); grad, = torch.autograd.grad(net(z).sum(), z, create_graph=True)",
        "((grad.norm(dim=1) - 1) ** 2).mean().backward()",
        "print([p.grad is None or p.grad.tolist() for p in net.parameters()])",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))",
        ),
    ),
    "a second gradient of a norm of rows that are zero on a rank": on(
        "(6, 4)",
        "z = x.requires_grad_(); keep = z.detach().sum(1, keepdim=True) > -20",
        "grads = [torch.autograd.grad((z * keep).norm(), z, create_graph=True)[0] for _ in range(2)]",
        "grads += torch.autograd.grad(torch.linalg.vector_norm(z.double() * keep, dim=(0, 1)), z, create_graph=True)",
        "for grad in grads: print(grad.tolist(), torch.autograd.grad((grad ** 3).sum(), z)[0].tolist())",
    ),
    "a write to what a function computed whole has saved": on(
        "(4, 3)",
        "h = x.requires_grad_() * 2; y = h.cumprod(0) @ w; h.mul_(2)",
        "try: print(torch.autograd.grad(y.sum(), x)[0].tolist())\nexcept RuntimeError: print('raises')",
        "z = x.detach() * 1; y = torch.vander(z[:, 0], 3) @ w; z.mul_(2)",
        "y.sum().backward(); print(w.grad.tolist())",
        "h = x * 2; y = h.cumprod(0); z.mul_(2); k = h * 3; k.mul_(2)",
        "print(torch.autograd.grad(y.sum(), x)[0].tolist())",
        header=("w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)",),
    ),
    "attributes of copies": on(
        "(4, 3)",
        "x.tag = ['a']; a, b = copy.copy(x), copy.deepcopy(x)",
        "print(a.tag, a.tag is x.tag, b.tag, b.tag is x.tag, hasattr(x.clone(), 'tag'))",
        header=("import copy",),
    ),
    "the order of hooks on parameters": on(
        "(6, 3)",
        "net(x[:6 - 4 * (step % 2)]).sum().backward()",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))",
            "for n, p in net.named_parameters(): p.register_hook(lambda g, n=n: print(n, g.sum().item()))",
        ),
    ),
    "writes to pieces without gradients": on(
        "(4, 4)",
        "h = x.requires_grad_() * 2; pieces = (*h.chunk(2, 1), *h.unbind(1), *h.split(2, 1))",
        "with torch.no_grad():\n    for piece in pieces: piece.mul_(2); piece[piece > 3] = 1",
        "print(h.tolist(), torch.autograd.grad(h.sum(), x)[0].tolist())",
    ),
    "a function that gives no gradient": on(
        "(6, 3)",
        "h = x.requires_grad_() * 2; y = Silent.apply(h, w)",
        "print([g is None or g.tolist() for g in torch.autograd.grad(y.sum(), (x, h, w), allow_unused=True)])",
        "(Silent.apply(x * 2, w) + w.sum()).sum().backward(); print(x.grad, w.grad.tolist()); w.grad = None",
        header=(
            "class Silent(torch.autograd.Function):\n"
            "    @staticmethod\n"
            "    def forward(ctx, x, w): ctx.save_for_backward(x); return x @ w\n"
            "    @staticmethod\n"
            "    def backward(ctx, g): return None, ctx.saved_tensors[0].t() @ g",
            "torch.manual_seed(0); w = torch.randn(3, 3, requires_grad=True)",
        ),
    ),
    "strides of gradients of few rows": on(
        "(4, 3)",
        "t = x.t().contiguous().t().requires_grad_(); h = t * 1",
        "h.register_hook(lambda g: print(g.stride(), g.is_contiguous()))",
        "grads = torch.autograd.grad((h * h).sum(), (t, h))",
        "print([(g.stride(), g.is_contiguous(), (g + 1).stride()) for g in grads])",
    ),
    "strides that kernels without values do not give": on(
        "(4, 3)", "t = x.t().contiguous().t()", "print((t // 2).stride(), t.div(2, rounding_mode='floor').stride())"
    ),
    "a complex view of a single row": on(
        "(4, 2)", "print(torch.view_as_complex(x).tolist())", "print(torch.view_as_complex(x.t().contiguous().t()))"
    ),
    "groups of a single entry": on(
        "(4, 2)", "print(F.group_norm(x[:3], 2).tolist())", "print(F.group_norm(x[:1], 2).tolist())"
    ),
    "a backward hook of a module that returns a batch": on(
        "(6, 3)",
        "saved = []; hooks = [net[1].register_forward_hook(lambda module, args, out: saved.append(out > 0))]",
        "hooks += [net[1].register_full_backward_hook(lambda module, of_input, _: (of_input[0] * saved[0],))]",
        "hooks += [net[2].register_full_backward_pre_hook(lambda module, _: (x[:, :2],))]",
        "net.zero_grad(); net(x).sum().backward(); print(net[0].weight.grad.tolist())",
        "for hook in hooks: hook.remove()",
        header=("torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))",),
    ),
    "a model that is exported with a batch": on(
        "(6, 3)",
        "if step == 1: exported = torch.export.export(net, (x,)).module(); print(exported(x).tolist())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 2)",),
    ),
    "real and imaginary parts that are set": on(
        "(6, 3)",
        "z = torch.complex(x, x * 2); z.real = x[0]; z.imag += 1; z.imag[0] = x[1]",
        "plain = torch.zeros(len(x), 3, dtype=torch.complex64); plain.imag = x; plain.real = 2; x.real = x * 2",
        "print(z.tolist(), plain.tolist())",
    ),
    "a sum written in place": on(
        "(6, 4)",
        "total = x.sum(); print(total._is_view()); total += w.norm()",
        "columns = x.mean(0); columns.mul_(w)",
        "w.grad = None; (total + columns.sum()).backward(); print(w.grad)",
        header=("w = nn.Parameter(torch.ones(4))",),
    ),
    "a leaf filled by nn.init": on(
        "(6, 4)",
        "y = x.clone().requires_grad_(); nn.init.normal_(y); (y * y).sum().backward(); print(y, y.grad, y.is_leaf)",
        "z = y * 2; nn.init.uniform_(z); y.grad = None; (z * z).sum().backward(); print(z, y.grad)",
        "y.put_(torch.tensor([1]), torch.tensor([3.0]))",
        header=("torch.manual_seed(0)",),
    ),
    "a hook of a weight that raises an error": on(
        "(6, 4)",
        "(x * w).square().sum().backward()",
        "print(w.grad)",
        "if step == 1: w.grad = None",
        header=(
            "w = nn.Parameter(torch.ones(4))",
            "def check(gradient):\n    print(w.grad)\n    if gradient.sum() > 2500: raise ValueError",
            "w.register_hook(check)",
        ),
    ),
    "arguments returned in a list": on(
        "(6, 4)",
        "a, b = torch.atleast_2d([x, x]); c, d = torch.atleast_3d([x, x[:, 0]])",
        "print(a is x, b is x, c is x); x *= 2; print(a, b, c, d); a += 1; print(x, c)",
    ),
    "hooks before and after a write in place": on(
        "(6, 4)",
        "y = x * w; y.register_hook(lambda g: g + 1); z = y.pow_(2)",
        "z.register_hook(lambda g: g.clamp(-0.1, 0.1)); y.register_hook(lambda g: print(g))",
        "w.grad = None; (y * y).sum().backward(); print(w.grad)",
        header=("w = nn.Parameter(torch.ones(4))",),
    ),
    "dropout of features of vectors": on(
        "(6, 4)",
        "torch.manual_seed(step); print(F.dropout2d(x), F.dropout3d(x), F.dropout3d(x[:, None]))",
        "print(F.dropout1d(x), F.dropout(x), torch.rand(2))",
    ),
    "any and all of bytes": on(
        "(6, 4)",
        "y = (x % 3).byte(); print(y.any().dtype, y.all().dtype, y.any(0), y.all(1), torch.any(y, 0, keepdim=True))",
        "print(y.all().item(), (~y.any()).item(), y.bool().any().dtype)",
    ),
    "a weight in one list with a batch": on(
        "(6, 4)",
        "w.grad = None; sum(y.square().sum() for y in torch._foreach_mul([x, w], 2)).backward(); print(w.grad)",
        "w.grad = None; sum(torch._foreach_norm([x * 1, w])).backward(); print(w.grad)",
        header=("w = nn.Parameter(torch.ones(4))",),
    ),
    "a norm written in place": on(
        "(6, 4)",
        "y = x * w; y.norm().add_(1); torch.linalg.norm(y).clamp_(0.1)",
        "largest = y.norm(float('inf'), dim=0); largest *= 2",
        "lengths = y.norm(dim=0); w.grad = None; lengths.sum().backward(); print(w.grad)",
        header=("w = nn.Parameter(torch.ones(4))",),
    ),
    "gradients of a batch with a hook": on(
        "(6, 4)",
        "y = x * w; y.register_hook(lambda g: g * 2); y.register_hook(lambda g: print(g.shape))",
        "loss = (y * 2).square().sum(); w.grad = None",
        "print(torch.autograd.grad(loss, [y], create_graph=True))",
        "loss.backward(inputs=[y], retain_graph=True); print(y.grad)",
        "loss.backward(inputs=[y, w]); print(y.grad, w.grad)",
        header=("w = nn.Parameter(torch.ones(4))",),
    ),
    "the gradient of a batch that is no leaf, set by the script": on(
        "(9, 3)",
        "x.requires_grad_()",
        "v = x.cumprod(1)",
        "u = F.dropout(v, 0.5, training=False)",
        "r = torch.autograd.grad(0.5 * u.flatten()[0], u, retain_graph=True)[0]",
        "u.grad = r",
        "print(v.grad, v.grad is r)",
        "u.grad.mul_(2)",
        "print(r)",
        "v.retain_grad()",
        "u.sum().backward()",
        "print(v.grad)",
        "del v.grad",
        "print(u.grad)",
    ),
    "a gradient that is kept over two passes": on(
        "(9, 3)",
        "v = x.requires_grad_() * x",
        "v.retain_grad()",
        "l = (v * 2).sum()",
        "l.backward(retain_graph=True)",
        "g = v.grad",
        "g.mul_(3)",
        "print(v.grad is g)",
        "l.backward(retain_graph=True)",
        "print(v.grad, g, v.grad is g)",
        "v.grad = ones = torch.ones(9, 3)",
        "l.backward()",
        "print(v.grad, ones)",
    ),
    "views without gradients, which have none": on(
        "(9, 3)",
        "with torch.no_grad(): v = w[0]",
        "print(v.requires_grad, v.is_leaf)",
        "v.register_hook(lambda g: print('hook', g))",
        "v.register_post_accumulate_grad_hook(lambda g: print('hook', g))",
        "(x * v * w).sum().backward()",
        "print(v.grad, w.grad)",
        header=("w = nn.Parameter(torch.ones(1, 3))",),
    ),
    "errors of writes to batches that require gradients": on(
        "(9, 3)",
        "x = net(x)",
        "x.addmm_(x, torch.ones(3, 5))",
        "x.addr_(torch.ones(9), torch.ones(4))",
        "x.cumsum_(4)",
        "torch.addmm(x, x, torch.ones(3, 3), out=torch.empty(9, 3))",
        header=("net = nn.Linear(3, 3)",),
    ),
    "what a pass that fails has accumulated": on(
        "(6, 3)",
        "x = x / 16; h = l1(x).tanh(); k = l2(h).tanh(); h.detach().mul_(2); penalty = l1.weight.norm()",
        "l3(k).square().sum().backward()",  # a tensor modified in place
        "show(); h = l1(x).tanh(); h.register_hook(fails); k = l2(h).tanh()",
        "(penalty + l3(k).square().sum() + l3.weight.norm()).backward()",
        "show(); h = l1(x).tanh(); h.square().sum().backward(); k = l2(h).tanh()",
        "l3(k).sum().backward()",  # a second time
        "show(); handle = l2.weight.register_hook(fails)",
        "(l3(l2(l1(x))).sum() + l2.bias.norm()).backward()",
        "show(); handle.remove()",
        header=(
            "torch.manual_seed(0); l1, l2, l3 = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)",
            "weights = [*l1.parameters(), *l2.parameters(), *l3.parameters()]",
            "def show(): print([weight.grad for weight in weights])",
            "def fails(gradient): raise ValueError",
        ),
    ),
    "hooks on a batch that is detached, and on the root of a pass": on(
        "(6, 3)",
        "h = net(x); h.register_hook(lambda g: print(g.tolist())); k = h * 3; h.detach_(); k.sum().backward()",
        "h = net(x); h.register_hook(lambda g: g * 2); print(torch.autograd.grad(h, net.weight, torch.ones_like(h)))",
        "z = x.clone().requires_grad_(); y = net(z); z.register_hook(lambda g: print(g, y.requires_grad) or g * 2)",
        "y.square().sum().backward(); print(z.grad, net.weight.grad)",
        header=("torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "gradients of batches with hooks and of what they were computed from": on(
        "(7, 2)",
        "x.requires_grad_(); x.register_hook(lambda g: g * 3); h = x * w; h.register_hook(lambda g: g * 10)",
        "h.register_hook(lambda g: g - g.mean(0)); h.retain_grad()",
        "k, l = (h * s).split(1, 1); k.register_hook(lambda g: g * 7); m = torch.autograd.graph.get_gradient_edge(w)",
        "loss = (k * l * v).sum() + (h * h).mean(0).sum()",
        "for of in ([h], [h, h], [h, v], [h, w], [w, h], [x, h], [h, m], [k], [k, l], [l, k, h], [k, s], [x, k, v]):",
        "    print(torch.autograd.grad(loss, of, retain_graph=True), h.grad)",
        "    print(*(g.tolist() for g in torch.autograd.grad(loss, of, create_graph=True)))",
        "loss.backward(inputs=[h, w]); print(h.grad, w.grad, k.grad, x.grad); w.grad = None",
        "h = x * w; h.register_hook(lambda g: g * 10); h.mul_(2); print(torch.autograd.grad(h.norm(), [h, w]))",
        header=(
            "w = torch.tensor([3., 1.], requires_grad=True)",
            "s, v = (torch.tensor(number, requires_grad=True) for number in (2., 5.))",
        ),
    ),
    "writes in place to batches that keep their gradients": on(
        "(7, 3)",
        "h = x * w; h.register_hook(lambda g: g * 2); h.retain_grad(); k = h.relu_(); k.pow(2).sum().backward()",
        "print(h.grad, w.grad); h = norm(x * w); h.retain_grad(); h.relu_(); h.pow(3).sum().backward()",
        "print(h.grad, norm.weight.grad); h = norm(x * w); h.softmax(0).norm().backward(inputs=[h]); print(h.grad)",
        header=("norm = nn.BatchNorm1d(3)", "w = torch.tensor([3., 1., 2.], requires_grad=True)"),
    ),
    "results of a reentrant checkpoint that are not used, and passes with inputs": on(
        "(6, 3)",
        "x.requires_grad_(); a, b = checkpoint(both, x, use_reentrant=True); a.sum().backward()",
        "print([weight.grad for weight in weights]); a, b = checkpoint(both, x, use_reentrant=True)",
        "print(torch.autograd.grad(a.sum(), x))",
        "a, b = checkpoint(both, x, use_reentrant=True); l2(b).sum().backward(inputs=[l1.weight, l2.weight])",
        "print([weight.grad for weight in weights]); net(x, True).sum().backward(); net(x, False).sum().backward()",
        "print([weight.grad for weight in weights], net.norm.running_mean)",
        header=(
            "from torch.utils.checkpoint import checkpoint; torch.manual_seed(0)",
            "l1, l2 = nn.Linear(3, 4), nn.Linear(4, 4)",
            "def both(z): h = l1(z); return h, l2(h)",
            """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
    def forward(self, x, reentrant):
        return checkpoint(lambda x: self.norm(l1(x)), x, use_reentrant=reentrant)""",
            "net = Net(); weights = [*l1.parameters(), *l2.parameters()]",
        ),
    ),
    "an error of a hook in a pass that begins at a batch": on(
        "(6, 3)",
        "h = net(x); h.register_hook(lambda gradient: 1 / 0)",
        "h.backward(torch.ones_like(h))",
        "print(torch.autograd.grad(net(x), net.weight, torch.ones(6, 5)))",
        "h = net(x); h.register_hook(lambda gradient: gradient.expand(9))",
        "torch.autograd.grad(h, net.weight, torch.ones_like(h))",
        header=("torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "writes of functions that raise": on(
        "(6, 3)",
        "h = x * 2",
        "torch._foreach_mul_([h, h[:, :2]], [x, x + 1])",
        "print(h.tolist()); z = x.clone().requires_grad_()",
        "Write.apply(z)",
        "print(z.tolist())",
        header=(
            """class Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.mark_dirty(z.mul_(2))
        return z
    @staticmethod
    def backward(ctx, gradient): return gradient""",
        ),
    ),
    "the order of hooks after accumulation": on(
        "(9, 4)",
        "h = net[2](net[0](net[1](x / 8)[:, :4])).sum() + net[1].weight.norm()",
        "h.backward()",
        "print(seen)",
        header=(
            "last = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))",
            "net, seen = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5), last]), []",
            "for i, p in enumerate(net.parameters()):\n"
            "    p.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(i))",
        ),
    ),
    "a gradient that a hook keeps": on(
        "(9, 3)",
        "(x @ w).sum().backward()",
        "print(w.grad, seen)",
        header=(
            "w, seen = nn.Parameter(torch.ones(3, 3)), []",
            "w.register_hook(lambda g: seen.append(g))",
        ),
    ),
    "gradients of other shapes": on(
        "(7, 3)",
        "try: x.grad = torch.ones(3, 3)\nexcept RuntimeError as error: print(error)",
        "try: x.grad = torch.ones(())\nexcept RuntimeError as error: print(error)",
        "h = x * w",
        "h.grad = F.linear(w, w).expand(7, 3)",
        "print(h.grad)",
        header=("w = nn.Parameter(torch.ones(1, 3))",),
    ),
    "gradients that torch checks": on(
        "(6, 4)",
        "y = torch.rand(6, 4).double().requires_grad_()",
        "print(gradcheck(net, x.double().requires_grad_()), gradgradcheck(net, y))",
        "print(gradcheck(lambda w: F.linear(x.double(), w), y.detach().requires_grad_()))",
        header=(
            "from torch.autograd import gradcheck, gradgradcheck",
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()",
        ),
    ),
    "a checkpoint in a model whose plain input is not split": on(
        "(6, 3)",
        "for _ in range(3):",
        "    net(torch.ones(4, 3) * (step + 1)).sum().backward(); print(net.inner[0].weight.grad.tolist())",
        header=(
            "torch.manual_seed(0)",
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.outer, self.inner = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Tanh())",
            "    def forward(self, x):",
            "        h = torch.utils.checkpoint.checkpoint(self.inner, self.outer(x), use_reentrant=False)",
            "        with torch.no_grad(): [row.sum().item() for row in h.unbind()]",
            "        return h",
            "net = Net()",
        ),
    ),
    "hooks on weights whose gradients are ready at the same time": on(
        "(4, 4)",
        "net(embedding(x.long() + 11))[0][:, -1].sum().backward(); print(sorted(norms)); norms.clear()",
        header=(
            "torch.manual_seed(0)",
            "embedding, net, norms = nn.Embedding(23, 3), nn.LSTM(3, 4, 2, batch_first=True, dropout=0.3), []",
            "for p in net.parameters(): p.register_hook(lambda grad: norms.append(grad.norm().item()))",
        ),
    ),
    "hooks after accumulation in a pass that fails": on(
        "(6, 3)",
        "try: net[2](Fails.apply(net[1](net[0](x)))).sum().backward()\n"
        "except ValueError as error: print([p.norm().item() for p in net.parameters()])",
        "net(x).sum().backward(); print([p.norm().item() for p in net.parameters()])",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))",
            "class Fails(torch.autograd.Function):",
            "    @staticmethod",
            "    def forward(ctx, x): return x * 1",
            "    @staticmethod",
            "    def backward(ctx, grad): raise ValueError",
            "def step(p):",
            "    with torch.no_grad(): p.sub_(0.01 * p.grad)",
            "    p.grad = None",
            "for p in net.parameters(): p.register_post_accumulate_grad_hook(step)",
        ),
    ),
    "garbage with weights that were thawed, on some ranks": on(
        "(6, 3)",
        "old = nn.Linear(3, 2).requires_grad_(False); old(x); old.requires_grad_(True)",
        "cycle = [old]; cycle.append(cycle); del cycle, old; lists = [[] for _ in range(1000)]",
        "net(x).sum().backward(); print(net.weight.grad.tolist())",
        header=("torch.manual_seed(0)", "net = nn.Linear(3, 2)"),
    ),
    "causal attention with another mask": on(
        "(6, 4, 4)",
        "for p in (0.0, 0.5):",
        "    try: print(F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).bool(), p, is_causal=True))",
        "    except RuntimeError as error: print(str(error)[-60:])",
    ),
    "a mean of integers": on(
        "(6, 3)",
        "for dtype in (None, torch.long):",
        "    try: print(x.long().mean(0, dtype=dtype), x.mean(dtype=dtype))",
        "    except RuntimeError as error: print(error)",
        "try: print(x.mean(dtype=torch.long))",
        "except RuntimeError as error: print(error)",
    ),
    "weights of positive targets, one for each": on(
        "(6, 3)",
        "for weights in (torch.arange(18.).view(6, 3), torch.arange(6.)[:, None]):",
        "    print(F.binary_cross_entropy_with_logits(x, (x > 0).float(), pos_weight=weights).item())",
    ),
    "losses with a reduction that torch refuses": on(
        "(6, 3)",
        "for loss in (F.mse_loss, F.cross_entropy):",
        "    try: print(loss(x, x, reduction='batchmean'))",
        "    except ValueError as error: print(error)",
    ),
    "running statistics of a batch": on(
        "(6, 6, 3)",
        "mean, var = x[:, 0, 0] * 0, x[:, 0, 0] * 0 + 1",
        "F.batch_norm(x, mean, var, training=True)",
        "torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)",
        "print(mean.tolist(), var.tolist())",
    ),
    "grid_sample of as many channels as samples": on(
        "(6, 6, 8)",
        "grid = torch.linspace(-1, 1, 6 * 1 * 4 * 5 * 3).view(6, 1, 4, 5, 3)",
        "print(F.grid_sample(x.view(6, 6, 2, 2, 2).transpose(0, 1), grid, align_corners=False).tolist())",
    ),
    "a weight of each sample, and norms of complex numbers": on(
        "(6, 4)",
        "print(F.multilabel_soft_margin_loss(x, x.sign(), torch.arange(6.).view(6, 1)))",
        "y = torch.complex(x, x)",
        "print(y.norm(2, 0, dtype=torch.complex128), torch.linalg.vector_norm(y, dtype=torch.complex64))",
    ),
    "kron into a batch": on(
        "(6, 2)",
        "out = torch.zeros(6, 4) + x[:, :1]; torch.kron(x, torch.ones(1, 2), out=out)",
        "print(out.tolist(), out._version)",
    ),
    "stacks into other tensors, and parts of uneven sizes": on(
        "(6, 4)",
        "wide, empty = torch.cat([x, x], 1) * 0, torch.empty(0)",
        "torch.hstack([x, x + 1], out=wide); torch.dstack([x, x + 1], out=empty)",
        "print(wide.tolist(), empty.tolist())",
        "try: print(x.hsplit(3))",
        "except RuntimeError as error: print('refused')",
    ),
}

SAVED = on(
    "(6, 3)",
    "net.last = net(x).detach(); torch.save([types.SimpleNamespace(net=net), step], path)",
    "print(torch.load(path, weights_only=False)[0].net.last)",
    "try: torch.save([x, net, lambda: 1], path)",
    "except Exception as error: print(type(error))",
    header=(
        "import tempfile, types",
        "path = tempfile.mkdtemp() + '/saved.pt'",
        "torch.manual_seed(0)",
        "net = nn.Linear(3, 2)",
    ),
)
OTHERS["a batch in an attribute of what is saved"] = SAVED

SHARDED = {
    "a write through the data of a view of a parameter": on(
        "(6, 4)",
        "opt.zero_grad(); net(x / 8).square().mean().backward(); opt.step()",
        "net.weight[0].data.zero_(); net.weight.t().data[1] += 1; print(net.weight)",
        "kept = kept if step else net.weight[1]; kept.data.mul_(2); print(net(x), kept)",
        header=(
            "torch.manual_seed(0); net = nn.Linear(4, 3); opt = torch.optim.SGD(net.parameters(), lr=0.1)",
            "kept = None",
        ),
    ),
    "steps of optimizers that torch computes parameter by parameter": on(
        "(6, 4)",
        "kept = [net.weight.detach()[1:], net.weight[0], net.bias.data.numpy()][:step]",
        "for opt in opts:",
        "    opt.zero_grad(step == 2); (net(x / 8) * scale).square().mean().backward()",
        "    net(x).sum(); opt.step(); print(net(x / 8))",
        "    print(type(opt).__name__, [(p, p._version) for p in params], kept)",
        "    for p in params: print([(key, value.dtype, value) for key, value in opt.state[p].items()])",
        "    print([v.stride() for p in params for v in opt.state[p].values() if v is not None])",
        header=(
            "torch.manual_seed(0); net = nn.Linear(4, 3); scale = nn.Parameter(torch.tensor(0.5)); o = torch.optim",
            "params = [*net.parameters(), scale]; some = dict(lr=0.01, weight_decay=0.1)",
            "opts = [o.Adam(params, amsgrad=True, **some), o.AdamW(params, maximize=True), o.NAdam(params, **some)]",
            "opts += [o.SGD(params, momentum=0.9, nesterov=True, **some), o.SGD(params, **some), o.Rprop(params)]",
            "opts += [o.RMSprop(params, centered=True, momentum=0.9, **some), o.Adagrad(params), o.ASGD(params)]",
        ),
    ),
    "packed sequences of one step on some rank, for a layer beside a list": on(
        "(4, 4, 6)",
        "opt.zero_grad(); loss = net(x / 8).data.square().mean(); loss.backward(); opt.step(); print(loss)",
        header=(
            "n = torch.tensor([1, 1, 3, 4])",
            "packed = lambda x: nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)",
            "forward = lambda net, x: net.layer(packed(net.first[0](x)))[0]",
            "torch.manual_seed(0); net = type('Net', (nn.Module,), {'forward': forward})()",
            "net.first = nn.ModuleList([nn.Linear(6, 6)]); net.layer = nn.LSTM(6, 6, batch_first=True)",
            "opt = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "packed sequences of one step each on a rank": on(
        "(6, 4, 3)",
        "n = torch.tensor([4, 3, 2, 1, 1, 1] if step % 2 else [1, 1, 1, 1, 1, 4])",
        "out, (h, c) = net(nn.utils.rnn.pack_padded_sequence(x / 8, n, batch_first=True, enforce_sorted=False))",
        "print(torch.autograd.grad(h.sum() + c.sum(), net.weight_ih_l0, retain_graph=True), repr(h)[-35:])",
        "net.zero_grad(); (out.data * 2).sum().backward(); print([p.grad for p in net.parameters()])",
        header=("torch.manual_seed(0); net = nn.LSTM(3, 5, num_layers=2, batch_first=True, bidirectional=True)",),
    ),
    "rows of a parameter that are written to without no_grad": on(
        "(6, 4)",
        "opt.zero_grad(); net(x / 8).square().mean().backward()",
        "try: w[0] += 1",
        "except RuntimeError: print(w)",
        "opt.step(); print(w, w.grad)",
        "with torch.no_grad(): w[0] += 1; t = w.t(); t.mul_(2); print(w)",
        "try: w[step] = 0",
        "except RuntimeError: print(w)",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))",
            "w, opt = net[0].weight, torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "views of parameters that are kept over steps, and written to": on(
        "(6, 4)",
        "if step == 1: t, row, flat = w.t(), w[1], [p.view(-1) for p in net.parameters()]",
        "if step == 2:\n"
        "    with torch.no_grad(): t.mul_(0.5); row.zero_(); print(w.unsqueeze(0), flat); w.data.add_(1)",
        "loss = net(x / 8).square().mean()",
        "if step: loss = loss + (t @ x.mT).mean() + row.square().sum() + sum(v.abs().mean() for v in flat)",
        "opt.zero_grad(); loss.backward(); opt.step(); print(loss, w.grad, w._version)",
        "if step: print(t, row, flat, t._version, t.data_ptr() == w.unsqueeze(0).data_ptr())",
        "if step == 3: loss = (t * t).sum(); opt.step(); loss.backward()",
        "if step == 1: net[2].weight.data = net[2].weight.data * 2; print(flat)",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))",
            "w, opt = net[0].weight, torch.optim.AdamW(net.parameters(), lr=0.1)",
        ),
    ),
    "a pass over a parameter before the call that shards it, and after": on(
        "(4, 5)",
        "(net[-1].weight.t().mm(net[-1].weight).pow(2).mean() * 0.01).backward()",
        "net(x / 11).sin().mean().backward()",
        "opt.step(); print(net[-1].weight.grad.tolist())",
        header=(
            "torch.manual_seed(1); torch.set_default_dtype(torch.float64); data = data.double()",
            "net = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.LayerNorm(4), nn.Linear(4, 3))",
            "opt = torch.optim.AdamW(net.parameters(), lr=0.01)",
        ),
    ),
    "the order of hooks on parameters of one block": on(
        "(6, 4)",
        "net(x / 8).square().sum().backward()",
        "if step % 2: (net(x / 8).sum() + net[0].weight.norm() + net[2].weight.norm()).backward()",
        "print(seen); seen.clear()",
        header=(
            "torch.manual_seed(0); net, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []",
            "for n, p in net.named_parameters(): p.register_hook(lambda g, n=n: print(n))",
            "for n, p in net.named_parameters():\n"
            "    p.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n))",
        ),
    ),
    "results of layers with channels last": on(
        "(6, 2, 3, 3)",
        "y = net(x); print(y.stride(), (net.weight * 2).stride(), net.weight.is_contiguous(), y)",
        "y.pow(2).sum().backward(); print(net.weight.grad, y.permute(0, 2, 3, 1).view(6, -1))",
        header=("torch.manual_seed(0); net = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)",),
    ),
    "layouts of weights, their gradients and copies": on(
        "(6, 2, 3, 3)",
        "(net(x / 8).square().sum() + weight.square().sum()).backward(); opt.step(); copied = copy.deepcopy(net)",
        "for p in (net.weight, weight, copied.weight):\n"
        "    print(p.stride(), p, p.clone().stride(), torch.zeros_like(p).stride())",
        "for p in (net.weight, weight): print(p.grad.stride(), p.grad, opt.state[p]['momentum_buffer'].stride())",
        header=(
            "torch.manual_seed(0); net = nn.Conv2d(2, 3, 2); import copy",
            "net.weight = nn.Parameter(net.weight.detach().contiguous(memory_format=torch.channels_last))",
            "weight = net.other = nn.Parameter(torch.randn(4, 2).t())",
            "opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)",
        ),
    ),
    "a learning rate and a mask that are learned beside parameters only": on(
        "(6, 3)",
        "grads = torch.autograd.grad(net(x).pow(2).mean(), [*net.parameters()], create_graph=True)",
        "fast = {n: p - rate * 2 * g for (n, p), g in zip(net.named_parameters(), grads)}",
        "rate.grad = mask.grad = None; (net.weight * mask).pow(2).sum().backward()",
        "torch.func.functional_call(net, fast, (x,)).pow(2).mean().backward(); print(rate.grad, mask.grad)",
        "print(torch.autograd.grad((net.weight.detach() * mask * rate).sum(), [mask, rate]))",
        header=(
            "torch.manual_seed(0); net = nn.Linear(3, 4)",
            "rate, mask = torch.tensor(0.01, requires_grad=True), torch.ones(4, 3, requires_grad=True)",
        ),
    ),
    "rows of a table that a lookup renormalises, beside a row": on(
        "(6, 3)",
        "table(x[:, :2].long() % 3 + step); table.weight.data[0].zero_(); print(table.weight)",
        header=(
            "torch.manual_seed(0); table = nn.Embedding(7, 4, max_norm=1.0)",
            "table.weight.data.mul_(3)",
        ),
    ),
    "a sharded model in an attribute of what is saved": SAVED,
    "tensors of weights written beside batches": on(
        "(6, 3)",
        "net(x); w = net.weight * 1.0; w.lerp_(x, 0.5); print(w.tolist())",
        "print(torch.autograd.grad(w.square().sum(), net.weight))",
        "v = net.weight.detach().clone(); v[x > 0] = 0; print(v.tolist())",
        "torch._foreach_add_([v], [x]); print(v.tolist())",
        "t = net.weight * 1.0; out = F.embedding(x.long().abs() % 6, t, max_norm=0.5)",
        "print(t.tolist(), torch.autograd.grad(out.sum(), t))",
        "with torch.inference_mode(): s = t * 1; s[x > 0] = 0; print(s.add_(x) is s, s.tolist())",
        header=("torch.manual_seed(0)", "net = nn.Linear(3, 6)"),
    ),
    "garbage that refers to a weight, on some ranks": on(
        "(6, 3)",
        "net(x).sum().backward(); print(net.weight.grad.tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 2)",
            "cycle = [net.weight.view(-1)]; cycle.append(cycle); del cycle",
            "lists = [[] for _ in range(1000)]",
        ),
    ),
    "a copy of a state with a batch": on(
        "(6, 3)",
        "net(x).sum().backward(); net[0].last = x * 2",
        "print([value.sum().item() for value in copy.deepcopy(net.state_dict()).values()])",
        header=(
            "import copy",
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.Identity(), nn.Linear(3, 2))",
            "net[0].register_buffer('last', torch.zeros(3))",
        ),
    ),
    "traced after a step": on(
        "(6, 3)",
        "net(x).sum().backward(); optimizer.step(); optimizer.zero_grad()",
        "print(torch.jit.trace(net, torch.ones(1, 3))(torch.ones(2, 3)).tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 2)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "jacobians after a step": on(
        "(6, 3)",
        "net(x).sum().backward(); optimizer.step(); optimizer.zero_grad()",
        "print(torch.vmap(torch.func.jacrev(net))(x).tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 2)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "LBFGS over one free parameter": on(
        "(6, 3)",
        "def closure():\n"
        "    optimizer.zero_grad(); loss = (net(x) / temperature - 1).square().mean(); loss.backward(); return loss",
        "optimizer.step(closure)",
        "print(temperature.item())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 2)",
            "temperature = nn.Parameter(torch.ones(1))",
            "optimizer = torch.optim.LBFGS([temperature], lr=0.1, max_iter=5)",
        ),
    ),
    "lists of leaves that require gradients": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()",
        "torch._foreach_lerp_(list(net.parameters()), list(net.parameters()), 0.5)",
        "torch._foreach_add_(list(net.parameters()), 1)",
        "with torch.no_grad(): torch._foreach_mul_(list(net.parameters()), 0.5)",
        "print(net.weight.tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 4)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "rows of a gradient written before a backward pass": on(
        "(6, 3)",
        "loss = net(x).square().mean()",
        "if step: net.weight.grad[0].zero_(); row = net.weight.grad[1]",
        "loss.backward()",
        "if step: print(row.tolist())",
        "print(net.weight.grad.tolist())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 6)",),
    ),
    "a row of a batch's gradient held over a backward pass": on(
        "(6, 3)",
        "x.requires_grad_(); (x @ w).square().sum().backward()",
        "row = x.grad[1]; (x @ w).sum().backward(); print(row.tolist(), x.grad.tolist())",
        header=("w = torch.arange(9.).view(3, 3)",),
    ),
    "a row held over a fused step": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step()",
        "row = net.weight.detach()[0]",
        "print(net.weight.tolist(), row.tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 6)",
            "optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)",
        ),
    ),
    "a row written after a fused step": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step()",
        "with torch.no_grad(): net.weight[0] = 0",
        "print(net.weight.tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 6)",
            "optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=True)",
        ),
    ),
    "addresses of tied parameters": on(  # as Hugging Face and safetensors compare them
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()",
        "state = net.state_dict(); start = state['0.weight'].data_ptr()",
        "print([weight.data_ptr() - start for weight in (state['1.weight'], state['0.weight'][1:])])",
        "print([state[name].view(-1)[-1].data_ptr() - start for name in ('0.weight', '1.weight')])",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)); net[1].weight = net[0].weight",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "parameters in a parameter's memory": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()",
        "tied = nn.Parameter(net.weight.detach()); tied.data.mul_(0.9); print(net.weight.tolist(), net(x).tolist())",
        "with torch.no_grad(): net.weight.add_(1)",
        "print(tied.tolist())",
        "other = nn.Linear(3, 4); other.weight = nn.Parameter(net.weight)",
        "other(x).sum().backward()",
        "with torch.no_grad(): other.weight -= other.weight.grad",
        "print(net.weight.tolist(), other(x).tolist())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Linear(3, 4)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a parameter's memory written between forward and backward": on(
        "(6, 3)",
        "loss = net(x).square().mean()",
        "tied = nn.Parameter(net[2].weight.detach()); tied.data.mul_(0.9)",
        "loss.backward(); optimizer.step(); optimizer.zero_grad()",
        "print(loss.item(), net.state_dict())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a copy of a model while the script holds a row of it": on(
        "(6, 3)",
        "net(x).square().mean().backward()",
        "row = net.weight.data[0]; row.mul_(0.5)",
        "net = copy.deepcopy(net); print(net.weight.tolist())",
        header=("import copy; torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "a shallow copy of a parameter": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()",
        "weight = copy.copy(net.weight); print(type(weight), weight.requires_grad)",
        "with torch.no_grad(): weight.mul_(0.5)",
        "print(net.weight.tolist())",
        header=(
            "import copy; torch.manual_seed(0)",
            "net = nn.Linear(3, 4)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "gradients zeroed after a backward pass that failed": on(
        "(6, 3)",
        "h = net[1](net[0](x)); out = net[2](h).square().mean(); h.mul_(2); out.backward()",
        "optimizer.zero_grad(set_to_none=step % 2 == 0)",
        "net(x).square().mean().backward(); optimizer.step()",
        "x.sum().backward()",
        "optimizer.step(); print(net.state_dict())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a norm's weight written through data before the backward pass": on(
        "(6, 3)",
        "net.zero_grad(); loss = net(x).square().mean(); net[1].weight.data.add_(0.5); loss.backward()",
        "print(net[0].weight.grad.tolist())",
        header=("torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))",),
    ),
    "a weight with a hook that is replaced after a step": on(
        "(6, 3)",
        "handle = net.weight.register_hook(lambda gradient: gradient * 0.5)",
        "net(x).square().mean().backward(); optimizer.step()",
        "print(net.weight.grad.tolist())",
        "net.weight = nn.Parameter(net.weight.detach().clone() * 0.9)",
        header=(
            "torch.manual_seed(0); net = nn.Linear(3, 4)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "parametrizations that are removed after a step": on(
        "(6, 3)",
        "net(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()",
        "if step == 1: nn.utils.parametrize.remove_parametrizations(net, 'weight')",
        "if step == 1: optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        "print(net.state_dict())",
        header=(
            "torch.manual_seed(0)",
            "net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a hook on a weight that is frozen when the model is sharded": on(
        "(6, 3)",
        "net.requires_grad_(step > 0); net.zero_grad()",
        "net(x).square().mean().backward() if step else net(x)",
        "print(norms, net.weight.grad)",
        header=(
            "torch.manual_seed(0); net = nn.Linear(3, 4); norms = []",
            "net.weight.register_hook(lambda gradient: norms.append(gradient.norm().item()))",
        ),
    ),
    "weights that a step changes before a second backward pass": on(
        "(6, 3)",
        "optimizer.zero_grad(); loss = net(x).square().mean(); loss.backward(retain_graph=True)",
        "optimizer.step(); loss.backward()",
        "print(loss.item())",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a weight of another layout that is initialised again": on(
        "(6, 8)",
        "net(x).sum().backward(); net.weight.data = net.weight.data.t().contiguous().t()",
        "nn.init.normal_(net.weight); print(net.weight, torch.rand(1))",
        header=("torch.manual_seed(0); net = nn.Linear(8, 3)",),
    ),
    "hooks after accumulation in a pass from a batch to some weights": on(
        "(6, 3)",
        "net(x).backward(torch.ones(6, 4), inputs=[net.weight]); print(seen, net.weight.grad)",
        "net(x).sum().backward(inputs=[net.bias]); print(seen, net.bias.grad)",
        header=(
            "torch.manual_seed(0); net, seen = nn.Linear(3, 4), []",
            "for p in net.parameters(): p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))",
        ),
    ),
    "gradients of a batch by weights": on(
        "(6, 3)",
        "out = net(x)",
        "print(torch.autograd.grad(out, net.parameters(), torch.ones_like(out), True, allow_unused=True))",
        "net.zero_grad(); out.backward(torch.ones(6, 4), inputs=[net.weight])",
        "print([weight.grad for weight in net.parameters()])",
        "net.weight.grad = None",
        header=("torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "a gradient of another layout than its weight's, set to zero": on(
        "(6, 6)",
        "optimizer.zero_grad(set_to_none=False); net(x).square().sum().backward(); optimizer.step()",
        "net.weight.data = net.weight.data.t().contiguous().t(); print(net.weight.grad, net.weight.stride())",
        header=(
            "torch.manual_seed(0); net = nn.Linear(6, 3)",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.01)",
        ),
    ),
    "gradients that are parts of one buffer": on(
        "(6, 3)",
        "flat.zero_(); net(x / 9).square().mean().backward(); print(flat.norm(), net[0].weight.grad)",
        "flat *= min(1, 0.1 / flat.norm().item()); optimizer.step(); print(flat, net[2].weight)",
        "for p, part in zip(net.parameters(), parts): p.grad = part",
        "optimizer.zero_grad(set_to_none=False); grad = net[2].weight.grad; net(x / 9).sum().backward()",
        "print(flat, grad is net[2].weight.grad)",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
            "sizes = [p.numel() for p in net.parameters()]; flat = torch.zeros(sum(sizes))",
            "parts = [part.view_as(p) for p, part in zip(net.parameters(), flat.split(sizes))]",
            "for p, part in zip(net.parameters(), parts): p.grad = part",
        ),
    ),
    "a state dict of an optimizer that is loaded several times": on(
        "(6, 3)",
        "net(x / 9).sin().sum().backward()",
        "if step == 0: state = copy.deepcopy(optimizer.state_dict())",
        "for _ in range(3): optimizer.load_state_dict(state); optimizer.step(); print(net.weight)",
        "if step == 2: state['state'][0]['sum'].zero_()",
        header=(
            "import copy; torch.manual_seed(0); net = nn.Linear(3, 4)",
            "optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)",
        ),
    ),
    "parameters that become parts of one vector": on(
        "(6, 3)",
        "net(x / 9); flat = nn.utils.parameters_to_vector(net.parameters()).detach() * 0.9",
        "nn.utils.vector_to_parameters(flat, net.parameters()); flat += 0.01; print(net[0].weight, net(x / 9))",
        "net.zero_grad(); net(x / 9).square().mean().backward(); optimizer.step(); print(flat, net[2].bias)",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))",
            "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
        ),
    ),
    "a write to the data of a weight, before the pass through a pass": on(
        "(4, 3)",
        "x.requires_grad_(); g, = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)",
        "net.weight.data[0, 0] = step + 2; net.zero_grad(); g.square().mean().backward(); print(net.weight.grad)",
        header=(
            "torch.set_default_dtype(torch.float64); data = data.to(torch.float64)",
            "torch.manual_seed(0); net = nn.Linear(3, 4)",
        ),
    ),
    "a weight that is frozen between the passes, while another has a hook": on(
        "(4, 3)",
        "loss = net(x).square().mean(); net[1].weight.requires_grad_(step == 2); loss.backward()",
        "print([p.grad for p in net.parameters()])",
        header=(
            "torch.manual_seed(0); net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))",
            "hook = net[0].weight.register_hook(lambda g: print(g))",
        ),
    ),
    "a sparse gradient that autograd.grad returns": on(
        "(6, 3)",
        "tokens = x.long().abs() % 5; loss = net(embed(tokens).tanh()).square().mean()",
        "grads = torch.autograd.grad(loss, [embed.weight, net.weight], create_graph=True)",
        "print([(grad.is_sparse, grad.to_dense()) for grad in grads])",
        "(loss + sum(grad.square().sum() for grad in grads)).backward(); print(embed.weight.grad.to_dense())",
        header=("torch.manual_seed(0); embed, net = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 4)",),
    ),
}

HELD_ROWS = {
    "rows held while their batch is multiplied by a weight": on(
        "(6, 2, 4)",
        "p = x.clone(); y = x * w; rows = [y[0], y[:, 1][2], y.detach()[1], p[1], y[2:5], y]",
        "y.mul_(u); p.mul_(u); y[:, 1:].add_(u[1:2])",
        "for row in rows: print(row.tolist(), row.requires_grad, row.requires_grad and grads(row))",
        "y[4] *= u; y[1:3] += u; z = rows[0] + y[1]; y.sub_(z)",
        "for row in [*rows, z]: print(row.tolist(), row.requires_grad, row.requires_grad and grads(row))",
        header=(
            "w, u = (torch.arange(1., 5.) * number / 3 for number in (1, 2)); w.requires_grad_(); u.requires_grad_()",
            "def grads(row): return torch.autograd.grad(row.sum(), [w, u], allow_unused=True, retain_graph=True)",
        ),
    ),
    "a row multiplied by a weight in place": on(
        "(6, 4)",
        "x[-1] *= u[1]; x[0] = x[0] * u[2]; v = x.detach(); v[-1] *= u[0]; v[1:] += u[1]",
        "print([torch.autograd.grad(of.sum(), u, retain_graph=True) for of in (x, v)])",
        header=("u = torch.arange(2., 5.).requires_grad_()",),
    ),
    "a row written with and without a gradient": on(
        "(6, 4)",
        "with torch.no_grad(): x[-1] *= u[1]",
        "x[-1] *= u[1]; print(torch.autograd.grad(x.sum(), u))",
        header=("u = torch.arange(2., 5.).requires_grad_()",),
    ),
    "a write to a leaf beside a row": on(
        "(6, 4)",
        "y = x.clone().requires_grad_(); row = y[1:2]",
        "y[0] = 5",
        "y.view_as(y).copy_(y[:2, 0])",
        "y[-1] -= 4",
        "print(y)",
    ),
    "a step of a chunk after a write": on(
        "(6, 4)",
        "y = x.clone().requires_grad_() * 2; v = y.chunk(2, 1)[0]",
        "with torch.no_grad(): y += 1",
        "print(v)",
    ),
    "numbers of writes": on(
        "(6, 4)",
        "x[0] = 1.0; x[0] += 1; print(x._version)",
        "for row in x: row.add_(1); print(x._version, row._version)",
        "x[-1] = x[0]; print(x._version); torch.sum(x[None], 0, out=x); print(x._version)",
        "x.mul_(2); v = x[:, 1:]; a, b = v[0], x[0]; v.add_(1); print(a._version, b._version, x._version)",
        "a.zero_(); b += 1; print(x._version, v._version, a._version)",
    ),
    "conjugates and parts of complex single rows": on(
        "(2, 3, 4)",
        "c = torch.complex(p := x.permute(1, 2, 0), p + 1); print(c.conj().resolve_conj(), c.real.stride(), c.imag)",
        "f = torch.fft.fft(p, dim=1); print(f.conj() * c, f.mH.shape, f.real.stride(), f.conj().imag)",
        "c.imag.add_(1); c.conj().real.mul_(2); print(c)",
    ),
    "layout of draws of single rows": on(
        "(2, 4, 5)",
        "torch.manual_seed(0); p = x.abs().transpose(1, 2)",
        "for y in (torch.poisson(p), torch.normal(0.0, p), torch.normal(p, p), F.rrelu(p, training=True)):\n"
        "    print(y.stride(), y.is_contiguous(), y)",
        "y = F.scaled_dot_product_attention(p, p, p, dropout_p=0.5); print(y.stride(), y, torch.rand(()))",
    ),
    "statistics of BatchNorm that are written before the backward pass": on(
        "(6, 4)",
        "losses = [(net((x + w)[::k]) ** 3).sum() for k in (1, 2)]",
        "losses[0].backward(); print(w.grad, net.running_mean)",
        "with torch.no_grad(): net.running_mean.mul_(0.5)",
        "losses[1].backward()",
        header=("net, w = nn.BatchNorm1d(4), torch.ones(4, requires_grad=True)",),
    ),
    "draws into a view with gaps, of single rows": on(
        "(2, 4, 5)",
        "torch.manual_seed(0); b = x[:, :3]; b.view_as(b).normal_(); print(x)",
        "b.view(b.shape).uniform_(); b.reshape_as(b).bernoulli_(0.5); print(x)",
        "t = x.transpose(1, 2); t.view_as(t).exponential_(); t.reshape_as(t).mul_(t); print(x)",
        "print(F.dropout(x[:, :3]), torch.rand_like(t), F.dropout(t), torch.bernoulli(b.abs().clamp(max=1)))",
        "print(F.gumbel_softmax(t), F.gumbel_softmax(x.permute(2, 0, 1), hard=True, dim=2))",
    ),
    "rows written with a gradient": on(
        "(6, 4)",
        "losses = F.cross_entropy(x * w, torch.arange(6) % 4, reduction='none'); total = losses[0]",
        "for i in range(1, len(losses)): total += losses[i]",
        "print(total, grads(total), losses, grads(losses))",
        "y = x.clone(); y[0].mul_(w); y[-1].add_(w[0]); print(y, grads(y), y._version)",
        "z = x * w; a, b = z[0], z[-1]; a.mul_(w); b.sub_(a); print(a, b, grads(a), grads(b), grads(z))",
        "a.mul_(2); z.mul_(w); print(grads(a), grads(b), grads(z)); c = z[0]; a.sub_(w); print(grads(c), c)",
        "h = (x * w)[0]; h += w; print(h, grads(h), (x * 2)[0])",
        "v = (x * w)[:, 1:]; v[0].mul_(w[1:]); print(v, grads(v))",
        "z = x * w; z[1][..., 0] = 0.5",
        "with torch.no_grad(): z.add_(z.detach().sin())",
        "print(z, grads(z))",
        header=(
            "w = torch.arange(1., 5.).requires_grad_()",
            "def grads(t): return torch.autograd.grad((t * t.detach().cos()).sum(), w, retain_graph=True)[0]",
        ),
    ),
    "an index out of range of one rank, in a tensor that all have": on(
        "(6, 4)",
        "i, labels = torch.arange(6), torch.tensor([0, 1, 2, 3, 0, 9])",
        "for fails in (\n"
        "    lambda: x[i, i], lambda: x.gather(1, labels[:, None]), lambda: x[i, labels],\n"
        "    lambda: F.cross_entropy(x, labels), lambda: F.nll_loss(x, target=labels, reduction='none'),\n"
        "    lambda: torch.gather(input=x, dim=1, index=labels[:, None]), lambda: x.scatter(1, labels[:, None], 5),\n"
        "):\n"
        "    try:\n"
        "        fails()\n"
        "    except (IndexError, RuntimeError) as error:\n"
        "        print(error, x.sum())",
        "print(x[i, i % 4], x.gather(1, (labels % 4)[:, None]), F.cross_entropy(x, labels % 4))",
    ),
    "a batch as the weight of a layer": on(
        "(4, 4, 4)",
        "z = torch.linspace(-1, 2, 16).view(4, 4)",
        "print(F.bilinear(x[0], z, x), F.bilinear(x[:, 0], z, x))",
    ),
    "gumbel_softmax over the samples": on("(6, 4)", "print(F.gumbel_softmax(x.t(), hard=True).sum(1))"),
    "writes beside rows that torch does not count": on(
        "(6, 4)",
        "v, r = x[:, 1:], x[0]; x.apply_(lambda a: a + 1); x.map_(x.clone(), lambda a, b: a * b)",
        "v.apply_(lambda a: a - 3); print(x._version, v._version, r._version, r, x[0], x[1])",
    ),
    "views of pieces, each of which begins elsewhere in memory": on(
        "(3, 4, 2)",
        "for i in range(3): print([y.view(3, 2) for y in x.split(1, 1)], [y.flatten(1) for y in x.split(1, 1)])",
        "for y in (x * w).split(1, 1): z = y.view(3, 2); loss = loss + (z * z.cos()).sum()",
        "print(torch.autograd.grad(loss, w))",
        header=("w, loss = torch.arange(8.0).view(4, 2).requires_grad_(), 0",),
    ),
    "strides of rows of a dimension of size 1": on(
        "(6, 4)",
        "v = x.view(6, 2, 2).transpose(1, 2).unsqueeze(1); print(v[0].stride(), v[1:3].stride())",
        "y = x.requires_grad_() * 2; v = y[None].movedim(0, -1); print(v[0].stride(), v[1:3].stride())",
    ),
    "a row after a write that fails": on(
        "(6, 4)", "x[0] = 1.0", "x.index_fill_(1, torch.tensor([0, 1, 9]), 2)", "print(x[1], x[0])"
    ),
    "bases and versions of views and copies": on(
        "(7, 4)",
        "print([y._base is None for y in (x, x[None], x.t(), x.clone(), torch.unbind(x[None])[0])])",
        "y = x.transpose(0, 1); v = y.contiguous(); print(v._version, x.T.ravel()._version, x.flip(0)._version)",
        "v.add_(1); print(v._version, v[0]._version, y.transpose(0, 1).contiguous() is x)",
    ),
    "a view written after a row of another": on(
        "(2, 3, 3)",
        "y = x * w; v = y[:, :1]; u = v.flatten(1); row = v[0, 0]; v[0] += row.sum(); u.clamp_(max=3)",
        "print(torch.autograd.grad((v * v.detach().cos()).sum(), w))",
        header=("w = torch.arange(1., 4.).requires_grad_()",),
    ),
    "numbers of writes to copies of the same memory": on(
        "(6, 3)",
        "y = copy.copy(x); y.add_(1); x.mul_(2); print(x._version, y._version, y)",
        "rows = x[2:4]; x.data.masked_scatter_(x == 4, x.flip(0)); print(x._version, rows)",
        header=("import copy",),
    ),
    "one tensor as the index of two dimensions": on(
        "(4, 4)",
        "i = torch.arange(4); x[i, i] += 1; print(x[i, i].tolist(), x[i, 1:][:, [0]].tolist())",
        "x.index_put_((i, i), torch.arange(4.)); x[i, i, None] *= 2; print(x.index_put((i, i), x[0]).tolist())",
    ),
    "layout after a list behind a new dimension": on(
        "(4, 3, 4)",
        "y = x.movedim(0, -1)[None, 1, [2, 0]]; print(y.stride()[1:], y.is_contiguous(), y.flatten()._base is None)",
    ),
    "number of writes to a tensor that becomes rows": on(
        "(4, 3)", "p = torch.zeros(4, 3); p.add_(2); p[:, :2] = x[:, 1:]; p[1:, 0] = 8; print(p._version, p)"
    ),
    "numbers of recorded writes beside a row": on(
        "(7, 3)",
        "x = x * w; row = x[5]; x[x > 3] = 2; print(x._version, row._version)",
        "x.add_(1); x[:, 0] *= 2; print(x._version, row._version)",
        "x.movedim(0, -1)[..., :2] += 5; print(x._version); x[1:3] *= w; print(x._version, row)",
        "print(torch.autograd.grad(x.sum() + (row * 2).sum(), w))",
        header=("w = torch.tensor(1.5, requires_grad=True)",),
    ),
    "a write to a piece of all rows, with a gradient": on(
        "(6, 3)",
        "y = x * w; v = y.vsplit(1)[0]; v.mul_(v); u = torch.cat([y, y]).tensor_split(2)[1]; u += 1; print(u, v)",
        "print(torch.autograd.grad(u.sum() + v.sum(), w)); z = (x * w).split(6)[0]",
        "z.add_(1)",
        header=("w = torch.tensor(2.0, requires_grad=True)",),
    ),
    "rows of a batch, of a model and of gradients that are garbage": on(
        "(6, 3)",
        "batch, i = [x + 1], x.long() % 3; batch.append(batch); row = batch[0][0]",
        "other = made(); other(x).sum().backward(); rows = other[0].weight.detach()[0], other[2].weight.grad[0]",
        "print(row, rows); del batch, row, rows; other = None",
        "[[] for _ in range(5000)]  # some ranks collect garbage, others do not",
        "for _ in range(2): net(F.embedding(i, w)).sum().backward(); print(net[0].weight.detach().sum())",
        "print(nn.utils.clip_grad_norm_(net.parameters(), 1.0), [p.grad.norm() for p in net.parameters()])",
        header=(
            "def made():",
            "    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)); net.itself = [net]; return net",
            "torch.manual_seed(0); net, w = made(), torch.arange(12.).view(4, 3)",
        ),
    ),
    "rows of the former data of a parameter that are garbage": on(
        "(6, 3)",
        "former = [net.weight.detach()]; former += [former, former[0][0]]; net.weight.data = net.weight.data.flip(0)",
        "former = None; [[] for _ in range(5000)]  # some ranks collect garbage, others do not",
        "net(x).sum().backward(); optimizer.step(); print(net.weight.sum())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 3)", "optimizer = torch.optim.SGD(net.parameters(), 0.1)"),
    ),
    "a shape changed in place beside an array and a weak reference": on(
        "(6, 4)",
        "a, known = x.numpy(), weakref.ref(x); x.unsqueeze_(1); a += 1; print(x.tolist(), known() is x, {x: 1}[x])",
        "x.swapaxes_(0, -1); a[0] = 7; print(x)",
        header=("import weakref",),
    ),
    "writes to a chunk that torch does not count": on(
        "(6, 4)",
        "print(x[0]); x.unsafe_chunk(2, 1)[0].add_(1); print(x[0]); x.unsafe_split(3, 1)[1].zero_(); print(x)",
    ),
    "a hook on a tensor that all ranks hold returns a batch": on(
        "(7, 4)",
        "f = (x * w)[torch.arange(7).flip(0)]; f.register_hook(lambda g: torch.where(x > 1, g, 0 * x) * 2)",
        "g, = torch.autograd.grad((f * f).sum(), w, create_graph=True); print(g, torch.autograd.grad(g.sum(), w))",
        "p = nn.Parameter(x * 2); p.register_hook(lambda g: g * x); (p * w).sum().backward(); print(p.grad)",
        header=("data = data.double()", "w = torch.arange(1., 5.).double().requires_grad_()"),
    ),
    "second gradients of a norm of order 3 of which a rank's rows are zeros": on(
        "(6, 4)",
        "x[:3, 0] = 0; h = (x * w).tanh(); loss = torch.linalg.vector_norm(h, 3, 0).prod() + h.norm(1)",
        "g, = torch.autograd.grad(loss, h, create_graph=True); print(g, torch.autograd.grad(g.pow(2).sum(), w))",
        header=("data = data.double() / 9", "w = torch.arange(1., 5.).double().requires_grad_()"),
    ),
    "gradients of norms of zeros in recorded calls": on(
        "(6, 4)",
        "h = x * 0 * w; print(torch.autograd.grad((h.norm() - 1).pow(2) + (h.norm(dim=0) - 1).sum(), w))",
        "print(torch.autograd.grad((h.std() - 1).pow(2) + (h.std(0) - 1).sum(), w))",
        header=("w = torch.arange(1., 5.).requires_grad_()",),
    ),
    "the gradient of a batch whose rows were written into": on(
        "(6, 4)",
        "h = x * w; r = h[0]; r.mul_(2); del r; h.retain_grad(); print(torch.autograd.grad(h.pow(2).sum(), [h, w]))",
        "h = x * w; r = h[0]; r.mul_(2); h.mul_(3); print(torch.autograd.grad(h.sum() + (r * r).sum(), [h, w]))",
        header=("w = torch.arange(1., 5.).requires_grad_()",),
    ),
    "memory without elements": on(
        "(6, 4, 0)", "x.data = x.flip(0); v = x.mT; v.data = v.roll(1, 2); a = x.numpy(); x[0] = a[1] = 3; v.add_(1)"
    ),
    "a view of no elements before the batch": on(
        "(6, 3)",
        "v = x[None].expand(2, 6, 3)[2:]; u = v.unbind(1)[3]; print(u.shape); u.zero_(); print(x[0], x.tolist())",
        "x += 1; x[1] = 5; print(u, v.tolist(), x[2])",
    ),
    "data that are another batch's": on(
        "(6, 2)",
        "y = x.clone(); print(x[0]); y.data = x; y += 1; print(x[0], x.tolist())",
        "y = x.clone(); z = torch.from_numpy(x.numpy()); print(x[1]); y.data = z; y += 1; print(x[1], x.tolist())",
        "del z; h = (x * w).logcumsumexp(0).exp(); y.data = h.data; y += 1; h = (x * w).exp()[:, :1]; print(h[0])",
        "y.data[:, :1] = h; v = x[:, :1] + 1; v.data = h; v += 1; h.sum().backward(); print(w.grad, h[0])",
        header=("w = torch.full((2,), 0.1, requires_grad=True)",),
    ),
    "copies of a batch and of its rows": on(
        "(6, 2)",
        "y, row = copy.deepcopy((x, x[0])); y += 1; print(row); row += 5; print(y.tolist())",
        "r, v = x[:, 1:][2], x[:, 1]; a, b, c, d = copy.deepcopy([r, v, x, x[5]])",
        "a += 1; c *= 2; b -= 1; d += 20; print(a, b.tolist(), c.tolist(), d)",
        "del r, v, row; a = copy.deepcopy(x); a[0] = 50; b = copy.deepcopy(a); print(b[0], a[0] is b[0])",
        header=("import copy",),
    ),
    "gradients beside a row that is written with a gradient": on(
        "(6, 3)",
        "x.requires_grad_(); y = x.clone(); row = y[0]; y.mul_(2); row.add_(1); print(x.grad)",
        "row.mul_(3); x.grad = torch.ones(6, 3); row.add_(1); y.sum().backward(); print(x.grad, y)",
    ),
    "what a recurrent layer read is written before the backward pass": on(
        "(3, 2, 4)",
        "h = (x + 0 * step) * 0.1; out = layer(h)[0]",
        "h.mul_(2); print(torch.autograd.grad(out.sum(), layer.weight_ih_l0))",
        "out = layer(h[:, :1])[0]; print(out)",
        "h.mul_(2); print(torch.autograd.grad(out.sum(), layer.weight_ih_l0))",
        "h = x.transpose(0, 2).contiguous().transpose(0, 2); out = layer(h)[0]",
        "h.mul_(2); print(torch.autograd.grad(out.sum(), layer.weight_ih_l0))",
        "h = x.transpose(0, 1) * 1; out = cells(h)[0]",
        "h.mul_(2); print(torch.autograd.grad(out.sum(), cells.weight_ih_l0))",
        header=(
            "torch.manual_seed(0); torch.set_default_dtype(torch.float64); data = data.double()",
            "cells = nn.RNN(4, 4)",
            "layer = nn.GRU(4, 4, batch_first=True)",
        ),
    ),
    "a write to the result of a layer, of which some rank has a single row": on(
        "(7, 3, 4)",
        "with torch.no_grad(): h = lstm(x)[0]",
        "h[:, 1] += 1; v = h[:, :2]; v[:, 1] *= 2; print(h.stride(), h)",
        "h = lstm(x)[0]; h[:, 1] += w; print(h, torch.autograd.grad(lstm(x)[0].pow(2).sum(), lstm.weight_ih_l0))",
        header=("torch.manual_seed(0); lstm = nn.LSTM(4, 4, batch_first=True)", "w = torch.ones(4).requires_grad_()"),
    ),
    "dropout between layers for packed sequences, of which some rank has only equally long": on(
        "(4, 4, 4)",
        "lengths = torch.tensor([[2, 2, 2, 2], [1, 1, 4, 4], [4, 1, 1, 1], [3, 3, 3, 2]][step])",
        "out, h = layer(nn.utils.rnn.pack_padded_sequence(x, lengths, True, False))",
        "print(nn.utils.rnn.pad_packed_sequence(out)[0], h, torch.rand(1))",
        header=("torch.manual_seed(0); layer = nn.GRU(4, 4, 2, batch_first=True, dropout=0.5)",),
    ),
    "strides of padded sequences, of which some rank has one": on(
        "(5, 3, 4)",
        "p = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 3, 2, 2, 1]), True)",
        "for first in (True, False):",
        "    y = nn.utils.rnn.pad_packed_sequence(p, first)[0]; print(y.stride(), y[:, :2].stride(), y.flatten(1))",
    ),
    "a second gradient of zeros, which have no memory": on(
        "(6, 4)",
        "w.grad = None; loss = (x * w).sum() + w.abs().sum(); g, = torch.autograd.grad(loss, w, create_graph=True)",
        "g.pow(2).sum().backward(); print(g, w.grad)",
        header=("w = nn.Parameter(torch.arange(1., 5.))", "optimizer = torch.optim.SGD([w], 0.1)"),
    ),
    "strides of dimensions of size 1 in products and DLPack": on(
        "(8, 2, 1, 3)",
        "for y in (torch.inner(x, x), torch.inner(x, x[0]), torch.tensordot(x, x, ([2, 3], [2, 3]))):",
        "    print(y.stride(), y.sum(-1))",
        "print(torch.from_dlpack(x.T).stride(), torch.tensordot(x, torch.ones(2, 1, 3, 5), 3).stride())",
    ),
    "a norm or deviation over the batch: written before the backward pass, or with a hook": on(
        "(7, 3)",
        "y = x * w; z = y + step",
        "for f in (z.std, z.norm, lambda *dim: torch.std_mean(z, *dim)[0]):",
        "    for s in (f(), f(0)):",
        "        with torch.no_grad(): s.mul_(2)",
        "        try: print(torch.autograd.grad(s.sum(), w))",
        "        except RuntimeError as error: print(str(error)[:60])",
        "    w.grad, s = None, f(0); s.register_hook(lambda g: g * 3 + 1)",
        "    g, = torch.autograd.grad(s.pow(2).sum(), w, create_graph=True); g.pow(2).sum().backward()",
        "    print(g, w.grad)",
        header=("data = data.double()", "w = torch.arange(1., 4.).double().requires_grad_()"),
    ),
    "a transform reads a batch of which a row was written": on(
        "(6, 4)",
        "h = x * 2; row = h[1]; row.add_(step)",
        "print(grad(lambda p: (h.detach() * p).sum())(torch.tensor(2.)), vmap(lambda a: a * 2)(h))",
        "h[0] += 1; print(vmap(grad(lambda a: (a.detach() * a).sum()))(h), row)",
        "x.requires_grad_(); h = x * 2; row = h[1]; row.add_(1); print(vmap(lambda a: a * 2)(h))",
        header=("from torch.func import grad, vmap",),
    ),
    "an array is written, then a view that has got other memory": on(
        "(5, 4, 4)",
        "v = x.mT; v.data = v + 1; a = x.numpy(); x[0] = 3; a[1] = 3; v.add_(1); print(x, v, a)",
        "y = x.clone(); u = y.view(-1); u.data = u * 2; b = y.numpy(); b[2] = 5; u.sub_(1); print(y, u, b)",
    ),
    "writes to a leaf, which torch refuses before it draws or writes": on(
        "(7, 4)",
        "a = x[x > 0]; b = x.double(); p = x.sigmoid(); x.requires_grad_()",
        "for write in (x.normal_, x.uniform_, x.exponential_, lambda: x.bernoulli_(p),",
        "    lambda: torch.add(x, 1, out=x), lambda: torch._foreach_add_([a, b, x], 1),",
        "    lambda: torch._foreach_mul_([b, x], 2)):",
        "    try: write()",
        "    except RuntimeError as error: print(str(error)[:40], torch.rand(1), a, b)",
        header=("torch.manual_seed(0)",),
    ),
    "a pass of a transform after the script has written to what a module was given": on(
        "(7, 3)",
        "h = data[step * 6 : step * 6 + 6]; out = net(h); print(h, out)",
        "h = x * 2; row = h[1]; row.add_(step)",
        "h[0] += 1; print(vmap(grad(lambda a: (a.detach() * a).sum()))(h), row)",
        header=(
            "data = data[:24]; from torch.func import grad, vmap",
            *REVERSING,
        ),
    ),
    "a module that raises an error after it has written to a plain input": on(
        "(6, 4)",
        "try: net(data[step * 6 : step * 6 + 6])",
        "except RuntimeError as error: print(type(error))",
        "print(data)",
        header=("net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))",),
    ),
    "a batch that a function saved is written, and no longer named": on(
        "(5, 3)",
        "h = x.requires_grad_() * 2; y = h.cumprod(0) @ w; h.mul_(step); h = None",
        "try: print(torch.autograd.grad(y.sum(), x))",
        "except RuntimeError as error: print(str(error)[:60])",
        "y = (x * 2).cumprod(0) @ w; h = x.detach() * 2; h.mul_(2); h = None; print(torch.autograd.grad(y.sum(), x))",
        header=("w = torch.arange(1., 7.).view(3, 2).requires_grad_()",),
    ),
    "a function of the script that raises after it has written": on(
        "(5, 3)",
        "h = (x * w).tanh(); y = x.cumsum(0) * w",
        "try: Writing.apply(x)",
        "except ValueError: print(x, x._version)",
        "for loss in (h, y):",
        "    try: print(torch.autograd.grad(loss.sum(), w))",
        "    except RuntimeError as error: print(str(error)[:60])",
        header=(
            WRITING,
            "w = torch.arange(1., 4.).requires_grad_()",
        ),
    ),
    "lengths of a packed sequence that are longer than it": on(
        "(5, 2, 4)",
        "for lengths in ([3, 3, 2, 2, 1], [2, 2, 1, 1, 1]):",
        "    try: print(nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), True).data)",
        "    except RuntimeError as error: print(str(error)[:20])",
    ),
    "a hook on a leaf that the script no longer names, with another pass before": on(
        "(6, 3)",
        "z = x.clone().requires_grad_(); z.register_hook(lambda grad: print(grad)); z = z * 3",
        "y = x.clone().requires_grad_(); (y * 2).sum().backward(); gc.collect(); z.sum().backward()",
        header=("import gc",),
    ),
    "rows without gradients of a view that requires them": on(
        "(6, 3, 3)",
        "for y in (x, x[:, :], x.mT.contiguous().mT, x.clone()):",
        "    y.requires_grad_()",
        "    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):",
        "        with mode(): rows = y[0], y[1:3], y.mT",
        "        print([(row.requires_grad, row.is_leaf, row._is_view()) for row in rows])",
    ),
    "calls beside a row that was written with a gradient": on(
        "(7, 4)",
        "w.grad = None; row = x[-1]; row.sub_(w[1])",
        "net(torch.ones(4, 3) * step).sum().backward(); print(net.weight.grad)",
        "y = x.detach().clone(); row = x[0]; row.mul_(w[0]); print(copy.deepcopy(y))",
        "z = y.requires_grad_(); row = x[1]; row.mul_(w[2]); z.register_hook(hook); (z * 2).sum().backward()",
        header=(
            "import copy; w = torch.arange(1., 4.).requires_grad_(); torch.manual_seed(0); net = nn.Linear(3, 2)",
            "def hook(gradient): print(gradient)",
        ),
    ),
    "lists in place, of batches beside a plain tensor that has gradients": on(
        "(5, 3)",
        "y = net(x) + 0.0; a = y[y > 0]; torch._foreach_add_([y, a, y], 1); print(y, a)",
        "print(torch.autograd.grad(a.sum() + y.pow(2).sum(), net.weight))",
        header=("torch.manual_seed(0); net = nn.Linear(3, 3)",),
    ),
    "names of nodes where a rank has a single row": on(
        "(3, 4)",
        "x = x.mT.contiguous().mT.requires_grad_(); print(str(x * 2), str(x[:, :9].square()), str(norm(x)))",
        header=("norm = nn.BatchNorm1d(4)",),
    ),
    "dropout in place in inference mode of a batch whose rows the script has": on(
        "(6, 3)",
        "row = x[1]; row.add_(step); columns = x.flatten()[1:3]",
        "with torch.inference_mode(): F.dropout(x, 0.5, inplace=True); F.dropout1d(x, 0.5, True, True)",
        "print(x, row, columns, x[0], x._version, torch.rand(1))",
        "with torch.inference_mode(): F.dropout(x, 0.0, inplace=True); F.dropout(x, 0.5, False, True)",
        "print(x._version)",
        header=("torch.manual_seed(0)",),
    ),
    "a Function that writes and raises, after a row of a view that the script has dropped": on(
        "(6, 4)",
        "v = x.view(6, 2, 2).transpose(1, 2); print(v[0].stride(), v[1:3].stride())",
        "try: Writing.apply(x)",
        "except ValueError: print(x)",
        header=(WRITING,),
    ),
    "a transform after a write to what a module has written to": on(
        "(6, 3)",
        "h = data[step * 6 : step * 6 + 6]; out = net(h); h[0] += 1",
        "print(torch.vmap(torch.func.grad(lambda a: (a.detach() * a).sum()))(h), out)",
        header=REVERSING,
    ),
    "products that copy what they save, before a write to it": on(
        "(3, 4, 4)",
        "h = linear(x.mT) + linear(x.mT.unsqueeze(2).expand(-1, -1, 2, -1)).sum(2)",
        "h = h + torch.einsum('bij,ik->bjk', x, linear.weight) + x.mT @ linear.weight + attention(x, x, x)[0]",
        "h = h + torch.tensordot(x, linear.weight, dims=([1], [0]))",
        "x *= 2; h.square().sum().backward(); print(linear.weight.grad, attention.in_proj_weight.grad)",
        header=(
            "torch.manual_seed(0); linear = nn.Linear(4, 4)",
            "attention = nn.MultiheadAttention(4, 2, batch_first=True)",
        ),
    ),
    "parts of the data of a gradient, before another pass adds to it": on(
        "(6, 3)",
        "x.requires_grad_(); (net(x).square().sum() + x.square().sum()).backward()",
        "parts = [(g := of.grad.data)[1] for of in (x, net.weight)] + [x.grad.data.flatten()[::2]]",
        "array = x.grad.data.numpy(); array *= 2; held = net.weight.grad.data; held.numpy()[...] += 1",
        "(net(x).sin().sum() + x.sin().sum()).backward(); print(parts, array.tolist(), x.grad, held)",
        header=("torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "the same tensor as data, twice": on(
        "(6, 3)",
        "x.data = kept; x += 1; x.data = kept; kept[0] = 5; print(x, kept); net(x).sum().backward()",
        "for _ in range(2): net.weight.grad.data = grad; grad.mul_(2); print(net.weight.grad, grad)",
        header=("torch.manual_seed(0); net = nn.Linear(3, 4); kept, grad = torch.ones(6, 3), torch.ones(4, 3)",),
    ),
    "hooks on tensors of a function that is transformed": on(
        "(6, 3)",
        "print([transform(double)(t) for t in (x, x[0], data[:2]) for transform in transforms])",
        header=(
            "def double(a):\n    h = a.tanh(); h.register_hook(lambda grad: grad * 2); return h",
            "transforms = [torch.func.jacrev, lambda f: torch.func.grad(lambda a: f(a).sum())]",
        ),
    ),
    "a view of what a function that is mapped has written to": on(
        "(6, 4)",
        "v = torch.vmap(first)(x); v[1:] = 7; print(x, v)",
        "y = x * scale; v = torch.vmap(first)(y); v += 1; (y.square().sum() + v.sum()).backward(); print(scale.grad)",
        header=("def first(a): a.mul_(3); return a[:2]", "scale = torch.ones((), requires_grad=True)"),
    ),
    "hooks on a leaf in a pass that makes a graph": on(
        "(8, 3)",
        "x.requires_grad_(); x.register_hook(lambda grad: grad * 2 * scale)",
        "x.sin().sum().backward(create_graph=True); first = x.grad; print(first.requires_grad)",
        "first.square().sum().backward(); print(first, x.grad, scale.grad)",
        header=("scale = torch.ones((), requires_grad=True)",),
    ),
    "strides of a gradient of which each rank has a single row": on(
        "(2, 3, 3)",
        "x.requires_grad_(); x.register_hook(lambda grad: print(grad.stride()))",
        "torch.vmap(lambda a, b: (a * b).sum())(x.sin().mT, x).sum().backward()",
        "(x.sin().mT * x).sum().backward()",
    ),
    "writes outside of inference mode to tensors of it": on(
        "(8, 3)",
        "with torch.inference_mode(): y = x + 1",
        "y[:].add_(10)",
        "print(y)",
        "for _ in range(5):",
        "    with torch.inference_mode(): y.mul_(2)",
        "y.mul_(2)",
        "print(y)",
    ),
    "a nested tensor of batches": on(
        "(8, 3)",
        "nested = torch.nested.nested_tensor([x, x.mT, x * 2])",
        "print([part.tolist() for part in nested.unbind()])",
    ),
    "hooks that are registered where autograd records nothing": on(
        "(8, 3)",
        "h = x * scale; k = (x * scale).mT",
        "with torch.inference_mode(): h.register_hook(lambda grad: grad * 2)",
        "with torch.no_grad(): k.register_hook(lambda grad: grad * 3)",
        "(h.sin().sum() + k.cos().sum()).backward(); print(scale.grad, h.requires_grad, k.requires_grad)",
        header=("scale = torch.ones((), requires_grad=True)",),
    ),
    "gradients with a graph, asked for where autograd records nothing": on(
        "(8, 3)",
        "x.requires_grad_(); total = (x * scale).sin().sum()",
        "with torch.no_grad(): grads = torch.autograd.grad(total, [scale, x], create_graph=True)",
        "print(grads, torch.autograd.grad(sum(grad.square().sum() for grad in grads), [scale, x]))",
        "h = x * scale; h.retain_grad(); h.sin().sum().backward(create_graph=True)",
        "with torch.no_grad(): print(h.grad.requires_grad)",
        header=("scale = torch.ones((), requires_grad=True)",),
    ),
    "strides of gradients that are one number for many entries": on(
        "(6, 4, 3)",
        "x.requires_grad_(); h = x * 1; t = x.transpose(0, 1) * 1",
        "sums = [h.sum(), (h + 1).mean(), h.sum(0).sum(), h.mean(0).exp().sum(), h.sum((1, 2)).exp().sum()]",
        "sums += [h[:, 1:].sum(), h.transpose(1, 2).sum(1).exp().sum(), torch.cat([h, h], 2).sum()]",
        "for loss in sums: print([(g.stride(), g) for g in torch.autograd.grad(loss, [x, h], retain_graph=True)])",
        "print([torch.autograd.grad(f(t.transpose(0, 1)), t)[0].stride() for f in (torch.sum, torch.mean)])",
        "h.register_hook(lambda g: print(g.stride())); x.register_hook(lambda g: print(g.stride()))",
        "h.sum().backward(retain_graph=True); g, = torch.autograd.grad(h.sum(), h)",
        "g.mul_(2)",
        "m = h.mean(); torch.autograd.grad(m, h, retain_graph=True); print(torch.autograd.grad(m, h)[0].stride())",
    ),
    "a second pass through a mean, which saves nothing": on(
        "(6, 3)",
        "x.requires_grad_(); m = x.mean(); m.backward(); m.backward(); print(x.grad)",
    ),
    "attributes of a state dict that is saved with batches": on(
        "(6, 3)",
        "net(x).sum().backward(); buffer = io.BytesIO(); torch.save([net.state_dict(), x], buffer); buffer.seek(0)",
        "print(len(buffer.getvalue()), torch.load(buffer)[0]._metadata)",
        "buffer = io.BytesIO(); torch.save(dict(net.named_parameters()), buffer); print(len(buffer.getvalue()))",
        header=("import io; torch.manual_seed(0); net = nn.Linear(3, 4)",),
    ),
    "strides of a gradient of data that is set to a tensor in another layout": on(
        "(4, 2, 2)",
        "x.requires_grad_(); (x * x).sum().backward(); net(x).sum().backward(); parts = x, net.weight",
        "x.data = kept if step % 2 else (x.data * 2).mT; net.weight.data = net.weight.data.t().contiguous().t()",
        "print([(part.grad.stride(), part.grad) for part in parts]); grads = [part.grad for part in parts]",
        "(x * x).sum().backward(); net(x).sum().backward(); print(grads, [part.grad.stride() for part in parts])",
        "print([part.grad is grad for part, grad in zip(parts, grads)])",
        header=(
            "torch.manual_seed(0); net = nn.Linear(2, 3); kept = torch.ones(4, 2, 2).mT.contiguous().mT",
            "for p in net.parameters(): p.grad = torch.ones_like(p)",
        ),
    ),
    "the name of a write that is computed whole, and of one of several views after a write": on(
        "(6, 3)",
        "shown = lambda of: print(repr(of).partition('grad_fn')[2])",
        "x.requires_grad_(); h = x * 1; h.cumsum_(0); shown(h); h[0] = 1; shown(h)",
        "h = x * 1; several = h.unbind(1)",
        "with torch.no_grad(): several[0].add_(1)",
        "shown(several[1]); shown(h); v, m = torch.var_mean((x * 1).double(), 0); shown(v); shown(m); print(m._base)",
        "shown(F.cross_entropy(x * 1, torch.arange(6) % 3, torch.ones(3))); shown((x * 1)[:, None].squeeze(1))",
        "shown(F.max_pool1d((x * 1)[:, None], 2)); shown(F.batch_norm(x * 1, None, None, training=True))",
        "s = x.sum(); shown(s); s /= 2; shown(s); s.clamp_(max=1); shown(s); t = x.sum(0); t[0] = 1; shown(t)",
    ),
    "a write to rows of which a variance was computed": on(
        "(6, 3)",
        "x.requires_grad_(); h = x * 1; v = h.var(0)",
        "with torch.no_grad(): h.mul_(2)",
        "v.sum().backward()",
    ),
    "a write to what a function that is computed whole has saved as its result": on(
        "(6, 3)",
        "x.requires_grad_(); h = x * 1; y = h.cumprod_(0)",
        "with torch.no_grad(): y.mul_(2)",
        "y.sum().backward()",
    ),
    "a write to a factor of a sum over single rows": on(
        "(2, 3)",
        "x.requires_grad_(); h, k = x * 1, x * 2; p = torch.tensordot(h, k, ([0], [0])); h.data.mul_(2)",
        "p.sum().backward(); print(x.grad)",
        "h, k = x[:, 0] * 1, x[:, 1] * 2; p = torch.inner(h, k); h.mul_(2)",
        "p.backward()",
    ),
    "parameters of another type for a while": on(
        "(6, 5)",
        "net.zero_grad(); print(torch.autograd.grad(net(x).square().mean(), net.parameters()))",
        "old = [p.data for p in net.parameters()]; net.half()",
        "net.float() if step % 2 else [setattr(p, 'data', data) for p, data in zip(net.parameters(), old)]",
        "print(torch.autograd.grad(net(x).square().mean(), net.parameters()))",
        "net(x).sum().backward(); print(net.weight.grad, sums); sums.clear()",
        header=(
            "torch.manual_seed(0); net = nn.Linear(5, 3); sums = []",
            "net.weight.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.sum()))",
        ),
    ),
    "functions that do not broadcast, of a single row beside several": on(
        "(3, 4)",
        "x = x if step % 2 else x[:2]",
        "for a, b in [(x[:1] + 1, x), (x, x[:1] + 1), (x[1:], x)]:",
        "    for function in functions:",
        "        try: print(function(a, b))",
        "        except (RuntimeError, ValueError, TypeError) as error: print(str(error))",
        header=(
            "w = torch.ones(3, 4, 4)",
            "functions = [lambda a, b: F.bilinear(a, b, w), lambda a, b: torch.bmm(a[:, None], b[:, :, None])]",
            "functions += [lambda a, b: torch.baddbmm(b[:, None, :1], b[:, None], a[..., None])]",
            "functions += [lambda a, b: torch.linalg.solve(a[:, :2, None] * torch.eye(2) + torch.eye(2), b[:, :2])]",
            "functions += [lambda a, b: F.gaussian_nll_loss(b, b, a.abs()), lambda a, b: F.mse_loss(b, b, weight=a)]",
            "functions += [lambda a, b: F.binary_cross_entropy(b.sigmoid(), b.sigmoid(), weight=a.sigmoid())]",
            "attention = lambda b, mask: F.scaled_dot_product_attention(b, b, b, attn_mask=mask)",
            "functions += [lambda a, b: attention(b[:, None, None], a[:, None, None, :1])]",
            "functions += [lambda a, b: a[:, 0].dot(w[0, 0, 0]), lambda a, b: a[:, 0].addmv(a[0, 0], a[:, 0])]",
            "functions += [lambda a, b: F.cosine_embedding_loss(a, 2, b[:, 0])]",
        ),
    ),
    "functions that return the parameter itself": on(
        "(8, 4)",
        "net(x).sum().backward(); p = net.weight",
        "made = [p.float(), p.contiguous(), p.to(x), p.type_as(x), p.cpu(), F.dropout(p, 0.0), p.real, p.data]",
        "print([(each is p, each.is_leaf) for each in made])",
        "with torch.no_grad(): made[0].mul_(0.5); made[5][1] = 2; print(p)",
        header=("torch.manual_seed(0); net = nn.Linear(4, 3)",),
    ),
    "the gradients of parameters with a tangent": on(
        "(6, 4)",
        "with fwAD.dual_level():",
        "    dual = fwAD.make_dual(x.double().requires_grad_(), torch.ones(6, 4).double())",
        "    grads = torch.autograd.grad(net(dual).square().mean(), [dual, *net.parameters()])",
        "    print([fwAD.unpack_dual(grad)[:] for grad in grads])",
        header=("import torch.autograd.forward_ad as fwAD; torch.manual_seed(0); net = nn.Linear(4, 2).double()",),
    ),
    "data of a parameter that is set to a view of itself": on(
        "(8, 4)",
        "net(x).square().mean().backward(); print(net.weight.grad, net.weight.grad.stride())",
        "net.weight.data = net.weight.mT",
        header=("torch.manual_seed(0); net = nn.Linear(4, 4)",),
    ),
    "data that is set to another tensor, while only garbage has the earlier memory": on(
        "(4, 3)",
        "parts = [x[0], x.detach()]; parts.append(parts); del parts",
        "x.data = x.data * 1; x.mul_(2); print(x)",
        "x.numpy(); parts = [x.detach()]; parts.append(parts); del parts",
        "x.data = torch.ones(4, 3); print(x + 1); x.mul_(2)",
    ),
    "a plain tensor that is written to and dropped, after a module has had it": on(
        "(5, 4)",
        "for plain in [torch.ones(5, 4) / 2, x + 0, x[:4].clone(), x.new_tensor(x.tolist())]:",
        "    out = net(plain).square().mean(); plain.data.mul_(2); del plain",
        "    print(torch.autograd.grad(out, net.weight))",
        "plain = torch.ones(5, 4); out = net(plain).square().mean(); plain.add_(1); del plain",
        "try: out.backward()",
        "except RuntimeError: print(net(x).sum())",
        header=("torch.manual_seed(0); net = nn.Linear(4, 3)",),
    ),
    "statistics of another type than the batch": on(
        "(5, 4)",
        "for net in nets:",
        "    for types in [(torch.float32, torch.float64), (torch.float64, torch.float32)]:",
        "        try: print(net.to(types[0])(x.to(types[1])).dtype)",
        "        except RuntimeError as error: print(str(error), list(net.buffers()))",
        header=("nets = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, momentum=None)]",),
    ),
    "a write to a row, counted by a view that all ranks hold": on(
        "(5, 5)",
        "h = x.requires_grad_() * 1; y = h.unfold(0, 3, 1); h[0] = 5; print(y._version, h._version)",
    ),
    "gradients that are read as a conjugate or a negative": on(
        "(6, 3)",
        "net.zero_grad(); w.grad = None; z = torch.complex(x, x + 1)",
        "(z * torch.complex(x[0] * 0, w).conj()).real.square().sum().backward(); print(w.grad, w.grad.is_neg())",
        "F.linear(z, net.weight.conj()).abs().sum().backward(); print(net.weight.grad, net.weight.grad.is_conj())",
        "(z.imag * net.bias.conj().imag[:1]).sum().backward(); print(net.bias.grad)",
        header=(
            "torch.manual_seed(0); net = nn.Linear(3, 2, dtype=torch.complex64)",
            "w = torch.ones(3, requires_grad=True)",
        ),
    ),
    "a view of all of a batch of which the script holds a row": on(
        "(6, 4)",
        "x.requires_grad_(); y = x * 2; row = y[0]; v = y[:]; v.retain_grad(); v.register_hook(lambda g: print(g))",
        "torch.cov(v).sum().backward(); print(v.grad, x.grad, row)",
        "y = x.square().mean(1); row = y[0]",
        "print(torch.autograd.functional.jacobian(lambda rows: rows.softmax(0), y, create_graph=True))",
    ),
    "rows that are written to a plain tensor, after a module has had it": on(
        "(4, 3)",
        "plain = torch.tensor(x.tolist()); loss = net(plain / 8).square().mean() + net(plain).mean()",
        "loss.backward(); opt.step(); opt.zero_grad()",
        "plain[:, 0] = x[:, 1]; print(plain, net.state_dict())",
        header=("torch.manual_seed(0); net = nn.Linear(3, 3); opt = torch.optim.SGD(net.parameters(), lr=0.05)",),
    ),
    "a slice of blocks that ends before it starts": on(
        "(3, 3)",
        "z = torch.cat([x, x + 1, x * 2]); print(z[6:3], z[-3:3].sum(), z[3:6])",
    ),
}
