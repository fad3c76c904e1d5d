"""Messages and tools as rows have them: every kind of file gives the same conversation, and none of
its text is lost."""

import json

import datasets
import pyarrow
import pytest
from chat_templates import QWEN2_5, QWEN3, QWEN3_5, R1, TEMPLATES
from chat_templates import talk as exchange
from row_files import as_arrow, as_parquet, write_rows
from small_runs import documents_in, stream_of

from activation_extraction.common.errors import RunError
from activation_extraction.run import demo
from activation_extraction.text.chat import ChatTemplate, MessagesColumn
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.rows import RowSchema
from activation_extraction.text.tokenizer import read_pretrained

# As Qwen3.5 and VL: a part that has the key is an image, whatever its value is.
IMAGES = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- for part in ([] if message.content is string else message.content) %}
{%- if 'image' in part %}<|image_pad|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{{- message.content if message.content is string }}{{ '<|im_end|>\n' }}
{%- endfor %}
"""
WITHOUT_SYSTEM = IMAGES.replace("content is string }}", "role != 'system' }}")
every_template = pytest.mark.parametrize(
    "source", [*TEMPLATES.values(), R1, IMAGES], ids=[*TEMPLATES, "r1", "images"]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, ["some words"])
    (folder / "config.json").write_text("{}")
    return read_pretrained(folder / "tokenizer.json")


@pytest.fixture
def texts_of(tokenizer):
    """The rendered rows of a file; `hub`: as the hub streams them."""

    def texts_of(path, source, skip=False, hub=False):
        template = ChatTemplate(tokenizer, {"default": source}, "", {})
        schema = RowSchema((MessagesColumn("messages", template),))
        stream = stream_of(path, skip=skip, schema=schema)
        if hub:
            kind = "parquet" if path.suffix == ".parquet" else "json"
            rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
            stream = DocumentStream(rows, schema)
        return [document.content.text for document in documents_in(stream) if document]

    return texts_of


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def talk(name="look", arguments=None, answer="so", result="sunny"):
    """A conversation with a call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
    return [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": answer, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "an answer"},
    ]


def write(folder, rows):
    """The same rows in files of several kinds; the objects of the last two have the same keys."""
    write_rows(folder / "a.jsonl", rows)
    table = pyarrow.Table.from_pylist(rows)
    (folder / "b.parquet").write_bytes(as_parquet(table))
    (folder / "c.arrow").write_bytes(as_arrow(table))
    return [folder / name for name in ("a.jsonl", "b.parquet", "c.arrow")]


@pytest.mark.parametrize("source", [QWEN3, QWEN3_5], ids=["qwen3", "qwen3.5"])
def test_arrow_adds_no_keys_to_tools_and_arguments(source, texts_of, tmp_path):
    """The rows of the hub have none, either; null in a list is a value."""
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
    expected = texts_of(lines, source)
    assert "Lima" in expected[0] and '["Lima", null]' in expected[0]
    for other in others:
        assert texts_of(other, source) == expected
    for file in (lines, others[0]):
        assert texts_of(file, source, hub=True) == expected


def test_a_null_in_json_is_a_value(texts_of, tokenizer, tmp_path):
    """It is in tools, arguments and calls, as for transformers. A column may hold JSON by a type of
    `datasets`."""
    messages = talk("find", {"city": None})
    tools = [tool("find", days={"type": "integer", "default": None})]
    shown = QWEN3 + "{% for m in messages %}{{ m.keys() | list }}{{ m.tool_calls }}{% endfor %}"
    given = {"tools": tools, "chat_template": shown, "tokenize": False}
    expected = tokenizer.apply_chat_template(messages, **given)
    assert '"default": null' in expected and '{"city": null}' in expected

    more = [{"name": None, **message} for message in messages]
    more[1]["tool_calls"] = [{"id": None, **call} for call in messages[1]["tool_calls"]]
    rows = [{"messages": each, "tools": tools} for each in (messages, more)]
    both = [tokenizer.apply_chat_template(each, **given) for each in (messages, more)]
    assert "'id': None" in both[1]
    assert texts_of(write_rows(tmp_path / "a.jsonl", rows), shown) == both
    message = {key: datasets.Value("string") for key in ("role", "content")}
    message["tool_calls"] = datasets.List(datasets.Json())
    features = {"messages": datasets.List(message), "tools": datasets.List(datasets.Json())}
    row = {"messages": [{"tool_calls": None, **each} for each in messages], "tools": tools}
    saved = datasets.Dataset.from_list([row], datasets.Features(features))
    saved.to_parquet(tmp_path / "b.parquet")
    for hub in (False, True):
        assert texts_of(tmp_path / "b.parquet", shown, hub=hub) == [expected]


def answers(**answer):
    """A conversation whose first answer is a call, with these keys as well."""
    question, call, *others = talk()
    return [question, {**call, **answer}, *others]


# Messages that have null keys, by what is null.
NULLS = {
    "content": answers(content=None),
    "no calls": [{**message, "tool_calls": None} for message in exchange()],
    "reasoning": answers(reasoning_content=None, reasoning=None, thinking=None),
    "a name": answers(name=None),
    "in a call": answers(tool_calls=[{"id": None, "function": {"name": "look", "arguments": {}}}]),
    "in a function": answers(
        tool_calls=[{"function": {"name": "look", "arguments": {"a": None}, "strict": None}}]
    ),
    "arguments": answers(tool_calls=[{"function": {"name": "look", "arguments": None}}]),
    "spoken": [{"from": "human", "value": "q", "role": None}, {"from": "gpt", "value": None}],
}
SHOWN = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.content is none %}null{% elif m.content is defined %}{{ m.content }}{% endif %}
{{- m.keys() | list }}{{ m.tool_calls }}<|im_end|>
{% endfor %}"""


@pytest.mark.parametrize("source", [SHOWN, *TEMPLATES.values()], ids=["shown", *TEMPLATES])
@pytest.mark.parametrize("case", NULLS)
def test_null_keys_of_messages_are_what_transformers_makes_of_them(
    case, source, texts_of, tokenizer, tmp_path
):
    """Also in JSON in a column. Where transformers cannot render them, the row is a bad one."""
    rows = [{"messages": NULLS[case]}, {"messages": json.dumps(NULLS[case])}]
    due = exchange("q", "") if case == "spoken" else NULLS[case]
    try:
        expected = [tokenizer.apply_chat_template(due, chat_template=source, tokenize=False)] * 2
    except Exception:
        expected = []
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert texts_of(path, source, skip=True) == expected
    assert expected or case in ("content", "arguments")


@every_template
def test_text_and_parts_of_text_are_rendered_alike(source, texts_of, tmp_path):
    """The keys that Arrow adds to a part do not make it an image; an image makes a bad row."""

    def parts(text, cut):
        return [{"type": "text", "text": each} for each in (text[:cut], text[cut:])]

    messages = talk(arguments={"x": 1}, answer="<think>\nhm\n</think>\n\nso")
    image = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
    rows = [
        {"messages": [{**each, "content": parts(each["content"], cut)} for each in messages]}
        for cut in (0, 2)
    ]
    (whole,) = texts_of(write_rows(tmp_path / "x.jsonl", [{"messages": messages}]), source)
    assert all(text in whole for text in ("a question", "so", "sunny", "an answer"))
    for file in write(tmp_path, [*rows, {"messages": image}]):
        assert texts_of(file, source, skip=True) == [whole] * 2


SAME = [
    {"role": "system", "content": " again\n"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "again"},
    {"role": "user", "content": "again \ud800"},
    {"role": "assistant", "content": "  again"},
]
LOST = {  # a template, messages, the text that it leaves out
    "a system's text": (WITHOUT_SYSTEM, SAME, "system: 'again'"),
    "text before thinking": (
        QWEN3,
        exchange("q", "first <think>x</think> then"),
        "assistant: 'first'",
    ),
    "the second of two tools": (
        QWEN2_5.replace("+ message.content + '\n</tool", "+ messages[2].content + '\n</tool"),
        [*talk(result="sun")[:3], *talk(result="rain")[2:]],
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
    """It may be trimmed, several times the same, or thinking that the template leaves out."""
    thinking = exchange("q", "<think>\nold\n</think>\n\nfirst")
    thinking += exchange("q", "without a beginning</think>second")
    rows = [{"messages": SAME}, {"messages": thinking}]
    again, thought = texts_of(write_rows(tmp_path / "a.jsonl", rows), source)
    assert again.count("again") == 5 and "first" in thought and "second" in thought


@every_template
def test_arguments_as_json_text_are_objects_for_every_template(source, texts_of, tmp_path):
    """Where a template writes text alone, it gets the JSON of the object. A call may come without
    the object around it."""
    arguments = {"city": "Lima", "é": [1, None]}
    every = arguments, json.dumps(arguments), '{"city":"Lima",\n"\\u00e9":[1,null]}'
    rows = [{"messages": talk("find", each)} for each in every]
    for row in rows[:2]:
        asked, answer, *rest = row["messages"]
        calls = [call["function"] for call in answer["tool_calls"]]
        rows.append({"messages": [asked, {**answer, "tool_calls": calls}, *rest]})
    whole, *others = texts_of(write_rows(tmp_path / "a.jsonl", rows), source)
    assert others == [whole] * 4
    assert source in (QWEN3_5, IMAGES) or '{"city": "Lima", "é": [1, null]}' in whole
