import pytest

from kvtide_bench.demo import questions
from kvtide_bench.text import parts, text


@pytest.mark.parametrize("count", [2, 6, 8, 12])
def test_parts_are_the_whole_text_in_order(count: int) -> None:
    assert "\n\n".join(parts(text(), count)) == text().strip()


def test_parts_are_of_about_equal_length() -> None:
    lengths = [len(part) for part in parts(text(), 8)]
    assert max(lengths) < 1.6 * min(lengths)


def test_more_turns_than_paragraphs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 paragraphs, too few for 3 turns"):
        parts("one\n\ntwo", 3)


def test_each_question_brings_its_part() -> None:
    asked = questions(8)
    assert [str(q["content"]).partition(" of")[0] for q in asked] == [f"Part {n}" for n in range(1, 9)]
    assert "Saltmere" in str(asked[0]["content"])
