"""Which tokens are kept: the rules of --positions, and what is left of a sample."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import main
from conftest import tokenizer_of

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.text.token_choice import TokenChoice

SLICES = {  # a rule, the slice, how it is recorded
    "last": (slice(-1, None), "last:1"),
    "0:3": (slice(3), "first:3"),
    "every:4": (slice(None, None, 4), "every:4"),
    ":": (slice(None), "all"),
    ":-1": (slice(-1), ":-1"),
    "2:9:3": (slice(2, 9, 3), "2:9:3"),
    "-5:-1": (slice(-5, -1), "-5:-1"),
}


def choice_of(flags):
    options = parse_args(flags.split()).text_options
    return TokenChoice(options.positions, options.drop_token_ids)


@pytest.mark.parametrize("rule", SLICES)
def test_slices_mean_what_they_mean_in_python(rule):
    where, recorded = SLICES[rule]
    choice = choice_of(f"--positions={rule}")
    assert str(choice) == f"positions {recorded}" and choice.keeps_everything == (recorded == "all")
    assert choice == choice_of(f"--positions={recorded}")
    for length in (1, 2, 3, 8, 50):
        kept = choice.kept(7, np.zeros(length, np.int32))
        assert kept.dtype == np.int32 and kept.tolist() == list(range(length))[where]


def test_a_random_choice_depends_on_sample_position_and_seed_alone():
    """The positions are written down here: they may never change, or runs could not continue."""
    ids = np.zeros(2000, np.int32)
    choice = choice_of("--positions random:.1")
    assert str(choice) == "positions random:0.1:0"
    found = [choice.kept(index, ids) for index in range(300)]
    assert found[0][:8].tolist() == [4, 8, 18, 31, 39, 42, 76, 83]
    np.testing.assert_array_equal(choice.kept(4, ids[:500]), found[4][found[4] < 500])
    assert sum(map(len, found)) / 600_000 == pytest.approx(0.1, abs=0.002)  # five deviations
    counts = np.bincount(np.concatenate(found), minlength=2000)
    assert abs(counts.std() - (300 * 0.1 * 0.9) ** 0.5) < 0.5
    other = choice_of("--positions random:0.1:1").kept(0, ids)
    for each in (found[1], other):  # about 1 % of the tokens, as of independent choices
        assert 5 < len(np.intersect1d(found[0], each)) < 40


def test_a_random_choice_of_a_number_keeps_exactly_so_many():
    """The positions are written down here: they may never change, or runs could not continue."""
    choice = choice_of("--positions random:5:3:50")
    assert str(choice) == "positions random:5:3:50"
    assert choice == choice_of(f"--{choice}".replace(" ", "="))
    kept = [choice.kept(index, np.zeros(2000, np.int32)).tolist() for index in range(2)]
    assert kept == [[550, 788, 1283, 1640, 1645], [539, 603, 794, 1199, 1940]]
    for length in (1, 50, 51, 54, 55, 56, 300):
        positions = choice.kept(9, np.zeros(length, np.int32))
        assert positions.dtype == np.int32 and len(positions) == max(min(length - 50, 5), 0)
        assert (positions >= 50).all() and (np.diff(positions) > 0).all()
    # Each of 100 positions is chosen in about a tenth of the 1,000 samples.
    each_tenth = choice_of("--positions random:10")
    assert str(each_tenth) == "positions random:10:0"
    chosen = [each_tenth.kept(index, np.zeros(100, np.int32)) for index in range(1000)]
    counts = np.bincount(np.concatenate(chosen), minlength=100)
    assert counts.sum() == 10_000 and abs(counts - 100).max() < 50  # five deviations


def test_a_random_choice_of_a_number_counts_eligible_tokens():
    ids, eligible = np.arange(12, dtype=np.int32), np.arange(12) % 2 == 1
    kept = choice_of("--positions random:3:0:2").kept(0, ids, eligible)
    assert len(kept) == 3 and set(kept.tolist()) <= {5, 7, 9, 11}


@pytest.mark.parametrize("typed,recorded", [("random:1", "random:1:0"), ("random:1e-05:0", None)])
def test_digits_alone_are_a_number_and_anything_else_is_a_probability(typed, recorded):
    assert str(choice_of(f"--positions {typed}")) == f"positions {recorded or typed}"


def test_token_ids_are_dropped_after_positions_are_counted():
    ids = np.array([5, 9, 5, 5, 9, 7], np.int32)
    for flags, kept in (
        ("--drop_token_ids 5", [1, 4, 5]),
        ("--positions first:3 --drop_token_ids 9", [0, 2]),
        ("--positions last --drop_token_ids 7", []),
    ):
        assert choice_of(flags).kept(0, ids).tolist() == kept
    assert str(choice_of("--drop_token_ids 9 3 9")).endswith(", without the token ids 3, 9")


@pytest.mark.long
def test_tokens_may_be_dropped_by_their_names(inputs, tmp_path, capsys):
    """What is recorded are ids, so a run that began with these continues with names."""
    tokenizer = tokenizer_of(Path(inputs[1]), 2048)
    names = "<|endoftext|>", "\u0120", "e"  # added; byte-level for a space; a letter
    ids = sorted(map(tokenizer.token_to_id, names))
    more = "--max_samples", 9, "--output_dir", tmp_path
    assert main(*inputs, "--drop_token_ids", *ids, *more) == 0
    assert main(*inputs, "--drop_token_ids", ids[0], *names, *more) == 0
    assert "everything has been computed already" in capsys.readouterr().err
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    for part in ("identity", "configuration"):
        assert metadata[part]["drop_token_ids"] == ids
    stored = np.concatenate([sample.token_ids for sample in ActivationDataset(tmp_path)])
    assert len(stored) and not np.isin(stored, ids).any()
    assert main("--verify", "--output_dir", tmp_path, "--model_path", inputs[1]) == 0
