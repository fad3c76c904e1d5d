"""Describes the statistics of a run in sentences for people, one line for each hook.

--status, --report and the summary at the end of a run print these lines. statistics.py has the
statistics themselves.
"""

from collections.abc import Iterator, Mapping

from activation_extraction.common.visible import counted
from activation_extraction.store.statistics import Statistics

MOST_HOOKS = 8  # hooks whose encoding errors are listed
# Key of Statistics.codes -> name of the kind of tokens in messages.
KINDS_OF_TOKENS = {"sinks": "first tokens of samples", "others": "other tokens"}


def errors_in_words(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a line on the encoding errors of each hook that is stored as float8.

    Only the MOST_HOOKS hooks with the largest mean errors are listed. One more line counts the
    others.

    Args:
        statistics: Statistics by the hooks' names.
    """
    encoded = {name: hook.error for name, hook in statistics.items() if hook.error}
    largest_first = sorted(encoded, key=lambda name: -encoded[name]["others"].mean)
    for name in largest_first[:MOST_HOOKS]:
        sinks, others = encoded[name]["sinks"], encoded[name]["others"]
        yield (
            f"{name}: relative error of a token {others.mean:.2%} on average, at most "
            f"{others.worst:.2%}; first tokens of samples {sinks.mean:.2%}, {sinks.worst:.2%}"
        )
    if len(encoded) > MOST_HOOKS:
        smaller = counted(len(encoded) - MOST_HOOKS, "other hook")
        yield f"the errors of {smaller} are smaller (--json)"


def codes_in_words(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a line on the codes at each hook that has codes.

    A negative share of explained squared norms is left out of the line: `code_warnings` has a
    warning for it instead.

    Args:
        statistics: Statistics by the hooks' names.
    """
    for name, hook in statistics.items():
        if not hook.codes:
            continue
        both = hook.codes["sinks"].merge(hook.codes["others"])
        line = f"{name}: {both.features / max(both.tokens, 1):.1f} features per token"
        if both.cut:
            line += f", {both.cut:,} cut from {counted(both.cut_tokens, 'token')} (--encode_most)"
        shares = [
            f"{sums.explained:.1%} of {KINDS_OF_TOKENS[kind]}"
            for kind, sums in hook.codes.items()
            if sums.explained >= 0
        ]
        if shares:
            line += f"; the share of squared norms that they explain: {', '.join(shares)}"
        yield line


def code_warnings(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a warning for each hook and kind of tokens that features reconstruct worse than zeros.

    Args:
        statistics: Statistics by the hooks' names.
    """
    for name, hook in statistics.items():
        for kind, sums in hook.codes.items():
            if sums.explained < 0:
                yield (
                    f"{name}: the features explain nothing of {KINDS_OF_TOKENS[kind]}: what they "
                    f"leave has {sums.error / sums.square:.3g} times the squared norm of the "
                    "values; check that the autoencoder is for this model, hook and kind of tokens"
                )
