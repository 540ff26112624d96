"""What explain lists of times. What it says of whole files is in test_explain.py."""

from gluon_attn import explain_times


def test_only_some_alternatives_are_listed_and_always_the_chosen_one():
    ms = {f"c{i}": 1.0 + i for i in range(20)}
    lines = list(explain_times.times(ms, "c15"))
    assert [line.split()[:2] for line in lines[-2:]] == [["*", "c15"], ["and", "11"]]
    assert len(lines) == explain_times.ALTERNATIVES + 2
