"""Errors, the rival with one number, and Kendall's tau against values known from elsewhere."""

from __future__ import annotations

import pytest

from shardwise.score.errors import MIN_FITTED, errors_of, kendall, one_mfu


def test_errors_are_relative_to_what_was_measured() -> None:
    found = errors_of([(1.0, 2.0), (3.0, 2.0), (2.2, 2.0)])
    assert found is not None
    assert tuple(found) == pytest.approx((0.5, (0.5 + 0.5 + 0.1) / 3, 0.1 / 3))
    assert errors_of([]) is None


@pytest.mark.parametrize(
    ("x", "y", "tau"),
    [
        # Ties in both: the example of scipy.stats.kendalltau's documentation.
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -0.47140452079103173),
        # 22 pairs agree and 6 do not.
        ([1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 1, 2, 5, 7, 8, 6], 16 / 28),
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], 1.0),
        ([1, 2, 3, 4, 5], [9, 7, 5, 3, 1], -1.0),
    ],
)
def test_tau(x: list[float], y: list[float], tau: float) -> None:
    assert kendall([list(zip(x, y, strict=True))]) == pytest.approx(tau)


def test_pairs_are_compared_within_a_sweep_alone() -> None:
    """Two sweeps that are told backwards each, though their means are in order."""
    low, high = [(i, 5 - i) for i in range(5)], [(100 + i, 105 - i) for i in range(5)]
    assert kendall([low, high]) == -1.0
    assert kendall([low + high]) == pytest.approx((25 - 20) / 45)


def test_an_order_is_not_judged_by_few_pairs_or_none() -> None:
    assert kendall([]) is None
    assert kendall([[(1, 1), (2, 2), (3, 3)], [(1, 2)]]) is None
    assert kendall([[(1, i) for i in range(9)]]) is None


def test_the_rival_has_the_least_mean_error_of_all_mfus() -> None:
    runs = [(0.2, 0.5), (0.3, 0.9), (1.0, 1.9), (0.05, 0.2), (0.4, 0.8), (0.1, 0.7)]
    found = one_mfu(runs)
    assert found is not None
    mfu, errors = found
    for i in range(1, 1000):
        other = errors_of([(ideal / (i / 1000), measured) for ideal, measured in runs])
        assert other is not None
        assert errors.mean <= other.mean + 1e-12
    assert tuple(errors) == pytest.approx(tuple(errors_of([(i / mfu, m) for i, m in runs]) or ()))


def test_the_rival_is_exact_where_every_run_has_one_mfu() -> None:
    found = one_mfu([(0.4 * t, t) for t in (1.0, 2.0, 5.0)])
    assert found is not None
    assert found[0] == pytest.approx(0.4)
    assert found[1].mean == pytest.approx(0, abs=1e-12)


def test_a_rival_is_not_fitted_on_fewer_runs_than_would_tell() -> None:
    assert one_mfu([(0.4, 1.0)] * (MIN_FITTED - 1)) is None
