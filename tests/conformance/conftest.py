"""Gives every test that takes `make` each policy of `policies.DRIVERS`; `@for_resets("zero", ...)` limits the modes."""

from conformance.policies import DRIVERS


def pytest_generate_tests(metafunc):
    if "make" not in metafunc.fixturenames:
        return
    wanted = getattr(metafunc.function, "reset_modes", None)
    chosen = {n: make for n, make in DRIVERS.items() if wanted is None or n.rsplit("-", 1)[1] in wanted}
    metafunc.parametrize("make", chosen.values(), ids=chosen)
