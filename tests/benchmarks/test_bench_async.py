"""The benchmark of exchanges, short: that it runs and what its figures must obey."""

import pytest

SCRIPT = "bench_async"
EXCHANGES = {"naive actor", "naive actor, NumPy", "Ray alone", "copy"} | {
    "local_sgd",
    "elastic",
    "diloco",
}


@pytest.mark.slow
def test_every_exchange_is_measured(found):
    assert found["machine"]["versions"]["ray"]
    (table,) = found["tables"]
    rows = {row[0]: row[2:] for row in table["rows"] if row[2] != ""}
    assert set(rows) == EXCHANGES
    naive_over_copy = rows["naive actor"][1]
    for times_faster, over_copy, _ in rows.values():
        assert times_faster * over_copy == pytest.approx(naive_over_copy, rel=1e-4)
    # A copy within a process is faster than anything that goes to another one.
    assert all(row[1] > 1 for name, row in rows.items() if name != "copy")
    assert [one["met"] for one in found["criteria"]] == [
        rows[name][0] >= 1.2 for name in ("local_sgd", "elastic", "diloco")
    ]
