"""Settings that solve a task, by name: `presets.toml`. A preset belongs to the algorithm that it names, PPO if it names none."""

from __future__ import annotations

from typing import Any

from holdfast.data_files import read_toml

PRESETS: dict[str, dict[str, Any]] = read_toml(__file__, "presets.toml")
