"""How a recurrence is launched, without a GPU: which kernels are asked for, and in what grids."""

import pytest

from holdfast.kernels.cuda import plans


class Kernel:
    """Takes note of its grid."""

    def __init__(self, constants: dict[str, int], clusters: int) -> None:
        self.constants, self.clusters = constants, clusters

    def most_clusters(self, size: int, threads: int) -> int:
        return self.clusters

    def launcher(self, blocks: int, threads: int, layout: str, together: bool = False):  # type: ignore[no-untyped-def]
        return {"cluster": bool(self.constants["CLUSTER"]), "blocks": blocks, "together": together}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("capability", "clusters", "expected"),
    [
        (90, 16, {"cluster": True, "blocks": 128, "together": False}),
        (90, 15, {"cluster": False, "blocks": 128, "together": True}),  # 16 are needed
        (80, 16, {"cluster": False, "blocks": 128, "together": True}),
    ],
)
def test_clusters_are_used_only_where_the_gpu_runs_all_of_them_at_once(
    direction: str, capability: int, clusters: int, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "limits", lambda device: (132, 232448, capability))
    monkeypatch.setattr(plans, "compiled", lambda source, name, constants, *_: Kernel(constants, clusters))
    made = plans.recurrence.__wrapped__(
        direction, 4, 256, 128, 0, 0, True, False, True, device=-1 - capability - clusters
    )
    plans.recurrence.cache_clear()
    assert made.launch == expected
    assert made.groups == made.chunks == 16
