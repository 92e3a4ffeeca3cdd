import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_center_rule.py"


def test_the_center_is_better_than_the_workers_that_meet_at_it(capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    center, near = main(rounds=10)
    # The noise of the data is 0.3 ** 2; nobody can be much better.
    assert 0.08 < center < 0.12
    assert near > 1.05 * center
    assert "after 10 rounds: loss of the center 0." in capsys.readouterr().out
    _, far = main(rounds=10, pull=0.05)
    assert far > 1.1 * near
