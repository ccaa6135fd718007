"""How models write calls and thoughts, in all formats that the server reads."""

import json


def tagged(name, arguments):
    written = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def invoked(name, arguments):
    written = "".join(
        f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{written}</invoke>\n</minimax:tool_call>'


def as_glm(name, arguments):
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    written = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items())
    return f"<tool_call>{name}{written}</tool_call>"


def as_gemma(value, quote='<|"|>'):
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


def called(form):
    return lambda name, arguments: form % json.dumps({"name": name, "arguments": arguments})


def headed(form):
    return lambda name, arguments: form % (name, json.dumps(arguments))


THINK = "<think>\n%s\n</think>\n\n"
"""A thought as Qwen writes it."""
CHANNEL = "<|channel>thought\n%s\n<channel|>"
"""A thought as Gemma 4 writes it."""
# parser, thoughts, how a call and a thought are written
FORMATS = {
    "qwen": ("hermes", "qwen3", called("<tool_call>\n%s\n</tool_call>"), THINK),
    "coder": ("hermes", "none", tagged, None),
    "glm": ("hermes", "qwen3", as_glm, THINK),
    "r1": ("hermes", "deepseek_r1", called("<tool_call>%s</tool_call>"), THINK),
    "gemma": ("gemma4", "gemma4", lambda f, args: f"<|tool_call>call:{f}{as_gemma(args)}<tool_call|>", CHANNEL),
    "functiongemma": (
        *("functiongemma", "none"),
        lambda f, args: f"<start_function_call>call:{f}{as_gemma(args, '<escape>')}<end_function_call>",
        None,
    ),
    "mistral": ("mistral", "mistral", lambda f, args: f"[TOOL_CALLS]{f}[ARGS]{json.dumps(args)}", "[THINK]%s[/THINK]"),
    "granite": ("granite", "none", called("<|tool_call|>[%s]<|/tool_call|>"), None),
    "cohere": ("cohere", "none", called("<|START_ACTION|>[%s]<|END_ACTION|>"), None),
    "deepseek": (
        *("deepseek_v3", "qwen3"),
        headed(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>"
        ),
        THINK,
    ),
    "deepseek3.1": (
        *("deepseek_v3", "deepseek_r1"),
        headed("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        THINK,
    ),
    "kimi": (
        *("kimi_k2", "qwen3"),
        headed(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>%s"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
        THINK,
    ),
    "minimax": ("minimax_m2", "qwen3", invoked, THINK),
    "harmony": (
        *("harmony", "none"),
        lambda f, args: (
            f"<|start|>assistant<|channel|>commentary to=functions.{f} <|constrain|>json<|message|>{json.dumps(args)}"
            "<|call|>"
        ),
        "<|start|>assistant<|channel|>analysis<|message|>%s<|end|>",
    ),
}
HARMONY_TEXT = "<|start|>assistant<|channel|>final<|message|>%s<|end|>"
