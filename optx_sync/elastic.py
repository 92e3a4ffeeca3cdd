# SPDX-License-Identifier: Apache-2.0
"""Fault tolerant, elastic training: a run whose processes come and go.

A lockstep run ends when one of its processes dies, since all others wait for it. So
whatever starts processes (Ray Train, SLURM, a loop in a shell) starts them again, as
many as there are, and each calls the same function again. `Group` is what that function
needs: it continues from the last save, with the workers that there are now.

    def train():  # in each process, after jax.distributed.initialize
        with oxs.elastic.Group("/shared/run", "workers") as group:
            # `begin` returns (params, tx.init(params)).
            state = group.restore_or_start(begin)
            step = group.workers.step(one_step, state=2)
            while group.position < examples:
                for _ in range(PERIOD):  # whole rounds: each save is at a meeting
                    rows = group.rows(len(images), batch=16)
                    state = step(*state, *group.batch((images[rows], labels[rows])))
                group.save(state)

Orbax writes the saves, makes all processes agree on which are complete, and discards a
save that was cut short. Each save carries fingerprints of its arrays and a sum of its
notes; one that is not what was saved is put aside, and the one before is taken.

A process waits for the others until `timeout`: then it raises an error that names the
processes that did not come, and so ends, instead of all waiting for one in silence.
"""

from optx_sync.workers.elastic import Group as Group
