import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "custom_optimizer.py"


def test_it_learns_and_moves_only_the_rows_it_looks_up(capsys):
    loss, moved = runpy.run_path(str(EXAMPLE))["main"](steps=100)
    assert loss < 1e-3
    assert moved == 3
    assert "rows of the table that moved: 3 of 1000" in capsys.readouterr().out
