"""Session records, their deadlines and events in Redis."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from redis.exceptions import RedisError

from kvtide_services.errors import InvalidToken, StoreUnavailable
from kvtide_services.store import (
    FIRST_TOKEN,
    Opening,
    SessionEvent,
    SessionRecord,
    TurnCounted,
    TurnRecord,
    check_token,
    scripts,
)
from kvtide_services.store.redis_guard import guarded, milliseconds

_TENANTS = "kvtide:tenants"
_CHUNK = 500  # renewals a round trip: Redis serves nobody else meanwhile


class RedisSessions:
    """SessionStore. ``waiter`` is a client whose connections may block."""

    def __init__(self, client: Any, waiter: Any, seconds: float, history: int) -> None:
        self._redis = client
        self._waiter = waiter
        self._seconds = seconds
        self._history = history
        self._create = client.register_script(scripts.CREATE)
        self._renew = client.register_script(scripts.RENEW)
        self._record = client.register_script(scripts.RECORD_TURN)
        self._close = client.register_script(scripts.CLOSE)
        self._lapse = client.register_script(scripts.LAPSE)
        self._resumable = client.register_script(scripts.RESUMABLE)

    @guarded
    async def create(self, record: SessionRecord) -> Opening:
        await self._redis.sadd(_TENANTS, record.tenant)
        labels, ttl = json.dumps(record.labels), milliseconds(record.granted_ttl)
        args = [self._history, record.session_id, ttl, record.request_id, record.model, labels]
        return Opening(await self._create(keys=session_keys(record.tenant, record.session_id), args=args))

    @guarded
    async def get(self, tenant: str, session_id: str) -> SessionRecord | None:
        return (await self._read(tenant, [session_id]))[0]

    @guarded
    async def page(self, tenant: str, after: str, count: int) -> tuple[list[SessionRecord], str]:
        start = f"({after}" if after else "-"
        found = await self._redis.zrangebylex(session_keys(tenant)[3], start, "+", start=0, num=count + 1)
        ids = [i.decode() for i in found]
        records = await self._read(tenant, ids[:count])
        # Records may be gone before the sweep takes their ids: what goes on is the ids, not the records.
        return [record for record in records if record], ids[count - 1] if len(ids) > count else ""

    async def _read(self, tenant: str, session_ids: Sequence[str]) -> list[SessionRecord | None]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        for session_id in session_ids:
            key = session_keys(tenant, session_id)[0]
            pipe.hgetall(key).pttl(key)
        (seconds, micros), *rows = await pipe.execute()
        now = seconds * 1000 + micros // 1000
        pairs = zip(session_ids, rows[::2], rows[1::2], strict=True)
        return [_record(tenant, i, fields, left, now) for i, fields, left in pairs]

    @guarded
    async def close(self, tenant: str, session_id: str) -> bool:
        return bool(await self._close(keys=session_keys(tenant, session_id), args=[self._history, session_id]))

    async def renew(self, tenant: str, session_ids: Sequence[str], ttl: timedelta | None) -> list[timedelta | None]:
        renewed: list[timedelta | None] = []
        for start in range(0, len(session_ids), _CHUNK):
            renewed += await self._renew_chunk(tenant, session_ids[start : start + _CHUNK], ttl)
        return renewed

    @guarded
    async def _renew_chunk(
        self, tenant: str, session_ids: Sequence[str], ttl: timedelta | None
    ) -> list[timedelta | None]:
        pipe = self._redis.pipeline(transaction=False)
        span = milliseconds(ttl) if ttl else 0
        for session_id in session_ids:
            await self._renew(
                keys=session_keys(tenant, session_id), args=[self._history, session_id, span], client=pipe
            )
        return [timedelta(milliseconds=left) if left >= 0 else None for left in await pipe.execute()]

    @guarded
    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord, ttl: timedelta) -> TurnCounted:
        await self._redis.sadd(_TENANTS, tenant)
        args = [self._history, session_id, milliseconds(ttl), turn.number, turn.model]
        args += [turn.decode_engine, turn.decode_boot_id]
        left, opened = await self._record(keys=session_keys(tenant, session_id), args=args)
        return TurnCounted(timedelta(milliseconds=left), bool(opened))

    @guarded
    async def lapse(self) -> list[tuple[str, str]]:
        tenants = [t.decode() for t in await self._redis.smembers(_TENANTS)]
        pipe = self._redis.pipeline(transaction=False)
        for tenant in tenants:
            await self._lapse(keys=session_keys(tenant), args=[self._history], client=pipe)
        found = await pipe.execute()
        pairs = zip(tenants, found, strict=True)
        return list(itertools.chain.from_iterable(((t, i.decode()) for i in ids) for t, ids in pairs))

    @guarded
    async def last_token(self, tenant: str) -> str:
        rows = await self._redis.xrevrange(session_keys(tenant)[2], count=1)
        return rows[0][0].decode() if rows else FIRST_TOKEN

    async def events(self, tenant: str, after: str, wait: timedelta) -> list[SessionEvent]:
        stream = session_keys(tenant)[2]
        await self._check_resumable(stream, check_token(after))
        rows = await self._read_events(stream, after, wait)
        # Again: the store may have been emptied while this waited, and what came first since then would be missed.
        await self._check_resumable(stream, after)
        return [SessionEvent(token.decode(), f[b"k"].decode(), f[b"s"].decode()) for token, f in rows]

    async def _read_events(self, stream: str, after: str, wait: timedelta) -> list[Any]:
        try:
            async with asyncio.timeout(wait.total_seconds() + self._seconds):
                found = await self._waiter.xread({stream: after}, count=1000, block=milliseconds(wait))
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable from error
        return list(found[0][1]) if found else []

    @guarded
    async def _check_resumable(self, stream: str, token: str) -> None:
        if not await self._resumable(keys=[stream], args=[token]):
            raise InvalidToken("resume_token")


def session_keys(tenant: str, session_id: str = "") -> list[str]:
    """A session's keys, as the scripts want them: record, deadlines, events, ids."""
    base = f"kvtide:{{{tenant}}}"
    return [f"{base}:session:{session_id}", f"{base}:sessions", f"{base}:events", f"{base}:session-ids"]


def _record(tenant: str, session_id: str, fields: dict[bytes, bytes], left: int, now: int) -> SessionRecord | None:
    if not fields or left < 0:
        return None
    text = {key.decode(): value.decode() for key, value in fields.items()}
    return SessionRecord(
        tenant=tenant,
        session_id=session_id,
        ttl=timedelta(milliseconds=left),
        granted_ttl=timedelta(milliseconds=int(text["granted"])),
        idle=timedelta(milliseconds=max(0, now - int(text.get("used", now)))),
        model=text.get("model", ""),
        turns=int(text.get("turns", 0)),
        decode_engine=text.get("engine", ""),
        decode_boot_id=text.get("boot", ""),
        request_id=text.get("request_id", ""),
        labels=json.loads(text.get("labels", "{}")),
    )
