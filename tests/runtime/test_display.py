"""What is shown while a run goes on."""

import io
import logging
import math
import types

from ray.util import metrics as ray_metrics
from rich.console import Console

from optx_sync.runtime import Event, display
from optx_sync.runtime.display import Display, Seen, summary, table
from optx_sync.runtime.metrics import Metrics
from optx_sync.runtime.paces import Scores


def event(kind, worker, step, rounds=0, **shown):
    return Event(kind, worker, rounds, 10 * rounds, step, 2, float(step), shown)


def seen_of(events):
    seen = Seen()
    seen.add(list(events))
    return seen


def test_table_tells_steps_rounds_staleness_and_what_is_shown():
    pushes = {0: event("push", 0, 6, 3, loss=0.25), 2: event("push", 2, 7, 4)}
    events = [event("join", 0, 0), event("lost", 2, 5), *pushes.values()]
    # Joined and compiling; killed before its first push, its replacement starting.
    events += [event("join", 3, 0), event("join", 4, 0), event("lost", 4, 0)]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(5, seen_of(events)))
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


def test_the_line_above_the_table_may_be_wider_than_the_table():
    console = Console(file=io.StringIO(), width=80)
    far = 10**9  # steps of the center
    seen = seen_of([event("push", 0, far, 1), event("saved", -1, far)])
    console.print(table(1, seen, 10))
    assert isinstance(console.file, io.StringIO)
    head, *rows = console.file.getvalue().splitlines()
    assert head.strip() == seen.head(1, 10) and len(head.strip()) > len(rows[0])


def test_a_million_events_are_counted_and_not_kept():
    seen, pushes = Seen(), [event("push", i % 3, i) for i in range(1000)]
    seen.add([event("lost", 2, 0)])
    for _ in range(1000):
        seen.add(pushes)
    history = seen.history(None)
    assert len(history.events) == display.KEPT == 100_000
    assert history.count("push") == 1_000_000 and history.count("lost", 2) == 1
    assert history.count("push", 1) == 333_000 and history.count("lost", 1) == 0


def test_without_a_terminal_there_are_lines_on_the_log(caplog, monkeypatch):
    monkeypatch.setattr(display, "LINE_SECONDS", math.inf)
    caplog.set_level(logging.INFO, "optx_sync.runtime")
    pushes = {0: event("push", 0, 6, 3, loss=0.25)}
    died = event("lost", 1, 6)._replace(message="killed for memory")
    with Display(2) as shown:
        seen = seen_of(pushes.values())
        for _ in range(3):  # Not a line for each push: there may be thousands a second.
            shown.show(seen, [*pushes.values()])
        shown.show(seen, [died])
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "center: step 6; worker 0: 30 steps, 3 rounds, staleness 2, loss 0.25; "
        "worker 1: starting",
        "worker 1 died: killed for memory",
    ]
    assert "and 4 more" in summary(12, Seen())
    # How fast, how much, how long, and what is safe.
    clock, seen = types.SimpleNamespace(monotonic=lambda: 100.0), Seen()
    monkeypatch.setattr(display, "time", clock)
    seen.add([event("restored", -1, 40), event("push", 0, 40, 4)])
    assert summary(2, seen, 100).startswith("center: step 40, 20 %; worker 0:")
    clock.monotonic = lambda: 102.0
    seen.add([event("push", 0, 41, 5), event("push", 1, 42, 5), event("saved", -1, 42)])
    line = "center: step 42, 5 steps a second, 50 %, 0:00:20 left, saved at step 42;"
    assert summary(2, seen, 100).startswith(line)
    said = "the center at step 42, saved at step 42 in runs/1, 1 times"
    assert said in seen.closing(2.0, "runs/1")
    # Who has ended before makes no more steps.
    seen.add([event("left", 1, 42, 5)])
    assert "center: step 42, 5 steps a second, 66 %" in summary(2, seen, 100)
    # A worker that dies has not pushed for some time: the center is further on.
    late = summary(2, seen_of([*pushes.values(), event("lost", 1, 2)]))
    assert late.startswith("center: step 6;")


def test_neither_a_start_nor_what_a_run_resumed_counts_as_speed(monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(display, "time", clock)
    seen = seen_of([])
    # Processes start and programs compile for half a minute; two are far on already.
    joins = [event("join", worker, 0)._replace(local_step=90) for worker in (0, 1)]
    for now, new in (
        (20.0, [*joins, event("left", 2, 0)._replace(local_step=100)]),
        (25.0, [event("push", 0, 1, 9)._replace(local_step=92, time=25.0)]),
        (26.0, [event("push", 1, 2, 9)._replace(local_step=92, time=26.0)]),
        (27.0, [event("push", 0, 3, 10)._replace(local_step=96, time=27.0)]),
    ):
        clock.monotonic = lambda now=now: now
        seen.add(new)
        if now == 20.0:
            assert seen.head(3, 100) == "center: step 0, 93 %"
    assert seen.head(3, 100) == "center: step 3, 2 steps a second, 96 %, 0:00:06 left"
    said = seen.closing(30.0, None)
    assert said.startswith("3 pushes in 30 s, from the first one on 1 a second, the ")


def test_in_a_terminal_there_remains_what_was_said(monkeypatch):
    """Warnings, where it saved and how it ended stand above the table, which goes."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("rich.console.Console", lambda: console)
    monkeypatch.setattr(
        display.log, "propagate", False
    )  # As without pytest's handlers.
    with Display(1) as shown:
        shown.show(seen_of([event("saved", -1, 4)]), [event("lost", 0, 4)])
        display.log.info("The run has ended: at step 4")
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "worker 0 died" in said and "The run has ended: at step 4" in said
    assert not display.log.handlers


def test_metrics_tell_what_the_servers_tell(monkeypatch):
    """What Ray's own are told; the guide says where they can be looked up."""
    told = {}

    def listen(kind, method):
        def hear(metric, value, tags):
            key = (metric.info["name"], tags["worker"], tags.get("server"))
            told.setdefault(key, []).append(value)

        monkeypatch.setattr(kind, method, hear)

    listen(ray_metrics.Counter, "inc")
    listen(ray_metrics.Gauge, "set")
    listen(ray_metrics.Histogram, "observe")
    metrics = Metrics()
    push = event("push", 0, 6, 3)._replace(seconds=0.25, bytes=80, pulled=40)
    counted = ("refused", "retry", "dropped", "lost", "restored", "unsaved")
    metrics.add(0, [push._replace(round=2), push, event("rolled_back", 0, 7)])
    metrics.rate({0: Scores(0.5, 0.75)})
    metrics.add(1, [event(kind, 2, 0) for kind in counted])
    of_worker = {name: values for (name, *of), values in told.items() if of[0] == "0"}
    assert of_worker == {
        "optx_sync_steps": [30],
        "optx_sync_rounds": [3],
        "optx_sync_staleness": [2],
        "optx_sync_push_bytes": [80],
        "optx_sync_pull_bytes": [40],
        "optx_sync_exchange_seconds": [0.25, 0.25],
        "optx_sync_lost_pushes_total": [2],
        "optx_sync_relative_score": [0.5],
        "optx_sync_individual_score": [0.75],
    }
    for kind in counted:
        assert told[f"optx_sync_{kind}_total", "2", "1"] == [1]
