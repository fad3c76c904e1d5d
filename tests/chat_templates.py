"""Defines chat templates for tests, random conversations, and a model that knows their markers.

The templates are written for these tests, modelled on those of Qwen2.5, Qwen3, Qwen3.5, the
distilled DeepSeek-R1 and Llama 3.2.
"""

import json

from conftest import inputs_with
from tokenizers import AddedToken, Tokenizer

from activation_extraction.run import demo

VOCABULARY = 2064  # ids enough for the tokens of the demo's tokenizer and the markers

TOOLS = """\
{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n\nYou may call functions:\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools><|im_end|>\n' }}
"""
TOOL_MESSAGE = """\
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
"""
CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
"""
# Qwen3.5 writes the arguments as tags, and takes them as an object alone.
TAGGED_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
{%- for name, value in call.arguments | items %}
{{- '<parameter=' + name + '>\n' }}
{{- value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
"""
LAST_QUESTION = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
"""
# Thinking is left out of answers before the last question. Answers after it always have it, even if
# it is empty.
THINKING = """\
{%- set content, thinking = message.content or '', '' %}
{%- if message.reasoning_content is string %}{% set thinking = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
"""
SYSTEM = """\
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
"""


def _template(system, assistant, calls):
    return f"""\
{LAST_QUESTION}
{{%- if tools %}}{TOOLS}{{% else %}}{system}{{% endif %}}
{{%- for message in messages %}}
{{%- if message.role == 'tool' %}}{TOOL_MESSAGE}
{{%- elif message.role == 'assistant' %}}{assistant}{calls}{{{{ '<|im_end|>\\n' }}}}
{{%- elif message.role == 'user' or not loop.first %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""


PLAIN = "{{- '<|im_start|>assistant\n' + (message.content or '') }}"
QWEN2_5 = _template(
    SYSTEM + "{%- else %}{{ '<|im_start|>system\nYou are a test.<|im_end|>\n' }}{% endif %}",
    PLAIN,
    CALLS,
)
QWEN3 = _template(SYSTEM + "{%- endif %}", THINKING, CALLS)
QWEN3_5 = _template(SYSTEM + "{%- endif %}", THINKING, TAGGED_CALLS)
# Like DeepSeek-R1-Distill: the system's text comes first, users' messages have no end marker,
# thinking is left out, and calls have their arguments only as text.
R1 = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = message.content %}{% endif %}
{%- endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content + '' }}
{%- elif message.role == 'tool' %}{{ '<｜tool｜>' + message.content + '' }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '<｜call｜>' + call.name + '\n' + call.arguments }}
{%- endfor %}
{{- '<｜end｜>' }}
{%- endif %}
{%- endfor %}
"""
# Like Llama 3.2: headers between two markers, <|begin_of_text|>, and a date in the system's turn.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
"""
TEMPLATES = {"qwen2.5": QWEN2_5, "qwen3": QWEN3, "qwen3.5": QWEN3_5}
MARKERS = ["<|im_start|>", "<|im_end|>"]
# Qwen has a token of two newlines, which can lie across the border between a header and a content.
TAGS = ["\n\n", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TAGS += ["<tool_response>", "</tool_response>"]


def add_markers(model, template):
    """Adds the markers to the tokenizer in a model's folder, and, unless it is None, a template."""
    path = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    path.write_text(tokenizer.to_str())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    if template is not None:
        settings["chat_template"] = template
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def chat_model(demo_inputs, folder, template):
    """Makes a copy of the demo's model, unless it exists, and adds the markers and a template.

    Args:
        demo_inputs: The demo's inputs.
        folder: The folder of the copied inputs.
        template: The chat template. None for a model without one.

    Returns:
        The folder of the model.
    """
    if not (folder / "model").exists():
        inputs_with({**demo.MODEL_CONFIG, "vocab_size": VOCABULARY}, demo_inputs, folder)
    add_markers(folder / "model", template)
    return folder / "model"


def talk(question="a question", answer="an answer"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


LOOK = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
WORDS = [
    "word",
    "two words",
    " spaces ",
    "line\n",
    "\nline",
    "\n\n",
    "é",
    "🙂🙂",
    "中文",
    "",
    "a<b",
]


def conversation(chance):
    """Returns a random row with a conversation of several turns.

    It may have tools, thinking, Unicode and empty contents.
    """

    def words(most):
        return "".join(chance.choices(WORDS, k=chance.randint(0, most)))

    def answer():
        message = {"role": "assistant", "content": words(9)}
        kind = chance.random()
        if kind < 0.25:
            message["reasoning_content"] = words(6)
        elif kind < 0.5:
            message["content"] = f"<think>\n{words(6)}\n</think>\n\n{words(6)}"
        return message

    messages = [{"role": "system", "content": words(5)}] if chance.random() < 0.5 else []
    tools = LOOK if chance.random() < 0.4 else None
    for _ in range(chance.randint(1, 4)):
        messages.append({"role": "user", "content": words(9)})
        for _ in range(chance.choice([0, 0, 1, 2]) if tools else 0):
            calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
            messages.append({**answer(), "tool_calls": calls})
            messages += [{"role": "tool", "content": words(4)}] * chance.randint(1, 2)
        messages.append(answer())
    return {"messages": messages, "tools": tools}
