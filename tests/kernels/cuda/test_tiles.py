"""The static table of tiles: every size it promises gets one that fits the GPU."""

import pytest

from holdfast.kernels.cuda.tiles import Tile, choose_tile, tile_for

H200 = {"processors": 132, "shared_bytes": 232448}
BATCHES = (1, 8, 200, 1000, 2000, 3000, 65536)


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_every_promised_size_fits_one_hopper_gpu(gates: int, backward: bool) -> None:
    for hidden in range(16, 1025, 8):
        for batch in BATCHES:
            tile = tile_for(gates, hidden, batch, backward, **H200)
            assert tile == choose_tile(gates, hidden, batch, backward), (hidden, batch)
            assert tile.threads <= 1024 and tile.units % tile.warp_units == 0


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_weights_kept_in_registers_leave_room_for_the_rest(gates: int, backward: bool) -> None:
    for hidden in range(16, 1025, 8):
        for batch in BATCHES:
            tile = choose_tile(gates, hidden, batch, backward)
            if tile.registers:
                tiles = (1 if backward else gates) * tile.warp_units // 8
                assert tile.depth(hidden, gates, backward) // 16 * tiles * 2 <= 128, (hidden, batch)


def test_a_smaller_gpu_gets_a_smaller_slice_of_the_weights() -> None:
    large, small = tile_for(4, 512, 4096, False, **H200), tile_for(4, 512, 4096, False, 128, 101376)
    assert large is not None and small is not None
    assert small.units < large.units and small.shared_bytes(512, 4, False) <= 101376


def test_no_tile_where_nothing_fits() -> None:
    assert tile_for(4, 1024, 64, False, processors=16, shared_bytes=232448) is None


def test_shared_memory_of_a_tile_by_hand() -> None:
    # W_hh slice: 4 gates x 32 units x (256 + 8) columns; two teams of two stages of 16 rows x (128 + 8): fp16 all
    tile = Tile(32, 16, teams=2, columns=128, stages=2)
    assert tile.shared_bytes(256, 4, False) == 2 * (128 * 264 + 2 * 2 * 16 * 136)


def test_shared_memory_of_a_cluster_by_hand() -> None:
    tile = Tile(32, 8, halves=1, cluster=True)  # 8 rows, 8 blocks of 32 units
    # forward: W_hh slice as above; two slots of 8 rows x (256 + 8)
    assert tile.shared_bytes(256, 4, False) == 2 * (128 * 264 + 2 * 8 * 264)
    # backward: 256 units x (4 x 32 + 8) columns, gate gradients of 8 rows, two slots with fp32 sums of 7 blocks
    assert tile.shared_bytes(256, 4, True) == 2 * (256 * 136 + 8 * 136) + 2 * 4 * 7 * 8 * 32


def test_blocks_divide_their_columns_only_where_all_of_them_get_the_same():
    tile = Tile(16, 16, warp_rows=4, teams=2, columns=64, stages=4)
    shares = {hidden: tile.sharing(4, hidden, 4).share for hidden in (1024, 768, 720, 672, 520)}
    assert shares == {1024: 4, 768: 4, 720: 1, 672: 2, 520: 1}
    assert tile.sharing(4, 1024, 4).shared_bytes(1024, 4, True) == 2 * (64 * (1024 + 8) + 2 * 4 * 64 * 72)
