"""Chat templates: expressions and statements from a grammar, and damaged templates of the usual kind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from npu_runtime.llm.chat_template import render_chat

from ..mutations import mutate_bytes, mutate_tree

_USUAL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' ~ m['content'] "
    "~ ' [/INST]' }}{% endfor %}",
    "{%- set ns = namespace(found=false, last=messages|length - 1) -%}{%- for m in messages[::-1] -%}"
    "{%- set ns.last = loop.index0 -%}{%- if m.content is string and m.role in ['user', 'tool'] -%}{%- break -%}"
    "{%- endif -%}{%- endfor -%}{%- macro part(x, n=2) -%}{{ x | tojson(indent=n) }}{%- endmacro -%}"
    "{{ part(messages) }}{{ strftime_now('%d %b %Y') }}",
)
_NUMBERS = ("0", "1", "-1", "2", "3", "17", "0.5", "100", "1000", "'7'")
_BOMBS = ("99999", "20000000000", "10 ** 10 ** 10", "range(99999)", "'%20000000000d' % 1", "lipsum(n=99999)")
_NAMES = (
    "messages", "messages[0]", "messages[0].content", "add_generation_prompt", "bos_token", "missing", "x", "y",
    "loop.index", "ns.a", "namespace(a=1)", "range(5)", "lipsum(n=1)", "cycler(1, 2)", "joiner()", "dict(a=1)", "none",
    "true", "[]", "{}", "'text'", "'%s%d'", "''.__class__", "messages.append", "self", "caller",
)  # fmt: skip
_BINARY = (
    "+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is", "if x else", ".", ",",
)  # fmt: skip
_FILTERS = (
    "length", "upper", "trim", "list", "join", "join('-')", "tojson", "tojson(indent=2)", "first", "last", "sum",
    "sort", "reverse", "unique", "int", "float", "string", "replace('a', 'bb')", "batch(3, 'x')", "slice(2)",
    "center(40)", "indent(2)", "wordwrap(3)", "format(1)", "default('d')", "groupby('role')", "map('upper')",
    "map(attribute='role')", "selectattr('role')", "items", "dictsort", "round(2)", "safe", "escape", "random",
    "urlize", "xmlattr", "truncate(5)", "pprint", "attr('format')", "nothing", "filesizeformat",
)  # fmt: skip
_CALLS = (
    ".format(1)", ".zfill(30)", ".ljust(9)", ".join(['a', 'b'])", ".split()", ".items()", ".strip()", "()", "[0]",
    "[1:]", "['role']", ".replace('t', 'uu')", ".encode()", ".__class__", ".mro()", "(1, a=2)", ".update({})",
)  # fmt: skip
_CONTENTS = ("hello", "", "{{ x }}", "<&>")


def case(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.4:
        template = mutate_bytes(rng, rng.choice(_USUAL).encode(), rng.choice(_USUAL).encode()).decode(errors="replace")
    else:
        template = _statements(rng, 3)
    messages: list[Any] = [
        {
            "role": rng.choice(("system", "user", "assistant", "é")),
            "content": rng.choice(("hello", "", "{{ x }}", "<&>")),
        }
        for _ in range(rng.randint(1, 4))
    ]
    if rng.random() < 0.2:
        mutate_tree(rng, messages)
    text = render_chat(template, messages, {"bos_token": "<s>"})
    assert isinstance(text, str)


def _statements(rng: random.Random, depth: int) -> str:
    return "".join(_statement(rng, depth) for _ in range(rng.randint(1, 3)))


def _statement(rng: random.Random, depth: int) -> str:
    value = _expression(rng, 2)
    if depth == 0:
        return rng.choice((f"{{{{ {value} }}}}", "text\n", f"{{% set x = {value} %}}", "{# comment #}"))
    body = _statements(rng, depth - 1)
    return rng.choice((
        f"{{{{ {value} }}}}",
        f"{{% if {value} %}}{body}{{% elif x %}}{{% else %}}{body}{{% endif %}}",
        f"{{%- for x in {value} -%}}{body}{{%- else -%}}{{%- endfor -%}}",
        f"{{% for x, y in {value} recursive %}}{body}{{{{ loop(y) }}}}{{% endfor %}}",
        f"{{% set x = {value} %}}{body}",
        f"{{% set x %}}{body}{{% endset %}}{{{{ x }}}}",
        f"{{% set ns = namespace(a={value}) %}}{{% set ns.a = ns.a + ns.a %}}{body}",
        f"{{% macro m(x={value}) %}}{body}{{% endmacro %}}{{{{ m({value}) }}}}",
        f"{{% filter upper %}}{body}{{% endfilter %}}",
        f"{{% call(x) m() %}}{body}{{% endcall %}}",
        f"{{% for x in {value} %}}{{% break %}}{{% endfor %}}",
        f"{{{{ raise_exception({value}) }}}}",
        f"{{{{ strftime_now({value}) }}}}",
        f"{{% include {value} %}}",
        f"{{% raw %}}{body}{{% endraw %}}",
        f"{{% with x = {value} %}}{body}{{% endwith %}}",
    ))  # fmt: skip


def _expression(rng: random.Random, depth: int) -> str:
    if rng.random() < 0.002:
        return rng.choice(_BOMBS)
    if depth == 0:
        return rng.choice((*_NAMES, *_NUMBERS))
    a, b = _expression(rng, depth - 1), _expression(rng, depth - 1)
    return rng.choice((
        a, f"({a} {rng.choice(_BINARY)} {b})", f"{a} | {rng.choice(_FILTERS)}", f"{a}{rng.choice(_CALLS)}",
        f"[{a}, {b}]", f"{{'k': {a}}}", f"not {a}", f"-{a}", f"range({a})", f"({a} if {b} else {b})", f"{a}[{b}]",
        f"{a} is {rng.choice(('string', 'mapping', 'defined', 'none', 'divisibleby(3)', 'nothing'))}",
    ))  # fmt: skip
