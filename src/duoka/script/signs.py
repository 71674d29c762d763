"""Find source code that shows the kind of a script: a table of signs, and a visitor that finds them.

A sign under a condition (`if args.distributed: init_process_group()`) does not decide the kind. So the visitor
records which signs and which uses of functions are under one, for `duoka.script.read`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto


class Meaning(Enum):
    """The meaning of a sign."""

    STARTS = auto()  # starts torch.distributed
    HANDS_OVER = auto()  # uses a library that needs RANK and the like
    ADAPTS = auto()  # uses a library that reads RANK, and without it runs on one device
    WANTS = auto()  # asks such a library for several ranks
    NEEDS = auto()  # needs RANK and the like
    ASKS = auto()  # reads RANK and the like if they are set
    OWN_RANKS = auto()  # sets its rank itself
    API = auto()  # uses duoka's API
    USES = auto()  # uses a name, possibly of a function that shows more


VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
FLAGS = frozenset({"--local_rank", "--local-rank"})

# A call: (the package that its name comes from, or "" for any; its last name) -> its meaning.
CALLS = {
    ("", "init_process_group"): Meaning.STARTS,
    ("", "init_rpc"): Meaning.STARTS,
    ("accelerate", "Accelerator"): Meaning.ADAPTS,
    ("accelerate", "PartialState"): Meaning.ADAPTS,
    ("colossalai", "launch_from_torch"): Meaning.HANDS_OVER,
    ("composer", "Trainer"): Meaning.ADAPTS,
    ("deepspeed", "init_distributed"): Meaning.HANDS_OVER,
    ("deepspeed", "initialize"): Meaning.HANDS_OVER,
    ("duoka", "launch"): Meaning.API,
    ("duoka", "start"): Meaning.API,
    ("horovod", "init"): Meaning.HANDS_OVER,
    ("ignite", "Parallel"): Meaning.ADAPTS,
    ("ignite", "initialize"): Meaning.HANDS_OVER,
    ("lightning", "Fabric"): Meaning.ADAPTS,
    ("lightning", "LightningCLI"): Meaning.ADAPTS,
    ("lightning", "Trainer"): Meaning.ADAPTS,
    ("lightning_fabric", "Fabric"): Meaning.ADAPTS,
    ("mmengine", "Runner"): Meaning.ADAPTS,
    ("pytorch_lightning", "LightningCLI"): Meaning.ADAPTS,
    ("pytorch_lightning", "Trainer"): Meaning.ADAPTS,
    ("torch", "init_device_mesh"): Meaning.STARTS,
    ("torch", "is_torchelastic_launched"): Meaning.ASKS,
    ("transformers", "Seq2SeqTrainer"): Meaning.ADAPTS,
    ("transformers", "Trainer"): Meaning.ADAPTS,
    ("trl", "DPOTrainer"): Meaning.ADAPTS,
    ("trl", "GRPOTrainer"): Meaning.ADAPTS,
    ("trl", "SFTTrainer"): Meaning.ADAPTS,
}

ANY = "*"  # among the option words: the script reads sys.argv itself, so it may take any option

# Tests that hold wherever the script is meant to run.
FORMALITIES = frozenset({"is_available", "is_gloo_available", "is_initialized", "is_nccl_available"})

# Packages that make command-line options out of the names of arguments and fields.
OPTIONS_FROM_NAMES = frozenset(
    {"chz", "defopt", "draccus", "fire", "jsonargparse", "plac", "pydantic_settings"}
    | {"simple_parsing", "tap", "transformers", "typer", "tyro"}
)


@dataclass(frozen=True, slots=True)
class Sign:
    """A place in the source that shows the kind of a script, such as a call of `init_process_group`."""

    meaning: Meaning
    where: str  # file:line
    text: str  # what is there; of a use the name
    function: str | None  # the enclosing one
    conditions: int  # number of conditions around the place in that function


@dataclass(slots=True)
class Findings:
    """Signs and names of one file."""

    signs: list[Sign] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)  # the names that it defines
    words: set[str] = field(default_factory=set)  # the command-line options that it seems to take
    flag: str | None = None  # the first spelling of `--local_rank` that it parses


def look(tree: ast.Module, shown: str) -> Findings:
    """Find the signs in one file. shown: its name in messages."""
    names = _Names(tree)
    visitor = _Visitor(names, shown)
    visitor.block(tree.body)
    if names.packages & OPTIONS_FROM_NAMES:
        visitor.findings.words |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        visitor.findings.words |= {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return visitor.findings


class _Names:
    """Full names of a file's names: `dist.get_rank` is `torch.distributed.get_rank`."""

    def __init__(self, tree: ast.Module) -> None:
        self.full: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.full[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self.full[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.packages = {name.partition(".")[0] for name in self.full.values()}
        # When all imports are known: `env = os.environ`, `ctx = mp.get_context("spawn")`
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                full = self.full_name(node.value)
                if full.partition(".")[0] in self.packages:
                    self.full.setdefault(node.targets[0].id, full)

    def full_name(self, node: ast.expr) -> str:
        """Return the full dotted name; it starts with `?` if its first part was not imported."""
        if isinstance(node, ast.Name):
            return self.full.get(node.id, f"?.{node.id}")
        if isinstance(node, ast.Attribute):
            return f"{self.full_name(node.value)}.{node.attr}"
        return self.full_name(node.func) if isinstance(node, ast.Call) else "?"


class _Visitor(ast.NodeVisitor):
    """Visits one file and records signs, uses of names, and option words."""

    def __init__(self, names: _Names, shown: str) -> None:
        self.names, self.shown, self.findings = names, shown, Findings()
        self.function: str | None = None
        self.enclosing_class: str | None = None
        self.conditions = 0  # number of conditions around, within the function
        self.demanding = False  # in a test whose failure ends the script
        self.rescued = False  # in a `try` with handlers
        self.running: dict[str, str] = {}  # loop variables whose values are VARIABLES

    # State

    @contextmanager
    def set(self, **state: object) -> Iterator[None]:
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        yield
        vars(self).update(before)

    def under(self, *tests: ast.expr) -> AbstractContextManager[None]:
        """Visit under these conditions, without those that decide nothing."""
        return self.set(conditions=self.conditions + any(map(_decides, tests)))

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Visit statements in order; those after an `if ...: return` are under its condition, too."""
        passed: list[ast.expr] = []
        for statement in statements:
            with self.under(*passed):
                self.visit(statement)
            if isinstance(statement, ast.If):
                ends = statement.body[-1:] + statement.orelse[-1:]
                passed += [statement.test] * any(isinstance(end, ast.Return) for end in ends)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args):
            self.visit(part)
        special = node.name.startswith("__") and self.enclosing_class is not None
        name = self.enclosing_class if special else node.name  # `__init__` runs where the class is called
        self.findings.functions.add(str(name))
        # Whether it runs at all is found by its uses (`duoka.script.read`): conditions around it do not count.
        with self.set(function=name, conditions=0, enclosing_class=None, rescued=False):
            self.block(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:  # a subclass of a library's Trainer is taken for a call of it
            self._call(base)
        with self.set(enclosing_class=node.name):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        with self.set(demanding=_ends(node.body)):
            self.visit(node.test)
        signs = self.findings.signs
        first = len(signs)
        with self.under(node.test):
            self.block(node.body)
            second = len(signs)
            self.block(node.orelse)
        # What is in both branches is not under this condition.
        here, there = ({_what(sign) for sign in branch} for branch in (signs[first:second], signs[second:]))
        both = {what for what in here & there if what[2] == self.conditions + 1}
        signs[first:] = [
            replace(sign, conditions=self.conditions) if _what(sign) in both else sign for sign in signs[first:]
        ]

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        with self.under(node.test):
            self.visit(node.body)
            self.visit(node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        first, *others = node.values
        self.visit(first)
        with self.under(first):
            for other in others:
                self.visit(other)

    def visit_Assert(self, node: ast.Assert) -> None:
        with self.set(demanding=True):
            self.visit(node.test)

    def visit_Try(self, node: ast.Try) -> None:
        with self.set(rescued=self.rescued or bool(node.handlers)):
            self.block(node.body)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        running = {
            loop.target.id: variable
            for loop in node.generators
            for value in ast.walk(loop.iter)
            if isinstance(loop.target, ast.Name) and (variable := self._variable(value))
        }
        with self.set(running=self.running | running):
            self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    # Nodes

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # not a docstring
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if self.names.full_name(node) == "sys.argv":
            self.findings.words.add(ANY)
        if isinstance(node.ctx, ast.Load):
            self._note(Meaning.USES, node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self.names.full_name(node) == "sys.argv":
            self.findings.words.add(ANY)
        self._note(Meaning.USES, node, node.attr)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and len(node.value) < 100:  # "--devices", and getopt's "devices="
            match = re.match(r"--([a-zA-Z][\w-]*)|([a-zA-Z][\w-]*)=$", node.value)
            if match:
                self.findings.words.add((match[1] or match[2]).replace("-", "_"))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        variable = self._variable(node.slice)
        if variable and self.names.full_name(node.value) == "os.environ":
            if isinstance(node.ctx, ast.Load):
                self._reads(variable, node, needed=not self.rescued)
            elif isinstance(node.ctx, ast.Store):
                self._note(Meaning.OWN_RANKS, node, f"sets {variable} itself")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        variable = self._variable(node.left)
        if variable and any(self.names.full_name(other) == "os.environ" for other in node.comparators):
            self._reads(variable, node, needed=self.demanding)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._call(node.func, node.args, node.keywords)
        demanding = isinstance(node.func, ast.Name) and node.func.id == "int"  # int(None) would raise
        with self.set(demanding=demanding):
            self.generic_visit(node)

    def _call(
        self, called: ast.expr, arguments: Sequence[ast.expr] = (), keywords: Sequence[ast.keyword] = ()
    ) -> None:
        full = self.names.full_name(called)
        package, last = full.partition(".")[0], full.rpartition(".")[2]
        meaning = CALLS.get((package, last)) or CALLS.get(("", last))
        if meaning is Meaning.ADAPTS and (words := next(filter(_is_of_several, keywords), None)):
            self._note(Meaning.WANTS, called, f"calls {package}'s {last} with {ast.unparse(words)}")
        elif meaning in (Meaning.HANDS_OVER, Meaning.ADAPTS):
            self._note(meaning, called, f"uses {package}'s {last}")
        elif meaning is not None:
            self._note(meaning, called, f"calls {last}")
        if meaning is Meaning.STARTS and any(keyword.arg in ("rank", None) for keyword in keywords):
            self._note(Meaning.OWN_RANKS, called, f"gives {last} a rank of its own")  # None: of `**keywords`
        variable = self._variable(arguments[0]) if arguments else None
        if variable and full in ("os.getenv", "os.environ.get", "os.environ.setdefault"):
            self._reads(variable, called, needed=self.demanding and len(arguments) == 1)
        for argument in arguments:
            if isinstance(argument, ast.Constant) and argument.value in FLAGS:
                self.findings.flag = self.findings.flag or str(argument.value)
                self._note(Meaning.ASKS, argument, f"parses {argument.value}")

    def _variable(self, node: ast.AST) -> str | None:
        """Return the variable of VARIABLES that an expression names, if any."""
        if isinstance(node, ast.Name):
            return self.running.get(node.id)
        return node.value if isinstance(node, ast.Constant) and node.value in VARIABLES else None

    def _reads(self, variable: str, node: ast.expr, needed: bool) -> None:
        text = f"reads {variable}" if needed else f"reads {variable} if it is set"
        self._note(Meaning.NEEDS if needed else Meaning.ASKS, node, text)

    def _note(self, meaning: Meaning, node: ast.expr, text: str) -> None:
        where = f"{self.shown}:{node.lineno}"
        self.findings.signs.append(Sign(meaning, where, text, self.function, self.conditions))


def _what(sign: Sign) -> tuple[Meaning | str, str | None, int]:
    return sign.text if sign.meaning is Meaning.USES else sign.meaning, sign.function, sign.conditions


def _decides(test: ast.expr) -> bool:
    """Return whether a test is a real condition, unlike `__name__ == "__main__"` or `is_available()`."""
    if isinstance(test, ast.BoolOp):
        return any(_decides(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _decides(test.operand)
    if isinstance(test, ast.Compare):
        return not (isinstance(test.left, ast.Name) and test.left.id == "__name__")
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute | ast.Name):
        called = test.func.attr if isinstance(test.func, ast.Attribute) else test.func.id
        return called not in FORMALITIES
    return not isinstance(test, ast.Constant)


def _is_of_several(keyword: ast.keyword) -> bool:
    """Return whether an argument asks for several ranks: `devices=2`, `num_nodes=2`, `strategy="ddp"`."""
    if isinstance(keyword.value, ast.List | ast.Tuple):
        return keyword.arg in ("devices", "gpus") and len(keyword.value.elts) > 1
    value = str(keyword.value.value) if isinstance(keyword.value, ast.Constant) else ""
    if keyword.arg == "strategy":
        return value.startswith(("ddp", "deepspeed", "fsdp", "model_parallel"))
    return keyword.arg in ("devices", "gpus", "num_nodes") and value.isdecimal() and int(value) > 1


def _ends(statements: Sequence[ast.stmt]) -> bool:
    """Return whether statements end the script, by `raise` or an exit."""
    last = statements[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        called = last.value.func
        return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in ("exit", "_exit")
    return isinstance(last, ast.Raise)
