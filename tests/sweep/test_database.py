"""Databases of studies, and what is said of them."""

from __future__ import annotations

import pytest

from holdfast.sweep.database import database_reason, open_database

pytest.importorskip("optuna")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:S3cret@localhost:1/db",
        "postgresql://me:S3cret@with@signs@localhost:1/db",
        "postgresql://me:x/S3cret@localhost/db",
        "no-such-database://me:S3cret@localhost/db",
        "postgresql://me@localhost:1/db?password=S3cret&x=1",
        "mysql://localhost:S3cret@x:y/db",
    ],
)
def test_a_password_is_not_shown(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ValueError, match=r"--storage .*\*\*\*.* cannot be opened") as error:
        open_database(url)
    assert "S3cret" not in str(error.value) and "localhost" in str(error.value)


def test_a_reason_that_repeats_an_address_hides_its_password():
    assert "S3cret" not in database_reason(ValueError("cannot parse postgresql://me:S3cret@host/db"))
