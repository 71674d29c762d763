"""No file but those of duoka.private names a private part of torch or Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import duoka

ROOT = Path(duoka.__file__).parent
# Underscored, and documented.
DOCUMENTED = {"_exit", "_getframe", "_fields", "_replace", "_asdict", "_thread"}
# torch's operators by their names: nothing is looked up in torch by these.
OPERATORS = {"_standard_gamma", "_sample_dirichlet", "_local_scalar_dense", "_pack_padded_sequence", "_unique2"}
OPERATORS |= {"_base", "_pad_packed_sequence", "_to_dlpack"}
OPERATORS |= {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
# Names in files and in wrapped models.
IN_FILES = {"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_modules"}
IN_FILES |= {"_non_persistent_buffers_set", "_parameters", "_buffers"}
IN_DRIVER = {"_v2", "_v3"}  # ends of names in NVML


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the names that the package itself defines."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                names.add(name)
            case ast.ImportFrom(module=module) if (module or "").startswith("duoka"):
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield private names of other packages that a file uses, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if not module.startswith("duoka"):
                parts = [*module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, part) for part in parts if is_private(part))
            case ast.Import():
                for alias in node.names:
                    yield from ((node.lineno, part) for part in alias.name.split(".") if is_private(part))
            case ast.Attribute(ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, name
            case ast.Constant(str(name)) if is_private(name) and name.isidentifier():
                yield node.lineno, name


def files() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_private_parts_are_named_in_one_place() -> None:
    trees = files()
    others = {file: tree for file, tree in trees.items() if not file.startswith("private/")}
    of_torch = {name for file, tree in trees.items() if file not in others for _, name in private_names(tree)}
    allowed = (own_names(list(others.values())) - of_torch) | DOCUMENTED | OPERATORS | IN_DRIVER
    found = [
        f"{file}:{line}: {name}"
        for file, tree in others.items()
        for line, name in private_names(tree)
        if name not in allowed and not (name in IN_FILES and file.startswith("checkpoint/"))
    ]
    assert not found, "these belong into duoka.private: " + ", ".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch import _utils",
        "import torch._dynamo",
        "torch._C._len_torch_dispatch_stack()",
        "version = tensor._version",
        "getattr(threading, '_shutdown')()",
    ],
)
def test_each_way_to_name_one_is_seen(line: str) -> None:
    assert list(private_names(ast.parse(line)))


def test_every_private_part_is_explained() -> None:
    """Each says what it is for, and what is public instead."""
    for name in ("torch", "python"):
        lines = (ROOT / "private" / f"{name}.py").read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("def ") and not line.startswith("def _"):
                assert "Public: " in lines[number + 1], f"{name}.py:{number + 1}: {line}"
