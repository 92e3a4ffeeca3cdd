"""NumPy restatements of how workers meet a center, float32, no JAX inside."""

import numpy as np

F = np.float32


def momentum(learning_rate, decay=0.0, nesterov=False):
    """SGD as (start, step): the worker's optimizer of the recurrences below."""

    def start(x):
        return np.zeros_like(x)

    def step(x, grad, trace):
        trace = grad + F(decay) * trace
        direction = grad + F(decay) * trace if nesterov else trace
        return x - F(learning_rate) * direction, trace

    return start, step


def lockstep(
    rule, x0, grads, inner, *, period, rate=None, rho=0.0, outer=None, mean=True
):
    """Workers' parameters [T, N, ...] and centers [T, ...] for gradients [T, N, ...].

    `rule` is "elastic", "agn", "agn_updates", "local_sgd" or "diloco"; `period` is a
    function of the 0-based step.
    """
    workers = len(grads[0])
    start, step = inner
    x = np.stack([np.asarray(x0, F)] * workers)
    c, taken = np.array(x0, F), np.array(x0, F)
    slots = start(x)
    outer_slots = outer[0](c) if outer else None
    total = np.zeros_like(x)
    since = 0
    history, centers = [], []
    for t, grad in enumerate(np.asarray(grads, F)):
        if rho:
            grad = grad + F(rho) * (x - taken)
        before = x
        x, slots = step(x, grad, slots)
        total = total + (x - before if rule == "agn_updates" else grad)
        since += 1
        if since >= period(t):
            if rule == "elastic":
                taken = c
                pull = F(rate) * (x - c)
                x, c = x - pull, c + pull.sum(0)
            else:
                if rule in ("local_sgd", "diloco"):
                    pushed = (x - c) / F(workers)
                else:
                    pushed = total / F(since) / (F(workers) if mean else F(1))
                pushed = pushed.sum(0)
                if rule in ("local_sgd", "agn_updates"):
                    c = c + pushed
                else:
                    sign = F(-1) if rule == "diloco" else F(1)
                    c, outer_slots = outer[1](c, sign * pushed, outer_slots)
                x = np.stack([c] * workers)
            total, since = np.zeros_like(x), 0
        history.append(x)
        centers.append(c)
    return np.stack(history), np.stack(centers)
