"""LlamaIndex: llama-index-llms-openai-like."""

from checks import QUESTION, Answer, run
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike


def model_of(url: str, model: str, **options: object) -> OpenAILike:
    return OpenAILike(
        api_base=url, api_key="none", model=model, is_chat_model=True, context_window=3500, max_tokens=60, **options
    )


def chat(url: str, model: str) -> None:
    assert model_of(url, model).complete(QUESTION).text


def stream(url: str, model: str) -> None:
    assert "".join(part.delta or "" for part in model_of(url, model).stream_complete(QUESTION))


def completions(url: str, model: str) -> None:
    made = OpenAILike(api_base=url, api_key="none", model=model, is_chat_model=False, max_tokens=12)
    assert made.complete(QUESTION[:20]).text


def structured(url: str, model: str) -> None:
    made = model_of(url, model, is_function_calling_model=True)
    assert isinstance(made.structured_predict(Answer, PromptTemplate(QUESTION)), Answer)


run(chat=chat, stream=stream, completions=completions, structured=structured)
