"""The credit map: what it shows, as blocks and as a picture."""

import sys

import pytest
import torch

from holdfast.doctor import CreditMap


def test_credit_map_shows_leaks_beyond_the_boundary(reports):
    credit = reports["leaking"].credit
    row = credit.busiest_row
    outside = ~credit.allowed(row) & (credit.values[:, :, row] > 0)
    assert outside.any() and "!!" in credit.to_blocks()


def test_credit_map_of_an_over_detached_policy_is_its_diagonal(reports):
    values = reports["detached"].credit.values
    assert (torch.einsum("ttb->tb", values) > 0).all()
    assert all((values[:, :, b].tril(-1) == 0).all() for b in range(5))


def test_credit_map_of_a_healthy_policy_fills_its_triangles(reports):
    credit = reports["healthy"].credit
    for row in range(credit.values.shape[2]):
        assert torch.equal(credit.values[:, :, row] > 0, credit.allowed(row))
    assert "!!" not in credit.to_blocks()


def test_blocks_by_hand():
    values = torch.tensor([[1.0, 0.0], [0.5, 1.0]]).unsqueeze(-1)
    same = CreditMap(values, torch.tensor([[True], [False]]))
    assert same.to_blocks(0).splitlines() == ["t=  0  ██", "t=  1  ██ ██"]
    apart = CreditMap(values, torch.tensor([[True], [True]]))
    assert apart.to_blocks(0).splitlines()[1] == "t=  1  !!|██"


def test_a_picture_has_red_cells_for_leaks_and_none_without(reports, tmp_path):
    from PIL import Image

    def share_of_red(name):
        reports[name].credit.to_png(tmp_path / f"{name}.png", cell=8)
        pixels = torch.tensor(list(Image.open(tmp_path / f"{name}.png").convert("RGB").getdata()))
        return ((pixels[:, 0] > 150) & (pixels[:, 2] < 120)).float().mean().item()

    assert share_of_red("leaking") > 0.01
    assert share_of_red("healthy") == 0.0


def test_a_picture_grows_with_its_cells(reports, tmp_path):
    from PIL import Image

    for cell in (16, 24):
        reports["healthy"].credit.to_png(tmp_path / f"{cell}.png", cell=cell)
    small, large = (Image.open(tmp_path / f"{cell}.png").size[0] for cell in (16, 24))
    assert large - small == 8 * len(reports["healthy"].credit.values)


def test_a_picture_without_matplotlib_says_what_to_install(reports, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"matplotlib: pip install 'holdfast\[plot\]'"):
        reports["healthy"].credit.to_png(tmp_path / "credit.png")
