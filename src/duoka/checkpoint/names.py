"""Match the names of tensors in a file and a model, ignoring wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from duoka.checkpoint.formats import Stored
from duoka.errors import OptionError, WeightsError

# Names that wrappers insert: DataParallel and DistributedDataParallel, torch.compile, Fabric and Lightning, FSDP,
# activation checkpointing.
WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# Also at the beginning: the attribute of a Lightning module, or of a training class, that holds the network.
OUTERMOST = WRAPPERS | {"model"}

# Usual keys of weights in saved dicts, the most usual first; averages of the weights last.
KEYS = (
    *("state_dict", "model_state_dict", "model", "module", "net", "network", "net_state_dict", "model_weights"),
    *("weights", "params", "model_ema", "state_dict_ema", "ema", "ema_state_dict", "params_ema"),
)
# Keys of other things, even if they hold tensors.
_BESIDE = re.compile(r"optim|sched|scaler|(^|_)rng|random|callbacks|loops|hyper_parameters|(^|_)args$|loader")
_EXTRAS = frozenset({"n_averaged"})  # added by AveragedModel


def plain(name: str) -> str:
    """Remove the wrappers' parts of a name: "module.features.module.0.weight" becomes "features.0.weight"."""
    path = name.split(".")
    while len(path) > 1 and path[0] in OUTERMOST:
        path.pop(0)
    return unwrapped(".".join(path))


def unwrapped(name: str) -> str:
    """Remove what wrappers have inserted into a name; its last part is the tensor's own."""
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), last])


def matched(pattern: str, name: str) -> bool:
    """Return True if the pattern is the name, a module that contains it, or a glob that matches it."""
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def chosen(names: Iterable[str], only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Select the names that `only` includes and `skip` does not."""
    wanted = [name for name in names if not only or any(matched(pattern, plain(name)) for pattern in only)]
    return [name for name in wanted if not any(matched(pattern, plain(name)) for pattern in skip)]


def renamed(tensors: Mapping[str, Stored], rename: Mapping[str, str]) -> dict[str, Stored]:
    """Rename tensors: replace every match of each regular expression."""
    named: dict[str, Stored] = {}
    for old, tensor in tensors.items():
        new = old
        for pattern, replacement in rename.items():
            try:
                new = re.sub(pattern, replacement, new)
            except (re.error, IndexError) as error:
                raise OptionError("rename", {pattern: replacement}, "regular expressions", str(error)) from error
        if new in named:
            raise WeightsError(f"rename gives two tensors the name {new!r}, one of them {old!r}")
        named[new] = tensor
    return named


def match(model: Collection[str], file: Collection[str]) -> dict[str, str]:
    """Map the model's names to the file's, if they are equal or differ only by wrappers."""
    pairs = {name: name for name in model if name in file}
    ours = _unique(name for name in model if name not in pairs)
    theirs = _unique(name for name in file if name not in pairs)
    return pairs | {ours[name]: theirs[name] for name in ours if name in theirs}


def _unique(names: Iterable[str]) -> dict[str, str]:
    """Map plain names to names, for plain names that are unique."""
    names = list(names)
    counts = Counter(map(plain, names))
    return {plain(name): name for name in names if counts[plain(name)] == 1}


def extras(names: Iterable[str]) -> list[str]:
    """Return the names that a model need not have."""
    return [name for name in names if plain(name) in _EXTRAS]


def differences(pairs: Mapping[str, str]) -> list[str]:
    """Describe how the file's names differ from the model's. pairs: the file's name by the model's."""
    counts: Counter[str] = Counter()
    for ours, theirs in pairs.items():
        if theirs.endswith("." + ours):
            counts[f"stripped '{theirs[: -len(ours)]}' from"] += 1
        elif ours.endswith("." + theirs):
            counts[f"added '{ours[: -len(theirs)]}' to"] += 1
        elif ours != theirs:
            gone = [f"'{part}.'" for part in theirs.split(".")[:-1] if part in OUTERMOST]
            come = [f"'{part}.'" for part in ours.split(".")[:-1] if part in OUTERMOST]
            counts[
                f"exchanged {' '.join(dict.fromkeys(gone)) or 'nothing'} "
                f"for {' '.join(dict.fromkeys(come)) or 'nothing'} in"
            ] += 1
    return [f"{what} {count} name{'s' if count > 1 else ''}" for what, count in counts.most_common()]


# Selection of the weights in a file.


def groups(tree: Any, at: str = "", depth: int = 0) -> dict[str, dict[str, Stored]]:
    """Return every dict in a file that may be a model's weights: its tensors by name, under its path in the file.

    Nested dicts are returned both by themselves and as a part of the outer one, with names joined by dots.
    """
    if not isinstance(tree, Mapping) or depth > 4:
        return {}
    tensors = _tensors_in(tree)
    groups_in = {at: tensors} if tensors else {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and not _is_beside(key):
            groups_in |= groups(value, f"{at}.{key}" if at else str(key), depth + 1)
    return groups_in


def _tensors_in(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for key, value in tree.items():
        if isinstance(value, Stored):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping) and not _is_beside(key):
            tensors |= _tensors_in(value, f"{prefix}{key}.")
    return tensors


def _is_beside(key: Any) -> bool:
    return not isinstance(key, str) or bool(_BESIDE.search(key))


def choose(
    groups: Mapping[str, dict[str, Stored]], wanted: Collection[str] | None, key: str | None, path: Any
) -> str:
    """Choose a group: the one named by `key`, else the one with most of the wanted names and fewest others.

    wanted: a model's names; None without a model, to choose by the usual keys. Raises WeightsError if there is no
    group, or two match equally.
    """
    if key is not None:
        if key not in groups:
            raise WeightsError(f"{path} has no weights under {key!r}; it has {_list(groups) or 'none at all'}")
        return key
    if not groups:
        raise WeightsError(f"{path} holds no tensors that could be weights")
    hits = {at: len(match(wanted, names)) for at, names in groups.items()} if wanted is not None else {}
    if not any(hits.values()):  # no model, or none of its names: the error will show a table of the likeliest
        return _likeliest(groups)

    def rank(at: str) -> tuple[int, int, int]:
        return -hits[at], len(groups[at]) - hits[at], _preference(at)

    best = min(groups, key=rank)
    equal = [at for at in groups if rank(at) == rank(best)]
    if len(equal) > 1:
        raise WeightsError(f"{path} holds several sets of weights that fit; choose one by key=: {_list(equal)}")
    return best


def _likeliest(groups: Mapping[str, dict[str, Stored]]) -> str:
    """Return the group of a usual key, else the only one, else all tensors."""
    inner = [at for at in groups if at and "." not in at]
    known = [at for at in inner if at in KEYS]
    if known:
        return min(known, key=KEYS.index)
    return inner[0] if len(inner) == 1 and len(groups.get("", {})) == len(groups[inner[0]]) else next(iter(groups))


def _preference(at: str) -> int:
    """Return the rank of a group by its key: KEYS, unknown ones before averages, the whole file last."""
    last = at.rpartition(".")[2]
    if not at:
        return 2 * len(KEYS)
    return 2 * KEYS.index(last) if last in KEYS else 2 * KEYS.index("model_ema") - 1


def _list(keys: Iterable[str]) -> str:
    return ", ".join(repr(key) if key else "'' (all of it)" for key in keys)
