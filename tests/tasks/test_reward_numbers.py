"""Numbers in answers: which texts are a number, which numbers are the same, and what is no answer but a hedge."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scores import arithmetic, gsm8k

from trl_quant.tasks.answers import numbers, same_number, single_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("1,234", "1234"),
        ("1,234,567.89", "1234567.89"),
        ("$12.50", "12.50"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("US$12", "12"),
        (r"\$1{,}234", "1234"),
        ("3/4", "3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac{-3}{4}", "-3/4"),
        ("50%", "50%"),
        (r"50\%", "50%"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("+7", "7"),
        ("1e3", "1000"),
        ("2.5E-2", "0.025"),
        (".5", "0.5"),
        ("72.", "72"),
        ("72 clips", "72"),
        ("**72**", "72"),
        ("$72$", "72"),
        ("...72", "72"),
        ("x = 5", "5"),
        ("347+588=935", "935"),
        ("12/60 = 0.2", "0.2"),
        ("x = 6 x 12 = 72", "72"),
        ("3 days = 72 hours", "72"),
        (r"72 \text{ cm}^2", "72"),
        ("72 cm^2", "72"),
        ("72 cm^{2}", "72"),
        ("72 m/s^2", "72"),
        (r"72 \text{ km/h}", "72"),
        (r"72 \text{ m}/\text{s}", "72"),
        ("72cm", "72"),
        ("72 miles/hour", "72"),
        ("- 72", "-72"),
        (r"\dfrac34", "3/4"),
        (r"90^\circ", "90"),
        ("5 p.m.", "5"),
        # no number, or more than one
        ("", None),
        ("none", None),
        ("H2O", None),
        ("5 or 6", None),
        ("5,6", None),
        ("1,2345", None),
        ("3+4", None),
        ("10-7", None),
        ("1 1/2", None),
        ("1/2/3", None),
        ("1.2.3", None),
        ("72!", None),
        ("72x", None),
        ("2x = 72", None),
        ("72?", None),
        ("not 72", None),
        ("> 72", None),
        ("71 = 72", None),
        ("a = 4 = 3", None),
        ("a = 4, b = 3", None),
        ("x + y = 5", None),
        ("3,3", None),
        (r"3 \text{ (or 4)}", None),
        (r"3\frac{1}{2}", None),
        (r"\frac{1}{2}3", None),
        (r"\sqrt{72}", None),
        (r"72\pi", None),
        ("72^2", None),
        ("72 cm^23", None),
        ("72 cm^2.5", None),
        ("72 + 5 cm^2", None),
        ("72 cm^2 5", None),
        ("72_8", None),
        ("72²", None),
        ("|72|", None),
        ("-(72)", None),
        ("sqrt(72)", None),
        ("half of 72", None),
        ("2**72", None),
        # readable, but not a usable number
        ("3/0", None),
        ("1e999999999", None),
        ("9" * 65, None),
    ],
)
def test_single_number(text, number):
    assert single_number(text) == number


def test_a_minus_between_two_terms_is_not_a_sign():
    assert numbers("10-7") == ["10", "7"]
    assert numbers("10 -7") == ["10", "-7"]


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_read(n):
    for text in (f"{n}", f"{n:,}", f"${n}", f"{n}.0", f"{n}.", f"\\text{{{n}}} ", f"{n:,} dollars"):
        assert same_number(str(n), single_number(text)), text
        assert not same_number(str(n + 1), single_number(text)), text


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/2", "0.50", True),
        ("0.75", "3/4", True),
        ("6/8", "3/4", True),
        ("12.50", "12.5", True),
        ("1000", "1000.0", True),
        ("50%", "50%", True),
        ("50%", "50", True),
        ("007", "7", True),
        ("-0", "0", True),
        # not written out
        ("3/4", "6/8", False),
        ("72", "144/2", False),
        ("72", "72/1", False),
        ("0.5", "2/4", False),
        ("50", "50%", False),
        ("0.5", "50%", False),
        ("72", "7200%", False),
        # another number
        ("7", "-7", False),
        ("50", "0.5", False),
        ("100", "1", False),
        ("1/3", "0.33", False),
        ("1/3", "0." + "3" * 30, False),
        ("100000000000000000001", "100000000000000000000", False),
        ("1000000", "1000001", False),
    ],
)
def test_same_number(gold, answer, equal):
    assert same_number(gold, answer) is equal


@given(st.fractions(max_denominator=50), st.integers(1, 9))
def test_fractions_must_be_reduced(number, factor):
    """`Fraction` prints the reduced form; every other one is refused, also that of a whole number."""
    top, bottom = number.numerator, number.denominator
    assert same_number(f"{top * 3}/{bottom * 3}", str(number))
    assert same_number(str(number), f"{top * factor}/{bottom * factor}") is (factor == 1 and bottom > 1)


def words(text: str) -> list[str]:
    """Cases, apart by spaces, with `~` for a space within one."""
    return [word.replace("~", " ") for word in text.split()]


# Where an answer stands. The last four have no marker, so that the last number of the text counts.
MARKED = ("#### @", r"so \boxed{@}.", "<answer>@</answer>", "<answer>\n@\n</answer>")
UNMARKED = ("@", "It is @", "The answer is @.", "@\n")
NOT_72 = words(
    r"""144/2 \frac{144}{2} 72/1 72! 72!! 72x 72i 72^x 72_8 72² not~72 isn't~72 72% 72\% 7200% 72~or~73 73,72 72,72
    72|73 72~\text{~(or~73)} \sqrt{72} 72\pi 3\frac{1}{2} -(72) --72 >~72 >72 <72 ≠72 \neq~72 \pm~72 ±72 6*12 6\cdot~12
    6\times~12 6~x~12 60+12 |72| 72~+~x x+72 2**72 72**2 f(72) sqrt(72) x~\ne~72 72~=~71 \binom{72}{1} \log~72
    \{72\} 7~2 1/72 72:1 72/x 0x48
    72~x^2 72x^2 3x+72 5+72~cm^2 72~cm^2+5 72~m^2/3 72~m^3x 72~m^2~x 72~m^2^2 72~cm^23 72~m^{23} 72/s 72~m/x 72~m/s/x"""
)
NOT_72_IF_MARKED = words("72? 71=72 71~=~72 a=71=72 72=71=72 x=71,y=72 2x=72 x+y=72 72~no 72~squared half~of~72 [72]")


@pytest.mark.parametrize(
    ("text", "forms"),
    [*((text, MARKED + UNMARKED) for text in NOT_72), *((text, MARKED) for text in NOT_72_IF_MARKED)],
)
def test_what_is_not_72_written_out(text, forms):
    for form in forms:
        completion = form.replace("@", text)
        assert gsm8k(completion, "72") == 0.0, completion
    assert arithmetic(text, "72") == 0.0


@pytest.mark.parametrize("text", ["71=72", "71 = 72", "a=71=72", "$71 = $72"])
def test_an_equation_of_two_numbers_is_a_hedge_without_a_marker_too(text):
    assert gsm8k(text, "72") == gsm8k(f"So\n{text}", "72") == 0.0
    assert gsm8k("6*12=72", "72") == gsm8k("She has 6 * 12 = 144 / 2 = 72", "72") == 1.0


@pytest.mark.parametrize(
    "text",
    words(r"""
    72 72. 72.0 72.00 +72 7.2e1 $72 \$72 $72.00 €72 US$72 $72$ **72** 72~dollars 72\text{~dollars} \text{72~clips}
    72cm 72~cm 72cm² 72cm^2 72~cm^2 72~cm^{2} 72~m^3 72~km/h 72km/h 72~m/s 72~m/s^2 72~kg/m^3 72~g/cm²
    72\,\text{cm} 72\text{~cm}^2 72\mathrm{~cm} 72~sq~ft 72^\circ 72° 72~miles/hour 72~p.m. 72~years~old
    72~more~apples Total:~72 It~is~72~clips. x=72 x~=~72 6*12=72 60+12=72 6~x~12~=~72 x~=~6~*~12~=~72 <<6*12=72>>72
    \mathbf{72}
    """),
)
def test_what_is_72_written_out(text):
    for form in MARKED + UNMARKED:
        completion = form.replace("@", text)
        assert gsm8k(completion, "72") == 1.0, completion
        assert gsm8k(completion, "71") == gsm8k(completion, "-72") == 0.0, completion


def test_a_percent_sign_is_right_where_the_prompt_speaks_of_percentages():
    asked = ["What percentage is left?", [{"role": "user", "content": "How many % are left?"}]]
    for prompt in asked:
        assert gsm8k("#### 50%", "50", prompts=[prompt]) == gsm8k("#### 50", "50", prompts=[prompt]) == 1.0
        assert gsm8k("#### 5000%", "50", prompts=[prompt]) == gsm8k("#### 0.5", "50", prompts=[prompt]) == 0.0
    assert gsm8k("#### 50%", "50", prompts=["How many are left?"]) == gsm8k("#### 50%", "50") == 0.0
    assert gsm8k("#### 50%", "50%") == 1.0


@pytest.mark.parametrize("text", ["72½", "72 ½", "72¼ cups", "72⅓", "72⁴", "72¹⁰", "72₈", "negative 72", "Minus 72"])
@pytest.mark.parametrize("marked", [*MARKED, "so it is @"])
def test_a_fraction_a_power_or_a_sign_in_words_makes_another_number(text, marked):
    """To Python these characters are letters, which a unit has too."""
    for answer in ("72", "-72"):
        assert gsm8k(marked.replace("@", text), answer) == 0.0
    assert gsm8k(marked.replace("@", "72 m⁴"), "72") == gsm8k(marked.replace("@", "72 negative ions"), "72") == 1.0
