"""Lines to change, before and after, in the words of the framework at hand."""

from holdfast.causes import CAUSES
from holdfast.doctor import subjects
from holdfast.doctor.report.patches import PATCHES, patch_for

WITHOUT = {"state-grows", "graph-breaks", "check-failed-to-run"}  # there are no lines to show


def test_every_cause_of_trouble_shows_lines_before_and_after():
    for cause, entry in CAUSES.items():
        patch = patch_for(cause, "torch")
        if entry.severity == "note" or cause in WITHOUT:
            assert patch == ""
        else:
            assert "+ " in patch, cause


def test_patches_are_of_known_causes_and_mark_every_line():
    for framework, table in PATCHES.items():
        assert set(table) <= set(CAUSES), framework
        for cause, patch in table.items():
            assert all(line[:2] in ("- ", "+ ", "  ") for line in patch.splitlines()), (framework, cause)


def test_every_subject_names_a_framework_with_patches():
    kinds = [getattr(subjects, name) for name in subjects.__all__]
    found = {kind.framework for kind in kinds if isinstance(kind, type) and issubclass(kind, subjects.Subject)}
    assert found == set(PATCHES)


def test_a_framework_shows_its_own_words_and_falls_back_on_torch():
    assert "InitTracker" in patch_for("memoryless", "torchrl")
    assert patch_for("graph-kept", "torchrl") == patch_for("graph-kept", "torch")


def test_findings_carry_the_patch_of_their_subject(reports):
    (found,) = [f for f in reports["leaking"].findings if f.severity == "error"]
    assert "get_states" in found.patch and found.to_dict()["patch"] == found.patch
    assert "+     for h, d in zip(hidden, done):" in reports["leaking"].to_text()
