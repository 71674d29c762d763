from __future__ import annotations

from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.cli.script_command import arrange, check_habits
from duoka.errors import ScriptError

OPTIONS = {
    "-h": False,
    "--help": False,
    "-m": False,
    "--devices": True,
    "--kind": True,
    "--quiet": False,
    "-q": False,
}


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch")
    Path("own.py").write_text("parser.add_argument('--devices')")
    Path("raw.py").write_text("import sys; print(sys.argv)")


@pytest.mark.parametrize(
    ("typed", "arranged"),
    [
        # options first: all that follows the script is its own
        ("train.py", "train.py"),
        ("train.py --epochs 5", "train.py --epochs 5"),
        ("--devices 0,3 train.py --epochs 5", "--devices 0,3 train.py --epochs 5"),
        ("--devices=0,3 -q train.py x -q", "--devices=0,3 -q train.py x -q"),
        ("--devices 2 train.py --devices 3", "--devices 2 train.py --devices 3"),
        ("--quiet train.py --kind x --devices", "--quiet train.py --kind x --devices"),
        ("-m pack.train --epochs 5", "-m pack.train --epochs 5"),
        ("--devices -1 train.py", "--devices -1 train.py"),
        # `--` after the script: duoka's before it, the script's behind it
        ("train.py --devices 0,3 -- --epochs 5", "--devices 0,3 train.py --epochs 5"),
        ("train.py --devices=0,3 --quiet -- --quiet", "--devices=0,3 --quiet train.py --quiet"),
        ("--quiet train.py --devices 2 -- --devices 3", "--quiet --devices 2 train.py --devices 3"),
        ("train.py -- --epochs 5", "train.py --epochs 5"),
        ("train.py --", "train.py"),
        ("train.py -- -- x", "train.py -- x"),
        ("train.py --quiet -- a -- b", "--quiet train.py a -- b"),
        ("own.py --devices 2 -- --devices 3", "--devices 2 own.py --devices 3"),
        ("-m pack.train --quiet -- -m", "-m --quiet pack.train -m"),
        # neither: options directly after the script that it does not take
        ("train.py --devices 0,3", "--devices 0,3 train.py"),
        ("train.py --devices=0,3 --quiet", "--devices=0,3 --quiet train.py"),
        ("train.py --devices 0,3 --epochs 5 --quiet", "--devices 0,3 train.py --epochs 5 --quiet"),
        ("train.py --epochs 5 --devices 0,3", "train.py --epochs 5 --devices 0,3"),
        ("train.py -q", "train.py -q"),
        ("train.py --help", "train.py --help"),
        ("train.py -h", "train.py -h"),
        ("own.py --devices 3", "own.py --devices 3"),
        ("own.py --quiet --devices 3", "--quiet own.py --devices 3"),
        ("raw.py --devices 3", "raw.py --devices 3"),
        ("-m train --devices 3", "-m --devices 3 train"),
        ("-m own --devices 3", "-m own --devices 3"),
        # left for click to refuse
        ("", ""),
        ("--devices", "--devices"),
        ("--devices 2", "--devices 2"),
        ("--devics 2 train.py", "--devics 2 train.py"),
        ("train.py --devics 2 -- x", "--devics 2 train.py x"),
        ("-- train.py -- x", "-- train.py -- x"),
    ],
)
def test_whose_words(typed: str, arranged: str) -> None:
    assert arrange(typed.split(), OPTIONS) == arranged.split()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "train.py a -- b",
            "'a' stands between train.py and --, where only duoka's options may; to give train.py all",
        ),
        ("train.py --devices 2 a -- b", "write: train.py -- --devices ..."),
        ("train.py -q -- b", "'-q' stands between"),
        ("train.py --devices -- x", "option '--devices' requires a value"),
        ("train.py --quiet --devices", "option '--devices' requires a value"),
    ],
)
def test_what_cannot_be(typed: str, said: str) -> None:
    with pytest.raises(click.UsageError) as error:
        arrange(typed.split(), OPTIONS)
    assert said in str(error.value)


def test_a_script_that_is_missing_is_said_before_all_else() -> None:
    with pytest.raises(ScriptError, match="there is no script"):
        arrange(["trian.py", "--devices", "2"], OPTIONS)


words = st.lists(st.text("-ab=,.", max_size=4), max_size=6)


@given(words)
def test_after_options_a_scripts_words_are_untouched(own: list[str]) -> None:
    if "--" not in own:
        assert arrange(["--quiet", "train.py", *own], OPTIONS) == ["--quiet", "train.py", *own]


@given(words)
def test_behind_two_dashes_a_scripts_words_are_untouched(own: list[str]) -> None:
    assert arrange(["train.py", "--quiet", "--", *own], OPTIONS) == ["--quiet", "train.py", *own]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--nnodes 2 --node-rank 0 train.py", "'--nnodes': here it is --machines, as in `duoka run --machines 2"),
        ("--devices 2 --node_rank=1 train.py", "'--node_rank': here it is --machine, as in"),
        ("--rdzv-endpoint node1:29500 train.py", "'--rdzv-endpoint': here it is --rendezvous, as in"),
        ("--main_process_ip node1 train.py", "'--main_process_ip': here it is --rendezvous, as in"),
        ("-q --nproc_per_node=4 train.py", "'--nproc_per_node': here it is --devices, as in `duoka run --devices 2"),
        ("-n 4 train.py", "no such option '-n': here it is --devices"),
        ("--gpus all train.py", "no such option '--gpus': here it is --devices"),
        ("--devices 2 python train.py --epochs 2", "python is not needed: duoka run train.py"),
    ],
)
def test_habits(typed: str, said: str) -> None:
    with pytest.raises(click.UsageError) as error:
        check_habits(typed.split(), OPTIONS | {"--machines": True, "--machine": True, "--rendezvous": True})
    assert said in str(error.value)


@pytest.mark.parametrize(
    "typed",
    ["train.py --nnodes 2", "train.py -n 4", "--nnodes 2 train.py", "--no-such x.py", "", "--devices", "python"],
)
def test_what_is_no_habit_is_left(typed: str) -> None:
    check_habits(typed.split(), OPTIONS)
