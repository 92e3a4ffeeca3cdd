"""Eight CPU devices stand for a mesh; nothing is promoted or broadcast silently."""

import os

# Threads to spare for the devices, or a collective may wait for ever: see Makefile.
os.environ.setdefault("NPROC", "16")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Programs that a test runs in processes of their own; importing them would run them.
collect_ignore_glob = ["users/nnx_transformer/*.py"]
