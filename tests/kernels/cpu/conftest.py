"""The instruction sets that the C kernels are tested with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.kernels.cpu import build, library


@pytest.fixture(params=build.isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test once per instruction set, selected by the environment variable as a user would."""
    monkeypatch.setenv("HOLDFAST_CPU_ISA", request.param)
    library.load.cache_clear()
    if library.load().handle is None:
        reason = library.load().reason
        restore(monkeypatch)
        pytest.skip(str(reason))
    assert library.load().isa == request.param
    yield request.param
    restore(monkeypatch)


def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_CPU_ISA")
    library.load.cache_clear()
    library.load()
