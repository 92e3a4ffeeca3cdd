"""NumPy restatements of synchronous replicas: in lockstep, and the original machine.

No JAX inside. Sums are float32 in the order of the replicas.
"""

import numpy as np

OUTCOMES = ("used", "stale", "nonfinite", "not_contributed", "no_token")


def decide(required, contributes, lag, finite):
    """(outcome [T, N] of OUTCOMES, complete [T], global_step [T] after each step).

    Step by step: `lag` [T, N] is how old a gradient is, in updates.
    """
    steps, replicas = contributes.shape
    outcome = np.empty((steps, replicas), int)
    complete = np.zeros(steps, bool)
    global_step = np.empty(steps, int)
    accumulated = step = 0
    for t in range(steps):
        tokens = max(replicas, required) - accumulated
        for place in range(replicas):  # another one is first in each update
            w = (step + place) % replicas
            if not contributes[t, w]:
                name = "not_contributed"
            elif lag[t, w] > 0:
                name = "stale"
            elif not finite[t, w]:
                name = "nonfinite"
            elif tokens == 0:
                name = "no_token"
            else:
                name = "used"
                tokens -= 1
                accumulated += 1
            outcome[t, w] = OUTCOMES.index(name)
        if accumulated >= required:
            complete[t] = True
            accumulated = 0
            step += 1
        global_step[t] = step
    return outcome, complete, global_step


def momentum(param, grads, used, weights, complete, learning_rate, decay):
    """The parameter after each step, [T, ...], for gradients [T, N, ...].

    The mean is sum w_i g_i / sum w_i over the gradients that were used.
    """
    param, trace = np.array(param, np.float32), np.zeros_like(param)
    waiting, weight, history = [], np.float32(0), []
    for grad, of_step, w, now in zip(grads, used, weights, complete, strict=True):
        waiting += [own * g for own, g in zip(w[of_step], grad[of_step], strict=True)]
        weight += np.sum(w[of_step], dtype=np.float32)
        if now:
            mean = np.sum(waiting, axis=0, dtype=np.float32) / weight
            trace = np.float32(decay) * trace + mean
            param = param - np.float32(learning_rate) * trace
            waiting, weight = [], np.float32(0)
        history.append(param)
    return np.stack(history)


def momentum_rows(
    table, indices, values, used, weights, complete, learning_rate, decay
):
    """The same for rows [T, N, k]: each row's own mean, touched rows only."""
    table, trace = np.array(table, np.float32), np.zeros_like(table)
    sums, divisors = np.zeros_like(table), np.zeros(len(table), np.float32)
    history = []
    for of_indices, of_values, of_step, of_weights, now in zip(
        indices, values, used, weights, complete, strict=True
    ):
        for rows, row_values, weight in zip(
            of_indices[of_step], of_values[of_step], of_weights[of_step], strict=True
        ):
            for row, value in zip(rows, row_values, strict=True):
                if 0 <= row < len(table):
                    sums[row] += weight * value
            divisors[[r for r in set(rows.tolist()) if 0 <= r < len(table)]] += weight
        if now:
            touched = divisors > 0
            mean = sums[touched] / divisors[touched][:, None]
            trace[touched] = np.float32(decay) * trace[touched] + mean
            table = table.copy()
            table[touched] -= np.float32(learning_rate) * trace[touched]
            sums, divisors = np.zeros_like(sums), np.zeros_like(divisors)
        history.append(table)
    return np.stack(history)


def moving_average(param, history, complete, global_step, decay):
    """The average after each step, moved after each update by the new step's decay."""
    average, averages = np.array(param, np.float32), []
    for now, param, step in zip(complete, history, global_step, strict=True):
        if now:
            rate = np.float32(1) - np.float32(decay(step))
            average = average - rate * (average - param)
        averages.append(average)
    return np.stack(averages)


def machine(schedule, required, workers, tokens, global_step=0):
    """The original's bookkeeping for each event, with a queue that is a queue."""
    queue = [global_step] * tokens
    local, waiting = [global_step] * workers, []
    count, record = 0, []
    for worker in schedule:
        accepted = updated = False
        if worker not in waiting:
            accepted = local[worker] >= global_step
            count += accepted
            waiting.append(worker)
            if count >= required:
                updated, count = True, 0
                global_step += 1
                queue += [global_step] * max(workers, required)
            while queue and waiting:
                local[waiting.pop(0)] = queue.pop(0)
        blocked = [w in waiting for w in range(workers)]
        record.append(
            (accepted, updated, blocked, list(local), len(queue), global_step)
        )
    names = ("accepted", "updated", "blocked", "local_step", "tokens", "global_step")
    return {
        n: np.array(x) for n, x in zip(names, zip(*record, strict=True), strict=True)
    }
