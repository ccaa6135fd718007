"""What the fields of a chat tell its template in addition to messages and tools."""

from typing import Any

from specdec.serving.http.faults import ApiError
from specdec.serving.openai.protocol import ChatRequest
from specdec.text.prompts import template_text


def template_options(body: ChatRequest, template: Any) -> dict[str, Any]:
    """Arguments of the template. Efforts and verbosity go to templates that read them, and are hints elsewhere."""
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message=true goes on with the last message, add_generation_prompt=true begins another; "
            "leave one out",
            param="continue_final_message",
        )
    options: dict[str, Any] = {}
    if body.continue_final_message:
        if not body.messages[-1].content:
            raise ApiError(
                400,
                "continue_final_message=true goes on with the last message, and that has no text; give it some",
                param="continue_final_message",
            )
        options["continue_final_message"] = True
    elif body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    text = template_text(template)
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None and name in text:
            options[name] = value
    if body.reasoning_effort == "none" and "enable_thinking" in text:
        options["enable_thinking"] = False
    return options
