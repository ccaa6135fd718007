"""GET /v1/models and /version: the served model. For health see probes.py."""

from typing import Any

from fastapi import APIRouter

from specdec import __version__
from specdec.serving.http.answers import refusals
from specdec.serving.http.events import JsonResponse
from specdec.serving.openai.answer_models import ModelCard, ModelList, Version
from specdec.serving.state import ServeState, StateDep

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
async def list_models(state: StateDep) -> JsonResponse:
    return JsonResponse({"object": "list", "data": [_card(state, name) for name in state.settings.model_names]})


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=refusals(404))
async def one_model(name: str, state: StateDep) -> JsonResponse:
    return JsonResponse(_card(state, state.model_name(name)))


@router.get("/version", response_model=Version)
async def read_version() -> JsonResponse:
    return JsonResponse({"version": __version__})


def _card(state: ServeState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "specdec",
        "max_model_len": state.engine.max_model_len,
    }
