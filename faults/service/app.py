"""The service, as docs/howto/services.md builds it, with a start and an end of its own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from faults.service import GRACE_SECONDS
from faults.service.shop import hive, long_order, note, order
from maestro_hive import MaestroError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Order(BaseModel):
    """A request."""

    id: str
    kind: str


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Note that the app was opened and closed, with a worker in between."""
    note("opened", "app", "-")
    async with hive.worker(grace=GRACE_SECONDS, release_after=1.0):
        yield
    note("closed", "app", "-")


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def accept(new: Order) -> dict[str, str]:
    """Accept an order: half of them are started here, the others are enqueued."""
    if new.kind == "long":
        handle = await hive.aenqueue(long_order, new.id, run_id=new.id)
        return {"id": handle.run_id}
    if new.kind == "started":
        started = await hive.start(order, new.id, new.kind, run_id=new.id)
        return {"id": started.run_id}
    enqueued = await hive.aenqueue(order, new.id, new.kind, run_id=new.id)
    return {"id": enqueued.run_id}


@app.get("/orders/{run_id}")
async def show(run_id: str, wait: float = 0.0) -> dict[str, object]:
    """Return what became of an order."""
    handle = hive.handle(run_id)
    try:
        async with asyncio.timeout(wait):
            return {"status": "success", "result": await handle.result()}
    except TimeoutError:
        return {"status": handle.status}


@app.post("/orders/{run_id}/approval", status_code=202)
def approve(run_id: str, *, approved: bool) -> dict[str, str]:
    """Answer the question of an order."""
    try:
        hive.answer(run_id, "approval", approved)
    except MaestroError as error:
        raise HTTPException(409, str(error)) from None
    return {"id": run_id}
