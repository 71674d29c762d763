from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from duoka.errors import Refused
from duoka.plain import databases
from duoka.plain.databases import Replicas
from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_connections_of_one_rank_see_each_other_s_work(flow: Flow) -> None:
    source = """
        import os, sqlite3, threading
        for name in ("a b.db", "a b.db-wal", "a b.db-shm"):
            if os.path.exists(name):
                os.remove(name)
        one = sqlite3.connect("a b.db")
        print(one.execute("pragma journal_mode=wal").fetchone())
        two = sqlite3.connect("file:a%20b.db?mode=rw", uri=True)
        with one:
            one.execute("create table steps (number integer primary key, loss real)")
        with two:
            two.executemany("insert into steps (loss) values (?)", [(1.5,), (0.5,)])

        def add(loss):
            other = sqlite3.connect(os.path.abspath("a b.db"))
            with other:
                other.execute("insert into steps (loss) values (?)", (loss,))
            other.close()

        thread = threading.Thread(target=add, args=(0.25,))
        thread.start()
        thread.join()
        add(0.125)
        print(one.execute("select * from steps").fetchall())
        memory = sqlite3.connect(":memory:")
        two.backup(memory)
        print(memory.execute("select count(*) from steps").fetchall())
        for connection in (one, two):
            connection.close()
        with open("a b.db", "rb") as file:  # rank 0's, for all
            print(file.read(15))

        os.remove("a b.db")
        again = sqlite3.connect("a b.db")
        print(again.execute("select name from sqlite_master").fetchall())
        with again:
            again.execute("create table other (word text)")
        print(sqlite3.connect("a b.db").execute("select name from sqlite_master").fetchall())

        with open("text.db", "w") as file:
            file.write("no database at all" * 99)
        for name, asks in (("text.db", "select 1 from t"), ("nowhere/a.db", "select 1")):
            try:
                sqlite3.connect(name).execute(asks)
            except sqlite3.Error as error:
                print(type(error).__name__, error)
        """
    as_python(flow, source)


def test_there_is_one_file(flow: Flow) -> None:
    source = """
        import sqlite3
        for number in range(3):
            with sqlite3.connect("a.db") as base:
                base.execute("create table if not exists steps (number integer)")
                base.execute("insert into steps values (?)", (number,))
        """
    flow.run(["run", "--devices", "cpu:3", flow.write("script.py", source)]).ok()
    with closing(sqlite3.connect(flow.folder / "a.db")) as base:
        assert base.execute("select * from steps").fetchall() == [(0,), (1,), (2,)]


def test_what_stays_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "_WAIT", 0.001)
    replicas = Replicas(lambda path: sqlite3.connect(path, timeout=0))
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as holder:
        holder.execute("create table t (x)")
        holder.execute("begin exclusive")
        with pytest.raises(Refused, match="a transaction holds it exclusively"):
            replicas.of(str(tmp_path / "a.db"))
        holder.execute("rollback")
    assert replicas.of(str(tmp_path / "a.db")) == replicas.of(str(tmp_path / "a.db"))
