"""Each macro of the table is known to the graders of mathematics and of science."""

from prorl_gym.environments.answers import tex
from prorl_gym.environments.math import answer_text
from prorl_gym.environments.stem.text_normalization import strip_fonts


def test_fonts_leave_what_they_set():
    lost = [font for font in tex.FONTS if answer_text.normalize_latex(rf"5\{font}{{km}}") != r"5\text{km}"]
    lost += [font for font in (*tex.FONTS, *tex.STYLED) if strip_fonts(rf"5 \{font}{{km}}") != "5 km"]
    lost += [
        style
        for style in tex.STYLED
        if answer_text.comparison_key(answer_text.normalize_latex(rf"\{style}{{x}}")) != "x"
    ]
    assert lost == []


def test_switches_say_nothing():
    seen = [
        switch
        for switch in tex.SWITCHES
        if {answer_text.normalize_latex(rf"\{switch} 5"), strip_fonts(rf"\{switch} 5")} != {"5"}
    ]
    assert seen == []


def test_what_is_not_seen_is_no_part_of_an_answer():
    seen = [
        name
        for name in tex.INVISIBLE
        if {answer_text.normalize_latex(rf"5\{name}{{x}}"), strip_fonts(rf"5\{name}{{x}}")} != {"5"}
    ]
    assert seen == []


def test_spaces_are_spaces():
    spaces = [*tex.WIDE_SPACES, *tex.SPACES, *tex.THIN_SPACES]
    seen = [space for space in spaces if strip_fonts(rf"5\{space} km").split() != ["5", "km"]]
    seen += [
        space
        for space in spaces
        if answer_text.comparison_key(answer_text.normalize_latex(rf"x+\{space} 1")).replace("\\,", "") != "x+1"
    ]
    assert seen == []
