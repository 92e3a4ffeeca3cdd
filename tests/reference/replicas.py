"""NumPy restatements of how replicas meet, float32, no JAX inside."""

import numpy as np


def reduce(x, reduction="mean", weight=None, groups=None):
    """[N, ...] -> [N, ...]: what each replica gets."""
    x = np.asarray(x, np.float32)
    result = np.empty_like(x)
    for group in groups or [list(range(len(x)))]:
        if weight is None:
            kept = x[group].astype(np.float64)
            value = kept.mean(0) if reduction == "mean" else kept.sum(0)
        else:
            own = [w for w in group if weight[w] != 0]
            total = sum(float(weight[w]) for w in own)
            value = sum(float(weight[w]) * x[w].astype(np.float64) for w in own)
            value = value / total if own else np.zeros_like(x[0])
        result[group] = value
    return result


def momentum(params, grads, learning_rate, decay):
    """Parameters after each step, [T, ...], for gradients [T, ...]."""
    trace = np.zeros_like(params)
    history = []
    for grad in np.asarray(grads, np.float32):
        trace = grad + np.float32(decay) * trace
        params = params - np.float32(learning_rate) * trace
        history.append(params)
    return np.stack(history)
