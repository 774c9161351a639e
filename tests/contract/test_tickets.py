"""Tickets between two engine links."""

from typing import Any

import pytest

from kvtide.lease.v1 import lease_pb2 as pb


def ask(ticket_id: str = "t1", **fields: Any) -> pb.TicketRequest:
    known = {"engine": "decode-0", "boot_id": "decode-0-1", "tenant": "acme", "session_id": "s1", "lease_id": "l1"}
    return pb.TicketRequest(ticket_id=ticket_id, prompt_hash_prefixes=b"12345678", **(known | fields))


async def test_a_ticket_goes_to_the_holder_and_back_unchanged(services: Any) -> None:
    reader, holder = await services.attach("prefill-0"), await services.attach("decode-0")
    await reader.send(ticket_request=ask())
    assert (await holder.read()).ticket_request == ask()
    answer = pb.TicketResponse(ticket_id="t1", lease_id="l1", epoch=2, block_ids=[3, 1], block_hashes=[b"a", b"b"])
    answer.holder.CopyFrom(holder.engine)
    await holder.send(ticket_response=answer)
    assert (await reader.read()).ticket_response == answer
    await reader.send(ticket_release=pb.TicketRelease(ticket_id="t1", engine="decode-0"))
    assert (await holder.read()).ticket_release.ticket_id == "t1"


async def test_answers_out_of_order_reach_who_asked(services: Any) -> None:
    readers = [await services.attach("prefill-0"), await services.attach("prefill-1")]
    holder = await services.attach("decode-0")
    for number, reader in enumerate(readers):
        await reader.send(ticket_request=ask(f"t{number}"))
    asked = [(await holder.read()).ticket_request.ticket_id for _ in readers]
    assert sorted(asked) == ["t0", "t1"]
    for ticket_id in ("t1", "t0"):
        await holder.send(ticket_response=pb.TicketResponse(ticket_id=ticket_id, lease_id=ticket_id))
    for number, reader in enumerate(readers):
        assert (await reader.read()).ticket_response.lease_id == f"t{number}"


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [({"engine": "decode-9"}, pb.TICKET_REFUSAL_UNREACHABLE), ({"boot_id": "older"}, pb.TICKET_REFUSAL_RESTARTED)],
)
async def test_what_is_not_here_is_refused(services: Any, fields: dict[str, str], refusal: int) -> None:
    reader, _ = await services.attach("prefill-0"), await services.attach("decode-0")
    await reader.send(ticket_request=ask(**fields))
    assert (await reader.read()).ticket_response == pb.TicketResponse(ticket_id="t1", refusal=refusal)


async def test_a_silent_holder_is_unreachable_and_its_late_ticket_given_back(services: Any) -> None:
    reader, holder = await services.attach("prefill-0"), await services.attach("decode-0")
    await reader.send(ticket_request=ask())
    assert (await holder.read()).HasField("ticket_request")
    assert (await reader.read()).ticket_response.refusal == pb.TICKET_REFUSAL_UNREACHABLE
    await holder.send(ticket_response=pb.TicketResponse(ticket_id="t1", lease_id="l1"))
    assert (await holder.read()).ticket_release.ticket_id == "t1"


async def test_a_holder_whose_link_ends_is_unreachable(services: Any) -> None:
    reader, holder = await services.attach("prefill-0"), await services.attach("decode-0")
    await reader.send(ticket_request=ask())
    await holder.read()
    await holder.close()
    assert (await reader.read()).ticket_response.refusal == pb.TICKET_REFUSAL_UNREACHABLE


async def test_tickets_need_no_store(services: Any, valkey: Any) -> None:
    reader, holder = await services.attach("prefill-0"), await services.attach("decode-0")
    await valkey.client_pause(1000)
    for number in range(100):
        await reader.send(ticket_request=ask(f"t{number}"))
        ticket_id = (await holder.read()).ticket_request.ticket_id
        await holder.send(ticket_response=pb.TicketResponse(ticket_id=ticket_id, lease_id="l1"))
        assert (await reader.read()).ticket_response.ticket_id == f"t{number}"
