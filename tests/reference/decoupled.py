"""NumPy: decoupled workers, second by second, with whole seconds for everything."""

from typing import Any

import numpy as np


def decoupled(
    start,
    gradient,
    seconds,
    *,
    until,
    k,
    grace,
    between,
    delay,
    latency,
    failures,
    tokens,
    rate=0.1,
    outer_rate=0.7,
    momentum=0.9,
):
    """(center [P, ...], meetings as (second, part, who came), late as (second, who)).

    `start` is [P, ...], a part each; `gradient(worker, params, step)` is that of a step
    by its number among all; a contribution of steps s and tokens n weighs n**2 / s.
    """
    parts, workers = len(start), range(len(seconds))
    center, trace = np.array(start), np.zeros_like(start)
    version, open_since = [0] * parts, [0] * parts
    come: Any = [{} for _ in range(parts)]
    closes: Any = [None] * parts
    meetings, lates, messages, made = [], [], [], 0
    alive, left, life = (
        [True] * len(seconds),
        [False] * len(seconds),
        [0] * len(seconds),
    )
    x = [np.array(start) for _ in workers]
    anchor = [np.array(start) for _ in workers]
    then = [np.array(start) for _ in workers]  # when it sent
    known = [[0] * parts for _ in workers]
    age = [[0] * parts for _ in workers]
    fresh = [[0] * parts for _ in workers]  # the worker's step when it took the part
    on_way = [{} for _ in workers]  # part: the worker's step when it sent
    mail = [{} for _ in workers]  # part: (version, values)
    asked = [{} for _ in workers]
    since, local, ends = [0] * len(seconds), [0] * len(seconds), list(seconds)

    def send(second, w, what, *content):
        messages.append((second + latency, life[w], w, what, content))

    def full(part, second):
        present = {w for w, gone in enumerate(left) if not gone}
        if present <= set(come[part]):
            closes[part] = second
        elif closes[part] is None and len(come[part]) >= max(1, min(k, len(present))):
            spare = delay * min(seconds[w] for w in come[part])
            spare -= second - open_since[part] + 2 * latency
            closes[part] = second + max(0, grace * spare)

    def take(w):
        for p in sorted(mail[w]):
            if local[w] - on_way[w][p] >= delay:
                known[w][p], values = mail[w].pop(p)
                sent = on_way[w].pop(p)
                late = local[w] - sent > delay
                x[w][p] = values + (x[w][p] - then[w][p] if late else 0)
                anchor[w][p] = values
                fresh[w][p] = local[w]

    for second in range(until + 1):
        for w, dies, back in failures:
            if second == dies:
                alive[w], left[w], life[w], ends[w] = (
                    False,
                    back > until,
                    life[w] + 1,
                    None,
                )
                for p in range(parts):
                    if come[p]:
                        full(p, second)
            if second == back:
                alive[w], since[w], known[w], age[w] = (
                    True,
                    0,
                    list(version),
                    [0] * parts,
                )
                on_way[w], mail[w] = {}, {}
                asked[w] = {p: version[p] for p in range(parts) if come[p]}
                x[w], anchor[w] = np.array(center), np.array(center)
                ends[w] = second + latency + seconds[w]
        for w in workers:
            if not alive[w] or ends[w] != second:
                continue
            x[w] = x[w] - rate * gradient(w, x[w], made)
            made, local[w], since[w] = made + 1, local[w] + 1, since[w] + 1
            age[w] = [a + 1 for a in age[w]]
            take(w)
            p = int(np.argmin(known[w]))
            wanted = asked[w].get(p, -1) >= known[w][p] or since[w] >= between
            if wanted and not on_way[w] and fresh[w][p] < local[w]:
                weight = (age[w][p] * tokens[w]) ** 2 / age[w][p]
                send(second, w, "push", p, known[w][p], anchor[w][p] - x[w][p], weight)
                on_way[w][p], since[w], age[w][p] = local[w], 0, 0
                then[w][p] = x[w][p]
            ends[w] = second + seconds[w] if delay or not on_way[w] else None
        due = [m for m in messages if m[0] == second]
        for _, of, w, what, content in due:
            if what != "push" or life[w] != of:
                continue
            p, at, moved, weight = content
            if at < version[p]:
                lates.append((second, w))
                send(second, w, "answer", p, version[p], np.array(center[p]))
                continue
            if not come[p]:
                open_since[p] = second
                for other in workers:
                    if other != w and alive[other]:
                        send(second, other, "ask", p, version[p])
            come[p][w] = (moved, weight, life[w])
            full(p, second)
        for p in range(parts):
            # Grace may end between two seconds: nothing else happens there.
            if closes[p] is None or closes[p] >= second + 1:
                continue
            total = sum(weight for _, weight, _ in come[p].values())
            mean = sum(moved * weight for moved, weight, _ in come[p].values()) / total
            trace[p] = mean + momentum * trace[p]
            center[p] = center[p] - outer_rate * (mean + momentum * trace[p])
            version[p] += 1
            meetings.append((second, p, tuple(sorted(come[p]))))
            for w, (_, _, of) in come[p].items():
                if life[w] == of:
                    send(second, w, "answer", p, version[p], np.array(center[p]))
            come[p], closes[p] = {}, None
        for _, of, w, what, content in [m for m in messages if m[0] == second]:
            if life[w] != of:
                continue
            if what == "ask":
                asked[w][content[0]] = content[1]
            if what == "answer":
                mail[w][content[0]] = content[1:]
                if ends[w] is None:
                    take(w)
                    ends[w] = None if on_way[w] else second + seconds[w]
    return center, meetings, lates
