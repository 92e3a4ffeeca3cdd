"""What is shown while a run goes on."""

import io
import logging

from rich.console import Console

from optx_sync.runtime import Event, History
from optx_sync.runtime.display import Display, summary, table


def event(kind, worker, step, rounds=0, **shown):
    return Event(kind, worker, rounds, 10 * rounds, step, 2, float(step), shown)


def test_table_tells_steps_rounds_staleness_and_what_is_shown():
    pushes = {0: event("push", 0, 6, 3, loss=0.25), 2: event("push", 2, 7, 4)}
    events = [event("join", 0, 0), event("lost", 2, 5), *pushes.values()]
    # Joined and compiling; killed before its first push, its replacement starting.
    events += [event("join", 3, 0), event("join", 4, 0), event("lost", 4, 0)]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(5, pushes, events))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = [line.replace("│", " ").split() for line in lines if "│" in line]
    assert "center: step 0" in lines[0]
    assert rows == [
        ["0", "30", "3", "2", "0", "0.25"],
        ["1", "starting", "0"],
        ["2", "40", "4", "2", "1"],
        ["3", "joined", "0"],
        ["4", "starting", "1"],
    ]


def test_history_counts_by_kind_and_worker():
    history = History(
        [event("push", 0, 1), event("push", 1, 2), event("join", 0, 0)], 0
    )
    assert history.count("push") == 2
    assert history.count("push", 1) == 1 and history.count("lost") == 0


def test_without_a_terminal_there_are_lines_on_the_log(caplog):
    caplog.set_level(logging.INFO, "optx_sync.runtime")
    pushes = {0: event("push", 0, 6, 3, loss=0.25)}
    died = event("lost", 1, 6)._replace(message="killed for memory")
    with Display(2) as display:
        for _ in range(3):  # Not a line for each push: there may be thousands a second.
            display.show(pushes, [*pushes.values()], [*pushes.values()])
        display.show(pushes, [*pushes.values(), died], [died])
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "center: step 6; worker 0: 30 steps, 3 rounds, staleness 2, loss 0.25; "
        "worker 1: starting",
        "worker 1 died: killed for memory",
    ]
    assert "and 4 more" in summary(12, {}, [])
