"""A SHA-256 inside an exported file, over all its other bytes.

`MARK` and 64 digits stand where the format keeps text: in the metadata of an .onnx, in the comment of a .pt2's archive.
The digest is that of the file with zeros for those digits, so it is checked without reading the format.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

MARK = b"holdfast-sha256:"
_ZEROS = b"0" * 64
UNSEALED = (MARK + _ZEROS).decode()
"""What `seal` looks for."""


def seal(path: Path) -> None:
    """Put the digest where `UNSEALED` stands."""
    content = path.read_bytes()
    at = content.rindex(MARK + _ZEROS) + len(MARK)
    digest = hashlib.sha256(content).hexdigest().encode()
    path.write_bytes(content[:at] + digest + content[at + len(_ZEROS) :])


def seal_archive(path: Path) -> None:
    """`seal` for a zip archive."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = UNSEALED.encode()
    seal(path)


def verify(path: Path) -> bool:
    """Raise a ValueError if the file was changed after it was sealed. False if it was never sealed (Holdfast 0.1)."""
    content = path.read_bytes()
    at = content.rfind(MARK)
    if at < 0:
        return False
    at += len(MARK)
    blank = content[:at] + _ZEROS + content[at + len(_ZEROS) :]
    if hashlib.sha256(blank).hexdigest().encode() != content[at : at + len(_ZEROS)]:
        raise damaged(path)
    return True


def damaged(path: Path) -> ValueError:
    return ValueError(
        f"{path}: the file is damaged, its checksum does not match; copy it again, or export the policy again"
    )
