"""NumPy restatements of how workers meet a center, float32, no JAX inside."""

from typing import Any

import numpy

# Pyright would go through NumPy's overloads for half a minute: loops assign to all.
np: Any = numpy
F = np.float32


def momentum(learning_rate, decay=0.0, nesterov=False):
    """SGD as (start, step): the worker's optimizer of the recurrences below."""

    def start(x):
        return np.zeros(np.shape(x), F)

    def step(grad, trace):
        trace = grad + F(decay) * trace
        direction = grad + F(decay) * trace if nesterov else trace
        return -F(learning_rate) * direction, trace

    return start, step


def lockstep(
    rule,
    x0,
    grads,
    inner,
    *,
    period,
    rate=None,
    rho=0.0,
    outer: tuple = (),
    mean=True,
    inner_state="keep",
    broken=None,
    weights=None,
):
    """Workers' parameters [T, N, ...] and centers [T, ...] for gradients [T, N, ...].

    `rule` is "elastic", "agn", "agn_updates", "local_sgd" or "diloco"; `period` is a
    function of the 0-based step; `broken` bool[T, N] says whose step brings a NaN
    (though `grads` has none): it stands still until the next round, without it.
    `weights` [T, N] are those of contributions to a round in each step. The workers'
    dtype is that of `x0`: half precision parameters, gradients and updates are
    rounded to it, all else is float32.
    """
    dtype = np.asarray(x0).dtype

    def rounded(value):
        return value.astype(dtype).astype(F)

    grads = np.asarray(grads)
    workers = grads.shape[1]
    start, step = inner
    x = np.stack([np.asarray(x0).astype(F)] * workers)
    c, taken = x[0], x[0]
    slots = start(x)
    outer_slots = outer[0](c) if outer else None
    total = np.zeros_like(x)
    out = np.zeros((workers, *(1,) * np.ndim(x0)), bool)
    since = 0
    history, centers = [], []
    for t, grad in enumerate(grads.astype(F)):
        if rho:
            grad = rounded(grad + F(rho) * (x - taken))
        update, slots = step(grad, slots)
        update = rounded(update)
        if broken is not None:
            out = out | broken[t].reshape(out.shape)
        x = np.where(out, x, rounded(x + update))
        total = total + (update if rule == "agn_updates" else grad)
        since += 1
        if since >= period(t):
            weight = np.where(out, F(0), F(1))
            if weights is not None:
                weight = weight * F(weights[t]).reshape(out.shape)
            came = F(max((weight > 0).sum(), 1))
            # Of weights that are 0 or 1 the sums are those of who is in the round.
            weight = weight * came / (weight.sum() or F(1))

            def pushed(values, weight=weight):
                return np.where(weight == 0, F(0), weight * values).sum(0)

            if rule == "elastic":
                pull = F(rate) * (x - c)
                taken, before, c = c, x, c + pushed(pull)
                x = before - pull
            elif weight.any():
                if rule == "local_sgd":
                    c = c + pushed(x - c) / came
                elif rule == "diloco":
                    update, outer_slots = outer[1](pushed(c - x) / came, outer_slots)
                    c = c + update
                else:
                    mean_of = pushed(total / F(since)) / (came if mean else F(1))
                    if rule == "agn_updates":
                        c = c + mean_of
                    else:
                        update, outer_slots = outer[1](mean_of, outer_slots)
                        c = c + update
            if rule != "elastic":
                x = np.stack([c] * workers)
            if inner_state == "average" and weight.any():
                slots = np.stack([pushed(slots) / came] * workers)
            elif inner_state == "reset":
                slots = start(x)
            x = rounded(np.where(out, c, x))
            slots = np.where(out, F(0), slots)
            total, out, since = np.zeros_like(x), np.zeros_like(out), 0
        history.append(x)
        centers.append(c)
    return np.stack(history), np.stack(centers)


def nested(levels, x0, grads, learning_rate):
    """Parameters [T, n0, n1, ..., *shape] of rules inside of rules, plain SGD inside.

    `levels` are (rule, period, rate, rho), the outermost first, one for each axis in
    front of `x0`; `rate` is the moving rate of "elastic" and the learning rate at the
    center of "agn" and "diloco". `grads` [T, n0, n1, ..., *shape].
    """
    x = np.asarray(x0, F)
    centers = [x.take(0, axis) for axis in range(len(levels))]
    taken, totals = list(centers), [np.zeros_like(x) for _ in levels]
    history = []

    def meet(rule, rate, axis, steps):
        """Parameters and center after a round along an axis."""
        center = centers[axis]
        apart = x - np.expand_dims(center, axis)
        if rule == "elastic":
            return x - F(rate) * apart, center + F(rate) * apart.sum(axis)
        if rule == "agn":
            change = -F(rate) * (totals[axis] / F(steps)).mean(axis)
        else:
            change = apart.mean(axis) * (F(rate) if rule == "diloco" else F(1))
        center = center + change
        return np.broadcast_to(np.expand_dims(center, axis), x.shape), center

    for t, grad in enumerate(np.asarray(grads, F)):
        for axis, (_, _, _, rho) in enumerate(levels):
            totals[axis] = totals[axis] + grad
            grad = grad + F(rho) * (x - np.expand_dims(taken[axis], axis))
        x = x - F(learning_rate) * grad
        for axis in reversed(range(len(levels))):
            rule, period, rate, _ = levels[axis]
            if (t + 1) % period:
                continue
            before, old = x, centers[axis]
            x, centers[axis] = meet(rule, rate, axis, period)
            taken[axis] = old if rule == "elastic" else centers[axis]
            totals[axis] = np.zeros_like(x)
            for within in range(axis + 1, len(levels)):
                change = (x - before).mean(within)
                centers[within] = centers[within] + change
                taken[within] = taken[within] + change
        history.append(x)
    return np.stack(history)


def in_fragments(
    rule,
    x0,
    grads,
    inner,
    owner,
    *,
    period,
    overlap=False,
    rate=None,
    outer: tuple = (),
    broken=None,
):
    """Parameters [T, N, D] and centers [T, D] for x0 [D] and gradients [T, N, D].

    `owner` int[D] says to which part a number belongs; one of them meets every
    `period / parts` steps. With `overlap` it does so in the step after: it brings what
    workers had before that step, whose update of the part is overwritten. Rules and the
    other arguments are those of `lockstep`.
    """
    owner, grads = np.asarray(owner), np.asarray(grads, F)
    parts = owner.max() + 1
    between = period // parts
    workers = grads.shape[1]
    start, step = inner
    x = np.stack([np.asarray(x0, F)] * workers)
    c = x[0]
    slots, outer_slots = start(x), outer[0](c) if outer else None
    total, summed = np.zeros_like(x), np.zeros(parts, int)
    out = np.zeros((workers, 1), bool)
    since, exchanges, waits = 0, 0, None
    history, centers = [], []

    def bring(x, c, total, out, part, steps):
        """(whose numbers they are, their sum or mean, how many have come)."""
        if rule == "elastic":
            sent = F(rate) * (x - c)
        elif rule == "agn":
            sent = total / F(steps)
        else:
            sent = c - x if rule == "diloco" else x - c
        came = workers - out.sum()
        sent = np.where(out, F(0), sent).sum(0)
        if rule != "elastic":
            sent = sent / F(max(came, 1))
        of = owner == part
        return of, np.where(of, sent, F(0)), came

    def land(x, c, outer_slots, of, arrived, came):
        new = c
        if rule == "elastic":
            new = c + arrived
            x = np.where(of, x - F(rate) * (x - c), x)
        elif came:
            if rule in ("diloco", "agn"):
                update, changed = outer[1](arrived, outer_slots)
                outer_slots = np.where(of, changed, outer_slots)
                new = c + update
            else:
                new = c + arrived
        c = np.where(of, new, c)
        if rule != "elastic":
            x = np.where(of, c, x)
        return x, c, outer_slots

    for t, grad in enumerate(grads):
        restarts, brought = out, None
        if waits is not None:
            brought = bring(x, c, total, out, *waits)
            total = np.where(brought[0], F(0), total)
        update, slots = step(grad, slots)
        if broken is not None:
            out = out | broken[t][:, None]
        x = np.where(out, x, x + update)
        total = total + grad
        since, summed = since + 1, summed + 1
        part, due = exchanges % parts, since == between
        if due and not overlap:
            brought, restarts = bring(x, c, total, out, part, summed[part]), out
            total = np.where(brought[0], F(0), total)
        if brought is not None:
            x, c, outer_slots = land(x, c, outer_slots, *brought)
            x, slots, total = (
                np.where(restarts, value, now)
                for value, now in ((c, x), (F(0), slots), (F(0), total))
            )
            out = out & ~restarts
        waits = (part, summed[part]) if due and overlap else None
        if due:
            summed[part] = 0
            since, exchanges = 0, exchanges + 1
        history.append(x)
        centers.append(c)
    return np.stack(history), np.stack(centers)
