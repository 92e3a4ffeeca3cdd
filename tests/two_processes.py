"""Transformations replayed in two processes of two CPU devices each, over gloo.

`replay_all` launches the processes once for all cases of `CASES` and returns what every
replica's parameters were. A module takes part by naming a function below that returns
`{name: (tx, params, grads, extra)}`, with `grads` and `extra` [T, 4, ...] as for
`contexts.replay`; a fifth element, a tuple of `STYLES`, says how to place the state
where it is not to be the one that `styles_of` finds.
"""

import contextlib
import importlib
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optx_sync as oxs
from optx_sync import by_hand, runtime
from tests import contexts, scripts

CASES = (
    "tests.replicas.test_cross_shard:process_cases",
    "tests.replicas.test_sync_replicas:process_cases",
    "tests.center.test_lockstep:process_cases",
)
# All under check_vma=True: everything stacked; counters and center replicated;
# parameters and state replicated (equal on all replicas) with `P()` in and out.
STYLES = ("shard_map", "shard_map_axes", "replicated")
PROCESSES = 2
SECONDS = 300


def cases():
    """{"module:function name": case} of all registered modules."""
    found = {}
    for entry in CASES:
        module, function = entry.split(":")
        for name, case in getattr(importlib.import_module(module), function)().items():
            found[f"{module} {name}"] = case
    return found


def styles_of(tx, params, grads, extra, styles=None):
    """The style of a case: with axes where these say something, else stacked."""
    if styles is not None:
        return styles
    axes = by_hand.state_axes(tx, params)
    marks = jax.tree.leaves(axes, is_leaf=lambda x: x is None)
    return STYLES[1:2] if None in marks else STYLES[:1]


def replicated(tx, over, axis_name=contexts.AXIS):
    """The body of `contexts.steps` with equal parameters and state on all replicas."""

    def local(params, state, grads, extra):
        grads, extra = by_hand.first((grads, extra))
        return contexts.steps(tx)(params, state, grads, extra)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=over,
            in_specs=(P(), P(), P(axis_name), P(axis_name)),
            out_specs=P(),
        )
    )


def front_door(mesh):
    """A run by `Workers`, with keys, batches and measures; what it gives, by names."""
    workers = oxs.Workers(contexts.REPLICAS, contexts.AXIS, mesh=mesh)
    tx = oxs.diloco(
        optax.sgd(0.1, 0.9), contexts.AXIS, communication_period=2, measure=True
    )

    @workers.step(state=3)
    def step(params, state, key, x, noise):
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.5, x.shape)
        x = x + jax.random.normal(noise, x.shape)

        def loss_of(params):
            return jnp.mean((jnp.where(kept, x, 0.0) @ params["w"] - 1.0) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return *oxs.apply_gradients(tx, grads, state, params), key, loss

    params, key = {"w": np.ones(3, np.float32)}, jax.random.key(7)
    now, losses = workers.start((params, tx.init(params), key)), []
    x = np.linspace(-1, 1, 8 * 3, dtype=np.float32).reshape(8, 3)
    for number in range(5):
        *now, loss = step(*now, x, key)
        losses.append(loss)
        if number == 2:  # arrays of one's own: each process reads their counters
            now = jax.tree.map(jnp.copy, now)
    now = tuple(now)
    found = {
        "params": now[0]["w"],
        "losses": jnp.stack(losses),
        "center": workers.center(now)["w"],
        "first": workers.first(now)[0]["w"],
        "distance": workers.metrics(now).distance,
        "keys": jax.random.key_data(workers.keys(key)),
        "own keys": jax.random.key_data(now[2]),
    }
    found = multihost_utils.process_allgather(found, tiled=True)
    return {name: np.asarray(x) for name, x in found.items()}


def of_ones_own(number, folder):
    """Numbers that are in no state, and of which process 1 has others: what is said."""
    workers = oxs.Workers(contexts.REPLICAS, contexts.AXIS, mesh=contexts.mesh())
    state = workers.start({"w": np.ones(3, np.float32)})
    said = [
        workers.fingerprint(state, also={"rate": 0.1, "betas": np.array([0.9, 0.99])})
    ]
    said += [workers.fingerprint(state, also={"rate": 0.1 + number / 10, "k": 3})]
    also = {"rate": 0.1} | ({"decay": 0.01} if number else {})
    for different in ({"rate": 0.1 * (1 + number)}, also):
        try:
            oxs.elastic.Group(folder, workers, also=different)
        except ValueError as error:
            said += [str(error)]
    with oxs.elastic.Group(folder, workers, also={"rate": 0.1}) as group:
        said += [group.position]
    return said


def of_the_runtime(grouped):
    """A worker that is all processes: what each of them has, in rows."""
    rule, params = oxs.rules.diloco(), {"w": np.linspace(0, 1, 24, dtype=np.float32)}
    settings: Any = {"num_workers": 1, "communication_period": 4, "fragments": 2}
    settings |= {"delay": 1, "meet": runtime.quorum(1)}
    # Also in process 1, which does not ask it.
    server = connection = runtime.Server(params, rule, **settings)
    over = Mesh(jax.devices(), contexts.AXIS)
    if grouped:
        connection = runtime.GroupConnection(server, "127.0.0.1")
    worker = runtime.Worker(
        connection, params, oxs.optimizers.adam(0.1), rule,
        index=0, **settings,
    )  # fmt: skip
    worker.shard(NamedSharding(over, P(contexts.AXIS)))
    gradient = jax.jit(lambda params, t: jax.tree.map(lambda x: jnp.sin(x + t), params))
    refused = 0
    for t in (*np.arange(5, dtype=np.float32), np.float32(np.nan), *([1, 2, 3] * 3)):
        try:
            worker.step(gradient(worker.params, np.float32(t)))
        except runtime.PushRefused:
            refused += 1
            worker.pull()
    worker.land()
    params = multihost_utils.process_allgather(worker.params, tiled=True)
    heard = [refused, worker.rounds, server.global_step]
    worker.preempted = jax.process_index() == jax.process_count() - 1
    with contextlib.suppress(runtime.Preempted):
        while True:
            worker.step(gradient(worker.params, np.float32(1)))
    found = np.asarray(params["w"]), np.asarray([*heard, worker.local_step])
    return [np.atleast_2d(x) for x in multihost_utils.process_allgather(found)]


def replay_all():
    """{(case, style): the leaves of the history [T, 4, ...]}, by two processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        _launch(Path(folder), result)
        return pickle.loads(result.read_bytes())


def _launch(folder, result):
    children = scripts.launch(
        __name__, folder, PROCESSES, lambda number, port: (port, result, number)
    )
    end, codes = time.monotonic() + SECONDS, [None]
    # One that fails leaves the other waiting in a collective: look at all of them.
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
        codes = [child.poll() for child in children]
    for child in children:
        child.kill()
        child.wait()
    said = "\n".join(log.read_text() for log in folder.glob("*.log"))
    assert not any(codes) and None not in codes, f"{codes}, None never ended:\n{said}"


def _child(port, result, number):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", contexts.REPLICAS // PROCESSES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, number)
    found: dict[Any, Any] = {
        (name, style): jax.tree.leaves(_replay(style, *case[:4]))
        for name, case in cases().items()
        for style in styles_of(*case)
    }
    for name, x in front_door(contexts.mesh()).items():
        found["Workers", name] = [x]
    found["Worker", "runtime"] = of_the_runtime(True)
    found["of one's own"] = of_ones_own(number, Path(result).parent / "group")
    if number == 0:
        Path(result).write_bytes(pickle.dumps(found))


def _replay(style, tx, params, grads, extra):
    over = contexts.mesh()
    extra = {} if extra is None else extra
    grads, extra = contexts.by_replica((grads, extra))
    state = tx.init(jax.tree.map(np.asarray, params))
    if style == "replicated":
        run = replicated(tx, over)
        specs = (P(), P(), P(contexts.AXIS), P(contexts.AXIS))
    else:
        axes = by_hand.state_axes(tx, params) if style == "shard_map_axes" else None
        state_specs = P(contexts.AXIS)
        if axes is not None:
            state_specs = by_hand.state_specs(tx, params, P(), contexts.AXIS)
        state = by_hand.replicate(state, contexts.REPLICAS, axes)
        params = by_hand.replicate(params, contexts.REPLICAS)
        run = contexts.mapped(contexts.steps(tx), tx, params, axes, over, True)
        specs = (P(contexts.AXIS), state_specs, P(contexts.AXIS), P(contexts.AXIS))
    history, _ = run(*_place((params, state, grads, extra), specs, over))
    # [N, T, ...], or [T, ...] if replicated: from all processes to each of them.
    history = multihost_utils.process_allgather(history, tiled=True)
    if style == "replicated":
        return jax.tree.map(
            lambda x: np.stack([contexts._numpy(x)] * contexts.REPLICAS, axis=1),
            history,
        )
    return jax.tree.map(lambda x: np.swapaxes(contexts._numpy(x), 0, 1), history)


def _place(tree, specs, over):
    """Arrays over the devices of all processes; each process holds the whole here."""

    def place(spec, below):
        sharding = NamedSharding(over, spec)
        return jax.tree.map(lambda x: _global(x, sharding), below)

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def _global(x, sharding):
    local = np.asarray(x)
    return jax.make_array_from_callback(local.shape, sharding, lambda at: local[at])


if __name__ == "__main__":
    _child(*sys.argv[1:3], int(sys.argv[3]))
