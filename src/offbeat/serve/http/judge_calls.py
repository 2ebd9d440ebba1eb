"""The calls of judges: samples to judge, and what they came to."""

from __future__ import annotations

from fastapi import Request, Response

from offbeat.ledger.workers import Role, Worker
from offbeat.serve.http import wire
from offbeat.serve.http.bodies import reply
from offbeat.serve.http.desk import Desk, Route
from offbeat.serve.http.worker_calls import welcome_back

REWARD = frozenset({Role.REWARD})


async def lease_rewards(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.LeaseRewardsCall)
    await welcome_back(desk, worker)
    work = desk.coordinator.judging.lease(worker.name, call.capacity, min(call.wait_s, desk.settings.max_wait_s))
    return await reply(request, await desk.patiently(request, work))


async def submit_rewards(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.SubmitRewardsCall)
    results = [wire.reward_result(result) for result in call.results]
    await desk.coordinator.judging.submit(worker.name, call.ticket, results)
    return Response(status_code=204)


ROUTES = (
    Route("POST", "/v1/rewards/lease", lease_rewards, REWARD),
    Route("POST", "/v1/rewards", submit_rewards, REWARD),
)
