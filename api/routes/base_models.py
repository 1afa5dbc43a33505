"""/v1/base-models: the catalogue of base models for fine-tuning."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from api.context import Caller, NoParameters, TheJobs
from api.http.caching import answer
from api.problems import declare
from dray import views
from service.config.models_file import CatalogueModel
from service.domain.errors import ModelNotFound

router = APIRouter(prefix="/v1/base-models", tags=["base models"])


@router.get(
    "",
    operation_id="list_base_models",
    response_model=views.CataloguePage,
    dependencies=[NoParameters],
    responses=declare("invalid_parameter"),
)
async def list_base_models(request: Request, jobs: TheJobs, _: Caller) -> Response:
    """List the base models in the server's catalogue, in the operator's order."""
    found = (jobs.models.current() or {}).values()
    return answer(request, views.CataloguePage(items=[_view(one) for one in found]))


@router.get(
    "/{name}",
    operation_id="get_base_model",
    response_model=views.CatalogueEntry,
    dependencies=[NoParameters],
    responses=declare("malformed_request", "invalid_parameter", "model_not_found"),
)
async def get_base_model(request: Request, jobs: TheJobs, _: Caller, name: str) -> Response:
    """Return a base model of the catalogue with the text of its licence."""
    found = (jobs.models.current() or {}).get(name)
    if found is None:
        raise ModelNotFound(
            f"the catalogue has no model {name!r}", hint="GET /v1/base-models lists the models"
        )
    view = _view(found).model_copy(update={"licence_text": found.licence_text})
    return answer(request, view)


def _view(model: CatalogueModel) -> views.CatalogueEntry:
    return views.CatalogueEntry(
        name=model.name,
        base=model.base,
        licence=model.licence,
        must_accept=model.must_accept,
        sha256=model.sha256,
        has_chat_template=model.chat_template is not None,
    )
