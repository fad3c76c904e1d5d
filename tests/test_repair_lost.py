"""--verify and --repair after files were deleted behind a run's back, metadata.json among them."""

import pytest
from command_line import main
from test_repair import flags, lose, out, same, whole  # noqa: F401

from benchmarks.kill_and_resume import shards_in


@pytest.mark.parametrize("kept", ["metadata", "nothing"])
def test_what_is_lost_at_the_beginning_is_named_and_made_again(flags, whole, out, kept, capsys):  # noqa: F811
    lose(out, 1, 2, 3, 4, 5)
    if kept == "nothing":
        (out / "metadata.json").unlink()
    assert main("--verify", "--output_dir", out) == 1
    told = capsys.readouterr()
    assert "shard_0001.json to shard_0005.json: are missing" in told.out, told
    # Without metadata nothing says whether the run had reached the end of its data: it finds out.
    assert main(*flags, "--output_dir", out, "--repair") == (1 if kept == "nothing" else 0)
    if kept == "nothing":
        assert main(*flags, "--output_dir", out) == 0
    assert main("--verify", "--output_dir", out) == 0
    assert shards_in(out) == shards_in(whole)
    assert kept == "nothing" or same(out, whole)
