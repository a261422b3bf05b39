# SPDX-License-Identifier: Apache-2.0
import pytest

from serving.kv_cache.speed import Speed


def test_recent_work_weighs_more():
    speed = Speed(0.5)
    assert speed.seconds_per_unit == 0
    speed.add(10, 20)
    assert speed.seconds_per_unit == 2
    speed.add(10, 0)
    assert speed.seconds_per_unit == pytest.approx(10 / 15)
    for _ in range(50):
        speed.add(1, 3)
    assert speed.seconds_per_unit == pytest.approx(3)
