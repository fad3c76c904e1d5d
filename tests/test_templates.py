"""Which chat template renders a row; and templates that hang, or show no roles."""

import json
import threading
from dataclasses import replace

import pytest
from chat_templates import QWEN2_5, QWEN3, R1, VOCABULARY, chat_model, talk
from command_line import assert_refused, main
from row_files import write_rows

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import hosts
from activation_extraction.run.host_text import Text
from activation_extraction.text import tokenizer
from activation_extraction.text.chat import ChatTemplate
from activation_extraction.text.rows import UnusableRowError

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ASKED = parse_args(["--messages_column", "messages"])
PLAIN = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
"""
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN2_5}]


@pytest.fixture
def model(demo_inputs, tmp_path):
    """The demo's, with a template in its settings, in a file beside them, and for tools."""

    def make(template=None, beside=None, tool_use=None):
        tokenizer.pretrained.cache_clear()  # a run is a process of its own
        folder = chat_model(demo_inputs, tmp_path / "inputs", template)
        for name, source in (
            ("chat_template", beside),
            ("additional_chat_templates/tool_use", tool_use),
        ):
            if source is not None:
                (folder / f"{name}.jinja").parent.mkdir(exist_ok=True)
                (folder / f"{name}.jinja").write_text(source)
        return folder

    return make


def text_of(folder, asked=ASKED):
    return Text(asked, Checkpoint(str(folder)), VOCABULARY)


def load(folder):
    template = text_of(folder).template
    template.check()
    return template


@pytest.mark.parametrize(
    "where",
    [
        {"template": NAMED},
        {"template": QWEN3, "beside": PLAIN, "tool_use": QWEN2_5},
        {"tool_use": QWEN2_5},
    ],
    ids=["named", "beside", "for tools alone"],
)
def test_a_row_with_tools_takes_the_template_for_tools(where, model):
    """A file beside the settings goes before the template in them."""
    text = text_of(model(**where))
    template = text.template
    template.check()
    for tools in (TOOLS, [], None):
        row = {"messages": talk(), "tools": tools}
        read = text.rows.reader.read
        if not tools and set(where) == {"tool_use"}:
            with pytest.raises(UnusableRowError, match="for conversations with tools, tool"):
                read(row)
            continue
        expected = template.tokenizer.apply_chat_template(
            row["messages"], tools=tools or None, tokenize=False
        )
        assert read(row).text == expected
        assert ("<tools>" in expected) == bool(tools)


def test_templates_of_a_model_at_a_url(model, tmp_path, monkeypatch):
    """They are copied with its other small files, and go with them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = model(beside=PLAIN, tool_use=QWEN2_5)
    assert load(f"file://{folder}").digest == load(folder).digest
    (folder / "additional_chat_templates/tool_use.jinja").unlink()
    assert load(f"file://{model()}").digest == load(folder).digest


def test_the_template_of_a_processor_comes_last(model):
    """Older models with vision inputs have no other template."""
    beside = model() / "chat_template.json"
    beside.write_text(json.dumps({"chat_template": [PLAIN]}))
    with pytest.raises(InputError, match="has no chat template"):
        load(model())
    beside.write_text(json.dumps({"chat_template": PLAIN}))
    template = load(model())
    expected = template.tokenizer.apply_chat_template(talk(), chat_template=PLAIN, tokenize=False)
    assert template.content(talk(), None).text == expected
    assert load(model(QWEN3)).sources == {"default": QWEN3}
    assert load(model(beside=QWEN2_5)).sources == {"default": QWEN2_5}


def test_a_file_with_a_template_is_for_all_rows(model, tmp_path):
    (tmp_path / "own.jinja").write_text(QWEN3)
    asked = replace(ASKED, chat_template=str(tmp_path / "own.jinja"))
    template = text_of(model(NAMED), asked).template
    expected = template.tokenizer.apply_chat_template(
        talk(), tools=TOOLS, chat_template=QWEN3, tokenize=False
    )
    assert template.content(talk(), TOOLS).text == expected


def test_the_digest_covers_every_template(model):
    single = load(model(QWEN3)).digest
    digests = [load(model(beside=QWEN3, tool_use=tool_use)).digest for tool_use in (PLAIN, QWEN2_5)]
    assert len({single, *digests}) == 3


def test_a_run_keeps_its_template_for_tools(model, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": talk(), "tools": TOOLS}] * 3)
    flags = ["--dataset_path", rows, "--messages_column", "messages", "--layers_to_extract", 1]
    flags += ["--positions", "every:2", "--output_dir", tmp_path / "out", "--batch_size", 1]
    verify = "--verify", "--output_dir", tmp_path / "out", "--verify_samples", 2
    folder = model(beside=PLAIN, tool_use=QWEN2_5)
    assert main("--model_path", folder, *flags) == 0
    assert main(*verify, "--model_path", folder) == 0
    model(tool_use=QWEN3)
    capsys.readouterr()
    assert main("--model_path", folder, *flags) == 2
    assert "chat_template" in capsys.readouterr().err
    assert main(*verify, "--model_path", folder) == 2
    assert "the chat template is not the one that the stored activations" in capsys.readouterr().err


def test_templates_with_and_without_blocks_do_not_go_together(model):
    with pytest.raises(InputError, match="of its templates default and tool_use, one writes turns"):
        load(model(beside=PLAIN, tool_use=R1))


def test_a_system_message_may_come_late_where_turns_have_no_blocks(model):
    """R1's template puts it first, others where it is."""
    messages = [*talk("hi", "so"), {"role": "system", "content": "late"}]
    for source in (R1, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"):
        template = text_of(model(source)).template
        text = template.content(messages).text
        assert (text.find("late") < text.find("hi")) == (source == R1)


def test_a_template_without_blocks_gives_text_without_roles(model, tmp_path, capsys):
    """It is stored like any text; what needs roles is refused, and --verify renders it again."""
    folder = model(R1)
    rows = [{"messages": talk(f"why {n}", f"<think>hm</think>so {n}"), "id": n} for n in range(5)]
    rows[2] = {"messages": [{"role": "narrator", "content": "x"}], "id": 2}
    path, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    flags = ["--model_path", folder, "--dataset_path", path, "--messages_column", "messages"]
    needs = f"--model_path {folder} writes no turns between <|im_start|> and <|im_end|>"
    for more, named in (
        (["--roles", "user", "tool"], f"--roles user tool: {needs}"),
        (["--positions", "last_of_turn"], f"--positions last_of_turn: {needs}"),
    ):
        assert_refused(capsys, tmp_path, [*flags, *more], named)
    flags += ["--layers_to_extract", 1, "--output_dir", out, "--skip_bad_rows"]
    assert main(*flags, "--positions", "every:2") == 0
    stored = ActivationDataset(out)
    template = text_of(folder).template
    tokenizer = template.tokenizer
    assert [sample.doc_id for sample in stored] == [0, 1, 3, 4]
    for sample in stored:
        n = sample.doc_id
        text = f"<｜User｜>why {n}<｜Assistant｜>so {n}<｜end｜>"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sample.token_ids.tolist() == ids[::2]
    with pytest.raises(ValueError, match="role"):
        next(iter(stored.batches(4, roles=["user"])))
    verify = "--verify", "--output_dir", out, "--verify_samples", 4, "--model_path", folder
    assert main(*verify) == 0
    (out / "shard_0001.pkl.gz").write_bytes(b"damaged")
    assert main(*flags, "--positions", "every:2", "--repair") == 0
    assert main(*verify) == 0


@pytest.mark.parametrize("line", [0, 1, 2, 150])
def test_a_template_that_hangs_is_named_with_its_row(line, model, tmp_path, monkeypatch):
    """From the first conversation of all on, which is no row."""
    rows = [{"messages": talk(f"row {n}")} for n in range(1, 200)]
    path, folder = write_rows(tmp_path / "rows.jsonl", rows), model(QWEN3)
    where = f"{path} line {line}" if line else f"--model_path {folder}"
    said, go_on, rendered = [], threading.Event(), ChatTemplate._rendered

    def hanging(self, messages, tools):
        if messages[0]["content"] == (f"row {line}" if line else "a question"):
            assert go_on.wait(600)
        return rendered(self, messages, tools)

    def end(message):
        said.append(message)
        if f"{where}: " in message:
            go_on.set()

    monkeypatch.setattr(ChatTemplate, "_rendered", hanging)
    monkeypatch.setattr(hosts, "_end_process", end)
    flags = ["--model_path", folder, "--dataset_path", path, "--messages_column", "messages"]
    flags += ["--layers_to_extract", 1, "--output_dir", tmp_path / "out", "--stall_timeout", 2]
    assert main(*flags, "--batch_size", 1) == 0
    why = "no batch has become ready and no step has finished for 2 s (--stall_timeout)"
    assert any(
        each.startswith(f"error: rendering the chat template of {where}: {why}") for each in said
    )
