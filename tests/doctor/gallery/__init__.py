"""The gallery: mistakes that were found by hand in public projects, each as a small replica with its repaired twin.

Our own code, the same mistake. One file per kind of project. docs/gallery.md tells the stories. To add one: write the
repaired class, a subclass with the mistake, a line in `EXHIBITS`, and a section in docs/gallery.md.
"""

from __future__ import annotations

from doctor.gallery.base import Exhibit
from doctor.gallery.context_parallel import EXHIBITS as SHARED
from doctor.gallery.packed_documents import EXHIBITS as PACKED
from doctor.gallery.robots import EXHIBITS as ROBOTS
from doctor.gallery.scans import EXHIBITS as SCANS
from doctor.gallery.split_and_pad import EXHIBITS as SPLIT
from doctor.gallery.wrapped_layers import EXHIBITS as WRAPPED

GALLERY: list[Exhibit] = [*SCANS, *ROBOTS, *SPLIT, *PACKED, *SHARED, *WRAPPED]
