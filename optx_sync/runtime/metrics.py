# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run for Ray's dashboard and Prometheus."""

from collections.abc import Mapping

from optx_sync.runtime.messages import Event
from optx_sync.runtime.paces import Scores
from optx_sync.runtime.system import here

# By name: the field of an event, and what it says.
GAUGES = {
    "steps": ("local_step", "Steps of a worker"),
    "rounds": ("round", "Pushes of a worker that were applied"),
    "staleness": ("staleness", "The other workers' rounds between its last two"),
    "push_bytes": ("bytes", "Bytes of a worker's last push, to all servers"),
    "pull_bytes": ("pulled", "Bytes of this server's answer to it"),
}
SCORES = {
    "relative_score": "A worker's pace beside the others' median; 0.5: half as fast",
    "individual_score": "A worker's pace beside its own best since it has joined",
}
COUNTERS = {
    "refused": "Pushes that were refused",
    "retry": "Pushes that came again, and were answered and not applied",
    "dropped": "Gradients that were stale",
    "lost": "Deaths of a worker",
    "restored": "Times that a server came back from a checkpoint",
    "unsaved": "Checkpoints that could not be written",
    "lost_pushes": "Pushes that went with a server",
}
SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]


class Metrics:
    """Counters and gauges per worker and server; their names begin with optx_sync.

    They are updated in the process that collects the events, so no exchange waits for
    them.
    """

    def __init__(self):
        metrics, keys = here().ray().util.metrics, ("worker", "server")
        self._gauges = {
            name: metrics.Gauge(f"optx_sync_{name}", description=what, tag_keys=keys)
            for name, (_, what) in GAUGES.items()
        }
        self._scores = [
            metrics.Gauge(f"optx_sync_{name}", description=what, tag_keys=keys[:1])
            for name, what in SCORES.items()
        ]
        self._counters = {
            name: metrics.Counter(
                f"optx_sync_{name}_total", description=what, tag_keys=keys
            )
            for name, what in COUNTERS.items()
        }
        self._seconds = metrics.Histogram(
            "optx_sync_exchange_seconds",
            description="Seconds of an exchange, as the worker measures it",
            boundaries=SECONDS,
            tag_keys=keys,
        )

    def add(self, server: int, events: list[Event]) -> None:
        """Count events of a server."""
        last: dict[int, Event] = {}
        for event in events:
            tags = {"worker": str(event.worker), "server": str(server)}
            if event.kind in self._counters:
                self._counters[event.kind].inc(1, tags=tags)
            if event.kind == "rolled_back":
                self._counters["lost_pushes"].inc(event.staleness, tags=tags)
            if event.kind in ("push", "dropped"):
                last[event.worker] = event
                if event.seconds > 0:
                    self._seconds.observe(event.seconds, tags=tags)
        for worker, event in last.items():
            tags = {"worker": str(worker), "server": str(server)}
            for name, (field, _) in GAUGES.items():
                self._gauges[name].set(getattr(event, field), tags=tags)

    def rate(self, scores: Mapping[int, Scores]) -> None:
        """Show how fast workers are."""
        for worker, of in scores.items():
            for gauge, score in zip(self._scores, of, strict=True):
                gauge.set(score, tags={"worker": str(worker)})
