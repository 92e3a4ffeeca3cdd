"""A program of many workers, compiled and not run: what each holds, and sends.

`python -m tests.center.sharded_memory 64 512` prints a line of JSON for each number.
"""

import json
import sys

import jax
import optax

import optx_sync as oxs
from benchmarks import by_hand
from tests.meshes import mesh_of

FLOATS = 1 << 16


def measured(workers, shard_center):
    """Bytes of a worker's arguments, and of its collectives by kind."""
    mesh = mesh_of({"workers": workers})
    tx = oxs.diloco(
        optax.sgd(0.1), "workers", communication_period=4, shard_center=shard_center
    )
    params = jax.ShapeDtypeStruct((FLOATS // 64, 64), "float32")
    axes = oxs.by_hand.state_axes(tx, params)
    one = params, jax.eval_shape(tx.init, params)
    params, state = oxs.Workers(workers, "workers", mesh=mesh).expect(one)

    def step(params, state):
        return oxs.apply_gradients(tx, params, state, params)

    mapped = oxs.by_hand.map_workers(
        step, "workers", mesh=mesh, in_axes=(0, axes), out_axes=(0, axes)
    )
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state).compile()
    sent = {row.kind: row.bytes for row in oxs.audit.collectives(compiled)}
    return by_hand.memory(compiled).arguments, by_hand.memory(compiled).temporary, sent


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(map(int, sys.argv[1:])))
    for number in map(int, sys.argv[1:]):
        print(json.dumps([measured(number, sharded) for sharded in (True, False)]))
