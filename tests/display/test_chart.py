import math

from holdfast.display import chart


def test_a_flat_curve_and_no_points_draw_without_error():
    assert chart.curve([], 4, 2, (0, 1), (0, 1)) == ["⠀" * 4] * 2
    assert chart.curve([(0, 3), (1, 3)], 2, 1, (0, 1), (3, 3)) == ["⠒⠒"]
    assert chart.sparkline([math.nan], 3) == "   "
    assert chart.sparkline([2.0, 2.0], 3) == " ▁▁"
