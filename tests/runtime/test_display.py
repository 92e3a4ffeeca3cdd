"""What is shown while a run goes on."""

import io

from rich.console import Console

from optx_sync.runtime import Event, History
from optx_sync.runtime.ray import table


def event(kind, worker, step, rounds=0, **shown):
    return Event(kind, worker, rounds, 10 * rounds, step, 2, float(step), shown)


def test_table_tells_steps_rounds_staleness_and_what_is_shown():
    pushes = {0: event("push", 0, 6, 3, loss=0.25), 2: event("push", 2, 7, 4)}
    events = [event("join", 0, 0), event("lost", 2, 5), *pushes.values()]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(3, pushes, events))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = [line.replace("│", " ").split() for line in lines if "│" in line]
    assert "center: step 7" in lines[0]
    assert rows == [
        ["0", "30", "3", "2", "0", "0.25"],
        ["1", "starting"],
        ["2", "40", "4", "2", "1"],
    ]


def test_history_counts_by_kind_and_worker():
    history = History(
        [event("push", 0, 1), event("push", 1, 2), event("join", 0, 0)], 0
    )
    assert history.count("push") == 2
    assert history.count("push", 1) == 1 and history.count("lost") == 0
