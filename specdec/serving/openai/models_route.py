"""GET /v1/models and /version: what is served. Whether it is well: probes.py."""

from typing import Any

from fastapi import APIRouter

from specdec import __version__
from specdec.serving.state import ServeState, State

router = APIRouter()


@router.get("/v1/models")
async def list_models(state: State) -> dict[str, Any]:
    return {"object": "list", "data": [_card(state, name) for name in state.settings.model_names]}


@router.get("/v1/models/{name:path}")
async def one_model(name: str, state: State) -> dict[str, Any]:
    return _card(state, state.model_name(name))


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": __version__}


def _card(state: ServeState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "specdec",
        "max_model_len": state.engine.max_model_len,
    }
