import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_center_rule.py"


def test_the_center_is_better_than_the_workers_that_meet_at_it(capsys):
    main = runpy.run_path(str(EXAMPLE))["main"]
    center, worst = main(rounds=10)
    # The noise of the data is 0.3 ** 2; nobody can be much better.
    assert 0.08 < center < 0.12
    assert worst > 1.05 * center
    assert "after 10 rounds: loss of the center 0." in capsys.readouterr().out


def test_workers_that_pull_less_stay_farther_apart():
    main = runpy.run_path(str(EXAMPLE))["main"]
    _, near = main(rounds=10, pull=0.5)
    _, far = main(rounds=10, pull=0.05)
    assert far > 1.1 * near


def test_the_rule_is_short():
    source = EXAMPLE.read_text()
    rule = source[source.index("def part_way") : source.index("def main")]
    assert len(rule.strip().splitlines()) <= 10
    assert len(source.splitlines()) <= 80
