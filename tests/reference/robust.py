"""Robust rules in NumPy, from their definitions: v is [n, D], those that count."""

import itertools

import numpy as np


def median(v):
    return np.median(v, axis=0)


def trimmed_mean(v, f):
    f = min(f, (len(v) - 1) // 2)
    return np.sort(v, axis=0)[f : len(v) - f].mean(axis=0)


def sign_majority(v):
    return np.sign(np.sign(v).sum(axis=0))


def distances(z, v):
    return np.linalg.norm(v - z, axis=1)


def geometric_median(v, steps=300):
    """By many smoothed steps: the least sum of distances, to about 1e-6."""
    z = np.median(v, axis=0)
    for _ in range(steps):
        weights = 1 / np.sqrt(distances(z, v) ** 2 + 1e-20)
        z = weights @ v / weights.sum()
    # Weiszfeld's algorithm creeps towards a minimum that is one of the points.
    return min([z, *v], key=lambda z: distances(z, v).sum())


def krum(v, f, m=None):
    n = len(v)
    f = min(f, max((n - 3) // 2, 0))
    scores = [
        sum(sorted(np.sum((v[i] - v[j]) ** 2) for j in range(n) if j != i)[: n - f - 2])
        if n - f - 2 > 0
        else 0.0
        for i in range(n)
    ]
    taken = n - f if m is None else min(m, n)
    last = sorted(scores)[taken - 1]
    chosen = [i for i in range(n) if scores[i] <= last * (1 + 1e-6)]
    return v[chosen].mean(axis=0)


def masks(n):
    """Every way in which some of n replicas count, [2^n, n]."""
    return np.array(list(itertools.product([False, True], repeat=n)))
