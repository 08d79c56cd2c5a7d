"""The table of named problems is what it says it is."""

from prefill_cases import AXES, CASES, uncovered


def test_cases_cover_all_pairs() -> None:
    assert not uncovered(CASES)
    assert len(set(CASES)) == len(CASES) <= 150


def test_a_missing_pair_is_seen() -> None:
    kept = tuple(case for case in CASES if case.tokens != AXES["tokens"][0])
    assert ("tokens", 1, "batch", 1) in uncovered(kept)
