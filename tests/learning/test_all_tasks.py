"""`holdfast.envs.check` finds nothing in any task that comes with Holdfast, at the size it is registered with."""

from __future__ import annotations

import pytest

import holdfast.envs


@pytest.mark.parametrize("env_id", [row.id for row in holdfast.envs.list_envs()])
def test_nothing_is_found(env_id):
    holdfast.envs.check(env_id)
