"""Commands and programs that README and docs show: what they train is learned.

Slow (minutes): `make test-learning`. Each is run as it is written there, in an empty folder, with the base seed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from learning.base_seed import BASE_SEED

ROOT = Path(__file__).parents[2]
COMMANDS = {  # command: (page, mean return over 100 fresh episodes that is asked)
    "holdfast train --env CartPole-v1 --mask-velocity --core gru --total-steps 500000": ("README.md", 475),
    "holdfast train --preset repeat-previous-easy": ("docs/training.md", 0.95),
    "holdfast train --env holdfast/HigherLowerEasy-v0 --core gru": ("docs/popgym.md", 0.47),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_learns_its_task(tmp_path: Path, command: str):
    page, asked = COMMANDS[command]
    assert command in (ROOT / page).read_text(), "the page shows another command now: change this test too"
    words = [sys.executable, "-m", *shlex.split(command), "--seed", str(BASE_SEED), "--quiet", "--no-tensorboard"]
    subprocess.run(words, cwd=tmp_path, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (result,) = tmp_path.glob("runs/*/*/result.json")
    assert json.loads(result.read_text())["mean_return"] >= asked


def test_the_first_program_of_the_training_page_learns_its_task(tmp_path: Path):
    program = (ROOT / "docs" / "training.md").read_text().split("```python\n", 1)[1].split("```", 1)[0]
    assert "result = hf.Trainer(config).run()" in program
    program = program.replace("hf.TrainConfig(", f"hf.TrainConfig(seed={BASE_SEED}, quiet=True, tensorboard=False, ")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-2]) >= 0.95
