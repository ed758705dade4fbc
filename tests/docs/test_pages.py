"""What the site promises beyond its words: every public name, every flag, figures that scripts draw, numbers that were measured."""

from __future__ import annotations

import importlib
import json
import math
import re
import statistics
import sys

import gymnasium
import pytest
import torch

import holdfast as hf
from docs.blocks import PAGES, ROOT
from holdfast.config import PRESETS
from holdfast.state import leaves

sys.path.insert(0, str(ROOT / "docs" / "tools"))
figures = importlib.import_module("figures")
commands_page = importlib.import_module("commands_page")
notebook_page = importlib.import_module("notebook_page")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    shown = re.findall(r"^::: holdfast\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(shown) == sorted(hf.__all__)


def test_every_name_of_the_reference_exists_and_has_a_docstring():
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    for path in re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE):
        module, _, name = path.rpartition(".")
        here = importlib.import_module(module)
        assert (getattr(here, name, None) or importlib.import_module(path)).__doc__, path


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"([\w/]+\.md)", nav))
    assert {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} <= listed
    made = {"commands.md", "contributing.md", "changelog.md"}
    made |= {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    missing = {page for page in listed - made if not (ROOT / "docs" / page).exists()}
    assert not missing


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_what_its_script_draws(name):
    drawn = (ROOT / "docs" / "figures" / f"{name}.svg").read_text()
    assert drawn == figures.FIGURES[name](), "run `make figures`"


def test_what_stored_states_cost_is_what_the_cores_say():
    box = gymnasium.spaces.Box(-1, 1, (3,))
    page = (ROOT / "docs" / "algorithms.md").read_text().partition("**What stored states cost.**")[2]
    rows = re.findall(r"^\| ([\w, ]+) \| ([\d,]+|not stored) \| ([\d,]+) MB \|$", page, flags=re.MULTILINE)
    assert len(rows) == 5
    for names, size, total in rows:
        for name in names.split(", "):
            core = hf.SoftActorCritic(box, box, name, 128).core
            stored = core.context() is None
            shapes = leaves(core.row_shapes()) if stored else []
            per_state = sum(math.prod(leaf.shape) * (leaf.dtype or torch.float32).itemsize for leaf in shapes)
            assert size == (f"{per_state:,}" if stored else "not stored"), name
            assert float(total.replace(",", "")) == round(1e6 / 32 * per_state / 1e6), name


def test_figures_fetch_nothing():
    for path in sorted((ROOT / "docs" / "figures").glob("*.svg")):
        addresses = set(re.findall(r"https?://[^\s\"')<]+", path.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}, (
            path.name
        )  # names, not requests


def test_the_figure_of_the_display_is_drawn_from_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    display_figure = importlib.import_module("display_figure")
    small = {"total_steps": 4096, "num_envs": 8, "num_steps": 16, "hidden_size": 8, "threads": 1, "tensorboard": False}
    config = hf.TrainConfig.preset("repeat-previous-easy", quiet=True, final_eval_episodes=2, **small)
    svg = display_figure.draw(config, display_figure.rows_of_a_run(config))
    assert "replay" in svg and "seed" in svg and "font-face" not in svg


def test_the_example_of_reading_help_holds():
    import doctest

    assert doctest.testmod(commands_page) == (0, 1)


def test_the_page_of_commands_explains_every_setting():
    import dataclasses

    page = commands_page.page()
    train = page.partition("## holdfast train\n")[2].partition("\n## ")[0]
    flags = {flag for flag in re.findall(r"`(--[\w-]+)", train)}
    fields = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(hf.TrainConfig)}
    assert fields - flags <= {"--env-kwargs"}  # written as --env-args
    rows = [line.split(" | ") for line in train.splitlines() if line.startswith("| `--")]
    assert all(len(row) == 3 and row[1].strip() for row in rows)


def test_a_notebook_becomes_a_page():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = notebook_page.page(path)
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert page.startswith("# ") and page.count("```python") == len(code)
        assert 'title="printed"' in page and "Traceback" not in page


# --- performance/index.md -------------------------------------------------------------------------------------------------


def result(name: str):
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def geometric_mean(values) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def measured() -> dict[str, str]:
    """Numbers of the page, computed from the files that it links to."""
    sb3 = {row["hidden"]: row for row in result("vs_sb3.json")["speed"]}
    rsl_rl = {row["rnn_type"]: row for row in result("vs_rsl_rl.json")["rows"]}["lstm"]
    gpu = [row for row in result("gpu_engines.json")["rows"] if "ratio" in row]
    ratios = [row["ratio"] for row in gpu]
    shapes = result("gpu_shapes.json")["summary"]
    cpu = {row["shape"]: row["ms"] for row in result("cpu_recurrence.json")["sequences"] if row["cell"] == "lstm"}
    torchrl = {tuple(row["shape"]): row["ratio"] for row in result("vs_torchrl.json")["rows"]}
    lstm = [row["both"] for row in result("gpu_recurrence.json")["shapes"] if row["kind"] == "lstm"]
    on_cpu = [row["ms"] for row in result("linear_recurrence_cpu.json")["layers"]]
    on_gpu = [row["graph_ms"] for row in result("linear_recurrence_cuda.json")["layers"]]
    recalls = [row for row in result("memory_span.jsonl") if (row["task"], row["span"]) == ("recall", 64)]
    window = next(row for row in recalls if row["core"] == "window")
    learned: dict[tuple[str, str], list] = {}
    for row in result("learning.jsonl"):
        learned.setdefault((row["preset"], "none" if row["core"] == "none" else "its own"), []).append(row)
    repeat, maze = (
        [learned[preset, core] for core in ("its own", "none")] for preset in ("repeat-previous-easy", "t-maze")
    )
    reliable = sum(
        sum(row["mean_return"] >= row["solved_at"] for row in runs) >= 9
        for (_, core), runs in learned.items()
        if core == "its own"
    )

    theirs, ours = rsl_rl["rsl_rl"], rsl_rl["holdfast"]
    update = theirs["update_ms"] / ours["update_ms"]
    whole = (theirs["rollout_ms"] + theirs["update_ms"]) / (ours["rollout_ms"] + ours["update_ms"])
    onnx = result("runner_latency.json")["microseconds"]["64"]['Runner("policy.onnx")']

    def mean(runs):
        return f"{statistics.mean(run['mean_return'] for run in runs):.3f}"

    def fold(rows):
        speedups = [row["nn.GRU"] / row["mingru"] for row in rows]
        return geometric_mean(speedups), min(speedups)

    cpu_mean, cpu_worst = fold(on_cpu)
    gpu_mean, gpu_worst = fold(on_gpu)
    return {
        "equal settings, hidden 64": f"{sb3[64]['ratio']:.1f}x (lowest pair of runs {sb3[64]['lowest_pair']:.1f}x)",
        "the same, hidden 256": f"{sb3[256]['ratio']:.1f}x (lowest {sb3[256]['lowest_pair']:.1f}x)",
        "inside sb3-contrib": f"{result('vs_sb3_inside.json')['speed'][0]['ratio']:.1f}x",
        "inside rsl_rl": f"{whole:.1f}x (update {update:.1f}x)",
        "one H200, LSTM 128": f"{gpu[0]['steps_per_second'] / 1e6:.1f} million steps per second",
        "one JAX program": f"{ratios[0]:.2f}x (other settings {min(ratios):.2f}x to {sorted(ratios)[-2]:.2f}x)",
        "a billion steps": f"{result('soak_cuda.json')['seconds']:.0f} s",
        "40 shapes": f"LSTM {shapes['lstm, eager']['geometric_mean']:.1f}x, GRU {shapes['gru, eager']['geometric_mean']:.1f}x",
        "compared with cuDNN without resets": f"{geometric_mean(row['cudnn'] / row['ours_1'] for row in lstm):.2f}x",
        "relative to `nn.LSTM` without resets": f"{cpu['64, 128, 0.01']['native'] / cpu['64, 128, 0.01']['nn']:.2f}",
        "`LSTMModule`": f"{torchrl[(64, 128, 0.01)]:.1f}x",
        "on a CPU core compared with `nn.GRU`": f"{cpu_mean:.1f}x (worst {cpu_worst:.1f}x)",
        "on an H200 compared with `nn.GRU`": f"{gpu_mean:.1f}x (worst {gpu_worst:.1f}x)",
        "9 of 10 fresh seeds": f"{reliable} of {len(PRESETS)}",
        "RepeatPreviousEasy, LSTM": f"{mean(repeat[0])}; without memory {mean(repeat[1])}",
        "median steps until 0.95": f"{statistics.median(run['steps_to_threshold'] for run in repeat[0]):,.0f}",
        "T-maze of 20": f"{mean(maze[0])}; without memory {mean(maze[1])}",
        "recall of 64": f"{window['steps_to_threshold'] / 1e6:.2f} million",
        "exported to ONNX": f"{onnx:.0f} µs",
    }


def test_every_number_of_the_performance_page_is_in_the_file_it_links_to():
    page = (ROOT / "docs" / "performance" / "index.md").read_text()
    rows = [
        line.split(" | ")
        for line in page.splitlines()
        if (line.startswith("| ") and " | `" in line) or "| the same" in line
    ]
    numbers = measured()
    for claim, number in numbers.items():
        found = [row for row in rows if claim in row[0]]
        assert found and any(number in row[1] for row in found), (
            f"{claim}: measured {number}, printed {[row[1] for row in found]}"
        )
    assert len(rows) == len(numbers)


def test_the_landing_page_repeats_what_was_measured():
    page = (ROOT / "docs" / "index.md").read_text()
    exhibits = re.findall(r"^\| \[[^\]]+ #\d+\]", (ROOT / "docs" / "gallery.md").read_text(), flags=re.MULTILINE)
    assert f"**{len(exhibits)} bugs**" in page
    speed = next(row for row in result("vs_sb3.json")["speed"] if row["hidden"] == 64)
    assert f"**{speed['lowest_pair']:.1f}x to {speed['highest_pair']:.1f}x**" in page
    steps = [row["steps_per_second"] / 1e6 for row in result("gpu_engines.json")["rows"] if "ratio" in row]
    assert f"**{min(steps):.0f} to {max(steps):.0f} million**" in page


def test_the_readme_repeats_what_was_measured():
    page = (ROOT / "README.md").read_text()
    sb3 = {row["hidden"]: row for row in result("vs_sb3.json")["speed"]}
    gpu = [row for row in result("gpu_engines.json")["rows"] if "ratio" in row]
    steps, ratios = [row["steps_per_second"] / 1e6 for row in gpu], [row["ratio"] for row in gpu]
    rsl_rl = {row["rnn_type"]: row["times_the_steps_per_second"] for row in result("vs_rsl_rl.json")["rows"]}
    layers = [row["both"] for row in result("gpu_recurrence.json")["shapes"] if row["kind"] == "lstm"]
    sac = [row["rates"] for row in result("off_policy.json")["cpu"]["rows"] if row["algorithm"] == "sac"]
    skrl = [rates["holdfast"] / rates["skrl"] for rates in sac]
    for said in (
        f"one thread | {min(skrl):.1f} to {max(skrl):.1f} | nine sizes",
        f"| {sb3[64]['lowest_pair']:.1f} to {sb3[64]['highest_pair']:.1f} at hidden size 64, "
        f"{sb3[256]['lowest_pair']:.1f} to {sb3[256]['highest_pair']:.1f} at 256 |",
        f"{min(steps):.0f} to {max(steps):.0f} million steps per second | {min(ratios):.1f} to {max(ratios):.1f} |",
        f"| {rsl_rl['lstm']:.1f} with an LSTM, {rsl_rl['gru']:.1f} with a GRU |",
        f"| {geometric_mean(layer['cudnn'] / layer['ours_1'] for layer in layers):.2f} | geometric mean of nine shapes",
    ):
        assert said in page, said
