"""Sets how many examples Hypothesis tries of a property that needs its own number."""

from hypothesis import settings

_PROFILE_EXAMPLES = 100
"""Examples of a property in Hypothesis's default profile."""


def num_examples(count: int) -> int:
    """Returns `count`, or less where the profile tries fewer examples, as in the quick tier."""
    return max(1, min(count, count * settings().max_examples // _PROFILE_EXAMPLES))
