from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said


def test_they_are_rank_0_s(flow: Flow) -> None:
    source = """
        import datetime as module, os, threading
        from datetime import date, datetime, timezone
        class Mine(datetime):
            pass
        print(datetime.now(), datetime.utcnow(), datetime.today(), date.today(), Mine.now(), Mine.today())
        print(module.datetime.now(timezone.utc), datetime.now(tz=timezone.utc), f"{datetime.now():%f}")
        folder = datetime.now().isoformat()
        os.makedirs(folder)
        with open(f"{folder}/weights", "w") as file:
            file.write("learned")
        print(open(f"{folder}/weights").read())
        """
    first, other = said(flow, source)
    assert first == other
    assert first.endswith("learned\n")


def test_dates_stay_python_s(flow: Flow) -> None:
    source = """
        import copy, pickle, threading
        from datetime import date, datetime, timezone
        class Mine(datetime):
            pass
        now, mine = datetime.now(), Mine.now(timezone.utc)
        print(type(now), type(mine), type(mine.date()), type(date.today()), now.tzinfo, mine.tzinfo)
        print(pickle.loads(pickle.dumps(now)) == now, copy.deepcopy(mine) == mine, datetime.now is datetime.now)
        print(type(now) is datetime, isinstance(mine, datetime), datetime.max, date.fromisoformat("2026-11-21"))
        print(abs((datetime.now() - now).total_seconds()) < 60, now.date() <= date.today())
        try:
            datetime.now("UTC")
        except TypeError as error:
            print(error)
        found = []
        thread = threading.Thread(target=lambda: found.append(datetime.now() >= now))  # a clock of its own
        thread.start()
        thread.join()
        print(len(found))
        """
    as_python(flow, source)
