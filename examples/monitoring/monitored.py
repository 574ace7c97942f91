"""A web application with /metrics, a worker that handles what it offers, and traces if you have set
up OpenTelemetry's SDK.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    pip install 'delayq[prometheus]' fastapi uvicorn
    uvicorn monitored:app --app-dir examples/monitoring

    curl -X POST 'localhost:8000/mails?to=ada@example.org&delay=2'
    curl localhost:8000/metrics

``prometheus.yml`` scrapes it. Import ``dashboard.json`` into Grafana: Dashboards, New, Import.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

import delayq
from delayq.integrations.fastapi import DelayqClient
from delayq.integrations.prometheus import Metrics


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with delayq.connect() as client, Metrics(client) as metrics:
        # Using this same client puts its deliveries into the metrics.
        worker = delayq.Worker(client)

        @worker.listener("mails")
        async def send_mail(to: str) -> None:
            print("mail to", to, flush=True)

        async with worker:
            app.state.delayq = client
            app.state.metrics = metrics
            yield


app = FastAPI(lifespan=lifespan)


@app.get("/metrics")
async def get_metrics(request: Request) -> Response:
    body, content_type = await request.app.state.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@app.post("/mails", status_code=202)
async def post_mail(to: str, client: DelayqClient, delay: float = 0.0) -> str:
    queue: delayq.ReliableQueue[str] = client.reliable_queue("mails")
    return await queue.offer(to, delay)
