"""Messages and tools as rows have them: every kind of file gives the same conversation, and none of
its text is lost."""

import json

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from chat_templates import QWEN2_5, QWEN3, QWEN3_5, R1, TEMPLATES
from chat_templates import talk as exchange
from row_files import as_arrow, as_parquet, write_rows
from small_runs import stream_of

from activation_extraction.common.errors import RunError
from activation_extraction.run import demo
from activation_extraction.text.chat import ChatTemplate
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.messages import MessagesColumn
from activation_extraction.text.rows import RowForm
from activation_extraction.text.tokenizer import pretrained

JSON = pyarrow.json_()
# As Qwen3.5 and VL: a part that has the key is an image, whatever its value is.
IMAGES = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- for part in ([] if message.content is string else message.content) %}
{%- if 'image' in part %}<|image_pad|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{{- message.content if message.content is string }}{{ '<|im_end|>\n' }}
{%- endfor %}
"""
WITHOUT_SYSTEM = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{{- message.content if message.role != 'system' }}{{ '<|im_end|>\n' }}
{%- endfor %}
"""
TOOL_AS_JSON = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{{- {'output': message.content} | tojson if message.role == 'tool' else message.content }}
{{- '<|im_end|>\n' }}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, ["some words"])
    (folder / "config.json").write_text("{}")
    return pretrained(folder / "tokenizer.json")


@pytest.fixture
def texts_of(tokenizer):
    """The rendered rows of a file."""

    def texts_of(path, source, skip=False, **form):
        stream = stream_of(path, skip=skip, form=form_of(tokenizer, source, **form))
        return [document.content.text for document in stream if document]

    return texts_of


def form_of(tokenizer, source, **form):
    return RowForm(
        MessagesColumn("messages", ChatTemplate(tokenizer, {"default": source}, "", {})), **form
    )


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def talk(name="look", arguments=None, **content):
    """A conversation with a call. content: by role."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    said = {"user": "a question", "assistant": "so", "tool": "sunny", **content}
    return [
        {"role": "user", "content": said["user"]},
        {"role": "assistant", "content": said["assistant"], "tool_calls": [call]},
        {"role": "tool", "content": said["tool"]},
        {"role": "assistant", "content": "an answer"},
    ]


def part(text):
    return {"type": "text", "text": text}


def write(folder, rows):
    """The same rows in files of several kinds; the objects of the last three have the same keys."""
    write_rows(folder / "a.jsonl", rows)
    table = pyarrow.Table.from_pylist(rows)
    (folder / "b.parquet").write_bytes(as_parquet(table))
    (folder / "c.arrow").write_bytes(as_arrow(table, pyarrow.ipc.new_stream))
    (folder / "d.arrow").write_bytes(as_arrow(table))
    return [folder / name for name in ("a.jsonl", "b.parquet", "c.arrow", "d.arrow")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arrow_adds_no_keys_to_tools_and_arguments(name, texts_of, tokenizer, tmp_path):
    """Nor do the rows of the hub; null in a list is a value."""
    rows = [
        {
            "messages": talk("find", {"city": "Lima", "days": [{"first": 1}, {"last": 2}]}),
            "tools": [tool("find", city={"type": "string", "enum": ["Lima", None]})],
        },
        {
            "messages": talk("sum", {"numbers": "1 2"}),
            "tools": [tool("sum", numbers={"type": "string", "description": "two"})],
        },
    ]
    lines, *others = write(tmp_path, rows)
    expected = texts_of(lines, TEMPLATES[name])
    assert "Lima" in expected[0] and '["Lima", null]' in expected[0]
    for other in others:
        assert texts_of(other, TEMPLATES[name]) == expected
    for kind, file in (("parquet", others[0]), ("json", lines)):
        hub = datasets.load_dataset(kind, data_files=str(file), split="train", streaming=True)
        stream = DocumentStream(hub, form_of(tokenizer, TEMPLATES[name]))
        assert [document.content.text for document in stream] == expected


def test_a_null_that_is_written_as_json_is_a_value(texts_of, tokenizer, tmp_path):
    """In tools and arguments, as for transformers; a message and a call do without such keys."""
    schema = {"type": "integer", "default": None}
    messages = talk("find", {"city": None})
    bare = {"messages": messages, "tools": [tool("find", days=schema)]}
    messages = [{"name": None, **message} for message in messages]
    messages[1]["tool_calls"] = [{"id": None, **call} for call in messages[1]["tool_calls"]]
    write_rows(tmp_path / "a.jsonl", [bare, {**bare, "messages": messages}])
    shown = QWEN3 + "{% for m in messages %}{{ m.keys() | list }}{{ m.tool_calls }}{% endfor %}"
    found = texts_of(tmp_path / "a.jsonl", shown)
    assert (
        found[0]
        == found[1]
        == tokenizer.apply_chat_template(
            bare["messages"], tools=bare["tools"], chat_template=shown, tokenize=False
        )
    )
    assert '"default": null' in found[0] and '{"city": null}' in found[0]


def test_parts_of_text_out_of_arrow_are_no_images(texts_of, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": [part("a "), part("question")]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
    ]
    for file in write(tmp_path, rows):
        for source in (IMAGES, QWEN2_5, QWEN3):
            (text,) = texts_of(file, source, skip=True)
            assert "<|im_start|>user\na question<|im_end|>" in text


every_template = pytest.mark.parametrize(
    "source",
    [*TEMPLATES.values(), R1, IMAGES],
    ids=[*TEMPLATES, "r1", "images"],
)


@every_template
def test_text_and_parts_of_text_are_rendered_alike(source, texts_of, tmp_path):
    said = {"user": "a question", "assistant": "<think>\nhm\n</think>\n\nso", "tool": "sunny"}
    rows = [
        {"messages": talk(**{role: form(text) for role, text in said.items()})}
        for form in (str, lambda text: [part(text)], lambda text: [part(text[:2]), part(text[2:])])
    ]
    whole, *others = texts_of(write_rows(tmp_path / "a.jsonl", rows), source)
    assert others == [whole] * 2 and all(text in whole for text in ("a question", "so", "sunny"))


SAME = [
    {"role": "system", "content": " again\n"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "again"},
    {"role": "user", "content": "again \ud800"},
    {"role": "assistant", "content": "  again"},
]
LOST = {
    "a system's text": (WITHOUT_SYSTEM, SAME, "system: 'again'"),
    "text before thinking": (
        QWEN3,
        exchange("q", "first <think>x</think> then"),
        "assistant: 'first'",
    ),
    "text between thoughts": (
        QWEN3,
        exchange("then", "<think>x</think>first<think>y</think>then"),
        "assistant: 'first<think>y</think>then'",
    ),
    "an answer that is in the thinking": (
        QWEN3.replace("+ content.lstrip", "+ ''.lstrip"),
        exchange("q", "<think>\nanswer\n</think>\n\nanswer"),
        "assistant: 'answer'",
    ),
    "the second of two tools": (
        QWEN2_5.replace("+ message.content + '\n</tool", "+ messages[2].content + '\n</tool"),
        [*talk(tool="sun")[:3], *talk(tool="rain")[2:]],
        "tool: 'rain'",
    ),
    "without blocks": (R1.replace("+ message.content +", "+"), talk(), "user: 'a question'"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_text_that_the_template_leaves_out_makes_a_bad_row(case, texts_of, tmp_path):
    source, messages, why = LOST[case]
    rows = [{"messages": messages}, {"messages": [{"role": "user", "content": " "}]}]
    write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(RunError, match=r"a\.jsonl line 1: the chat template leaves out") as caught:
        texts_of(tmp_path / "a.jsonl", source)
    assert str(caught.value).endswith(f"text of the role {why}")
    assert len(texts_of(tmp_path / "a.jsonl", source, skip=True)) == 1


@every_template
def test_no_text_counts_as_left_out_that_is_there(source, texts_of, tmp_path):
    """Trimmed, several times the same, as JSON, or thinking that the template leaves out."""
    thinking = exchange("q", "<think>\nold\n</think>\n\nfirst")
    thinking += exchange("q", "without a beginning</think>second")
    rows = [{"messages": SAME}, {"messages": thinking}]
    again, thought = texts_of(write_rows(tmp_path / "a.jsonl", rows), source)
    assert again.count("again") == 5 and "first" in thought and "second" in thought
    rows = [{"messages": talk(tool='a "quoted"\nline é')}]
    (text,) = texts_of(write_rows(tmp_path / "a.jsonl", rows), TOOL_AS_JSON)
    assert '{"output": "a \\"quoted\\"\\nline é"}' in text


def test_the_hub_decodes_columns_of_json(tokenizer, texts_of, tmp_path):
    tools = [tool("find", days={"type": "integer", "default": None})]
    row = {"messages": talk("find", {"city": "Lima", "street": None}), "tools": tools}
    write_rows(tmp_path / "a.jsonl", [row])
    message = {key: datasets.Value("string") for key in ("role", "content")}
    message["tool_calls"] = datasets.List(datasets.Json())
    features = {"messages": datasets.List(message), "tools": datasets.List(datasets.Json())}
    messages = [{"tool_calls": None, **each} for each in row["messages"]]
    saved = datasets.Dataset.from_list([{**row, "messages": messages}], datasets.Features(features))
    saved.to_parquet(tmp_path / "b.parquet")
    expected = texts_of(tmp_path / "a.jsonl", QWEN3)
    assert texts_of(tmp_path / "b.parquet", QWEN3) == expected
    files = str(tmp_path / "b.parquet")
    hub = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    stream = DocumentStream(hub, form_of(tokenizer, QWEN3))
    assert [document.content.text for document in stream] == expected


def test_a_column_of_json_is_decoded_and_what_is_no_json_makes_a_bad_row(texts_of, tmp_path):
    texts = pyarrow.array([json.dumps(talk()), '{"cut', "[" * 100_000])
    table = pyarrow.table({"messages": pyarrow.ExtensionArray.from_storage(JSON, texts)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    why = r"row 1 \(both from 0\): column messages: not JSON: Unterminated string"
    with pytest.raises(RunError, match=why):
        texts_of(tmp_path / "a.parquet", QWEN3)
    write_rows(tmp_path / "a.jsonl", [{"messages": talk()}])
    expected = texts_of(tmp_path / "a.jsonl", QWEN3)
    assert texts_of(tmp_path / "a.parquet", QWEN3, skip=True) == expected


def test_kept_columns_keep_their_nulls(tokenizer, tmp_path):
    """Also the column of messages itself."""
    rows = [{"messages": exchange("q")[:1]}, {"messages": talk(arguments={"x": 1})}]
    _, *files = write(tmp_path, rows)
    form = form_of(tokenizer, QWEN3, keep_columns=("messages",))
    for file in files:
        first, _ = stream_of(file, form=form)
        kept = {"role": "user", "content": "q", "tool_calls": None}
        assert first.columns == {"messages": [kept]}


@pytest.mark.parametrize("source", [*TEMPLATES.values(), R1], ids=[*TEMPLATES, "r1"])
def test_arguments_as_json_text_are_objects_for_every_template(source, texts_of, tmp_path):
    """Where a template writes text alone, it gets the JSON of the object."""
    arguments = {"city": "Lima", "é": [1, None]}
    rows = [
        {"messages": talk("find", arguments)},
        {"messages": talk("find", json.dumps(arguments))},
        {"messages": talk("find", '{"city":"Lima",\n"\\u00e9":[1,null]}')},
    ]
    for row in rows[:2]:  # a call may also come without the object around it
        asked, answer, *rest = row["messages"]
        calls = [call["function"] for call in answer["tool_calls"]]
        rows.append({"messages": [asked, {**answer, "tool_calls": calls}, *rest]})
    write_rows(tmp_path / "a.jsonl", rows)
    whole, *others = texts_of(tmp_path / "a.jsonl", source)
    assert others == [whole] * 4
    assert source == QWEN3_5 or '{"city": "Lima", "é": [1, null]}' in whole


@pytest.mark.parametrize("arguments", ['{"city": "Li', "[1]", '"x"', "plain", None])
def test_other_arguments_are_what_transformers_renders(arguments, texts_of, tokenizer, tmp_path):
    messages = talk("find", arguments)
    write_rows(tmp_path / "a.jsonl", [{"messages": messages}])
    for source in (QWEN2_5, QWEN3):
        expected = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert texts_of(tmp_path / "a.jsonl", source) == [expected]
