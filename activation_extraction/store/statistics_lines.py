"""Describes the statistics of a run for people, in one line of text for each hook.

--status, --report and the summary at the end of a run print these lines. statistics.py declares and
computes the statistics.
"""

from collections.abc import Iterator, Mapping

from activation_extraction.common.visible import counted
from activation_extraction.store.statistics import Statistics

# Largest number of hooks whose encoding errors are listed, because a run may store hundreds of
# hooks.
MAX_LISTED_HOOKS = 8
# Phrases for the kinds of tokens, by the keys of these kinds in Statistics.codes.
KINDS_OF_TOKENS = {"sinks": "first tokens of samples", "others": "other tokens"}


def error_lines(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a line on the encoding errors of each hook that is stored as float8.

    The error of a token is relative to the norm of its activation (see `EncodingError`). Only the
    MAX_LISTED_HOOKS hooks with the largest mean errors, not counting the first tokens of samples,
    are listed. One more line counts the remaining hooks.

    Args:
        statistics: Statistics by the full names of the hooks.
    """
    encoding_errors_by_hook_name = {
        hook_name: hook_statistics.error
        for hook_name, hook_statistics in statistics.items()
        if hook_statistics.error
    }
    hook_names = sorted(
        encoding_errors_by_hook_name,
        key=lambda hook_name: -encoding_errors_by_hook_name[hook_name]["others"].mean,
    )
    for hook_name in hook_names[:MAX_LISTED_HOOKS]:
        error_of_sinks = encoding_errors_by_hook_name[hook_name]["sinks"]
        error_of_other_tokens = encoding_errors_by_hook_name[hook_name]["others"]
        yield (
            f"{hook_name}: relative error of a token {error_of_other_tokens.mean:.2%} on average, "
            f"at most {error_of_other_tokens.worst:.2%}; first tokens of samples "
            f"{error_of_sinks.mean:.2%}, {error_of_sinks.worst:.2%}"
        )
    if len(encoding_errors_by_hook_name) > MAX_LISTED_HOOKS:
        unlisted_hooks_phrase = counted(
            len(encoding_errors_by_hook_name) - MAX_LISTED_HOOKS, "other hook"
        )
        yield f"the errors of {unlisted_hooks_phrase} are smaller (--json)"


def code_lines(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a line on the codes at each hook that has codes.

    The line contains the mean number of features per token, and the fraction of the activations'
    squared norms that the features explain. A negative fraction is left out, because
    `code_warnings` yields a warning for it.

    Args:
        statistics: Statistics by the full names of the hooks.
    """
    for hook_name, hook_statistics in statistics.items():
        if not hook_statistics.codes:
            continue
        code_sums = hook_statistics.codes["sinks"].merge(hook_statistics.codes["others"])
        codes_line = (
            f"{hook_name}: {code_sums.features / max(code_sums.tokens, 1):.1f} features per token"
        )
        if code_sums.cut:
            cut_tokens_phrase = counted(code_sums.cut_tokens, "token")
            codes_line += f", {code_sums.cut:,} cut from {cut_tokens_phrase} (--encode_most)"
        explained_fraction_phrases = [
            f"{code_statistics_of_token_kind.explained:.1%} of {KINDS_OF_TOKENS[token_kind]}"
            for token_kind, code_statistics_of_token_kind in hook_statistics.codes.items()
            if code_statistics_of_token_kind.explained >= 0
        ]
        if explained_fraction_phrases:
            codes_line += "; the share of squared norms that they explain: "
            codes_line += ", ".join(explained_fraction_phrases)
        yield codes_line


def code_warnings(statistics: Mapping[str, Statistics]) -> Iterator[str]:
    """Yields a warning for each hook whose codes reconstruct activations worse than zeros would.

    The first tokens of samples and all other tokens are examined separately.

    Args:
        statistics: Statistics by the full names of the hooks.
    """
    for hook_name, hook_statistics in statistics.items():
        for token_kind, code_sums in hook_statistics.codes.items():
            if code_sums.explained < 0:
                yield (
                    f"{hook_name}: the features explain nothing of {KINDS_OF_TOKENS[token_kind]}: "
                    f"what they leave has {code_sums.error / code_sums.square:.3g} times the "
                    "squared norm of the values; check that the autoencoder is for this model, "
                    "hook and kind of tokens"
                )
