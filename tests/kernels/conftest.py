"""The instruction sets that the C kernels are tested with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.kernels.cpu import build as native_build
from holdfast.kernels.cpu import library as native_library


@pytest.fixture(params=native_build.isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test once per instruction set, chosen as a user would: by the variable."""
    monkeypatch.setenv("HOLDFAST_CPU_ISA", request.param)
    native_library.load.cache_clear()
    if native_library.load().handle is None:
        reason = native_library.load().reason
        restore(monkeypatch)
        pytest.skip(str(reason))
    assert native_library.load().isa == request.param
    yield request.param
    restore(monkeypatch)


def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_CPU_ISA")
    native_library.load.cache_clear()
    native_library.load()
