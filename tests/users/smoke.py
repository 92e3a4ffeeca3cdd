"""What an installation must do: eight wrappers, simulated and on a mesh, agree.

    python tests/users/smoke.py
    python tests/users/smoke.py diloco ftrl

Run it with the interpreter of an environment into which a wheel has gone; it needs
nothing but the extra `flax`, and prints the versions that it ran with.
"""

import importlib.metadata
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optx_sync as oxs


def wrappers():
    inner, exchange = optax.adam(0.1), oxs.exchange
    bits4 = exchange.error_feedback(exchange.quantized(bits=4))
    every: Any = {"communication_period": 2}
    pull: Any = {"moving_rate": 0.1, "rho": 0.0}
    stream: Any = {"communication_period": 4, "fragments": 2, "overlap": True}
    ftrl = oxs.optimizers.ftrl(0.1)
    return {
        "cross_shard": oxs.cross_shard(inner, "workers"),
        "shard_state": oxs.cross_shard(inner, "workers", shard_state=True),
        "sync_replicas": oxs.sync_replicas(inner, "workers", 6),
        "elastic_average": oxs.elastic_average(inner, "workers", **every, **pull),
        "diloco": oxs.diloco(inner, "workers", **every),
        "streaming": oxs.diloco(inner, "workers", exchange=bits4, **stream),
        "gossip": oxs.gossip(inner, "workers", **every),
        "ftrl": oxs.cross_shard(ftrl, "workers", exchange=exchange.median()),
    }


def train(tx, mesh):
    def step(params, state, x):
        grads = jax.tree.map(lambda p: p - x, params)
        return oxs.apply_gradients(tx, grads, state, params)

    params = {"a": jnp.ones((4, 3)), "b": jnp.ones(5)}
    workers = oxs.Workers(8, "workers", mesh=mesh)
    params, state = workers.start((params, tx.init(params)))
    step = workers.step(step, state=2, split=False)
    for _ in range(4):
        params, state = step(params, state, jnp.arange(8.0))
    return jax.device_get(params)


if __name__ == "__main__":
    os.environ.setdefault("NPROC", "16")  # threads for them, and as many to spare
    jax.config.update("jax_num_cpu_devices", 8)
    print(oxs.__file__)
    known = wrappers()
    for name in sys.argv[1:] or known:
        tx = known[name]
        simulated = train(tx, None)
        on_mesh = train(tx, jax.make_mesh((8,), ("workers",)))
        for leaf in simulated:
            if not jnp.allclose(simulated[leaf], on_mesh[leaf], rtol=1e-5, atol=1e-6):
                raise SystemExit(f"{name}: {simulated[leaf]} and {on_mesh[leaf]}")
        print(name, "ok", flush=True)
    versions = (
        f"{package} {importlib.metadata.version(package)}"
        for package in ("jax", "optax", "flax", "optx-sync")
    )
    print("Python", sys.version.split()[0], *versions)
