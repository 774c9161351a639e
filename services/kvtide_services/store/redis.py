"""The store over Redis or Valkey."""

import functools
import json
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from kvtide.lease.v1 import lease_pb2
from kvtide_services.errors import InvalidToken, StoreUnavailable
from kvtide_services.store import SessionEvent, SessionRecord, TurnRecord, scripts

P = ParamSpec("P")
T = TypeVar("T")
_TENANTS = "kvtide:tenants"
_INCARNATION = "kvtide:incarnation"


def _guarded(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable from error

    return call


class RedisStore:
    """Every operation is one round trip, or one script; all raise StoreUnavailable."""

    def __init__(self, url: str, timeout: timedelta, history: int) -> None:
        """``history``: events kept per tenant. Raises ValueError for a malformed URL."""
        seconds = timeout.total_seconds()
        self._redis: Any = redis.from_url(url, socket_timeout=seconds, socket_connect_timeout=seconds)
        self._blocking: Any = redis.from_url(url, socket_connect_timeout=seconds)
        self._history = history
        self._create = self._redis.register_script(scripts.CREATE)
        self._renew = self._redis.register_script(scripts.RENEW)
        self._record = self._redis.register_script(scripts.RECORD_TURN)
        self._close = self._redis.register_script(scripts.CLOSE)
        self._lapse = self._redis.register_script(scripts.LAPSE)
        self._drop_lease = self._redis.register_script(scripts.DROP_LEASE)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
        await self._blocking.aclose()

    # Engines.

    @_guarded
    async def put_engine(self, status: lease_pb2.EngineStatus, ttl: timedelta) -> None:
        await self._redis.set(f"kvtide:engine:{status.engine.name}", status.SerializeToString(), px=_ms(ttl))

    @_guarded
    async def drop_engine(self, name: str) -> None:
        await self._redis.delete(f"kvtide:engine:{name}")

    @_guarded
    async def engines(self) -> list[lease_pb2.EngineStatus]:
        keys = [key async for key in self._redis.scan_iter(match="kvtide:engine:*", count=1000)]
        values = await self._redis.mget(sorted(keys)) if keys else []
        return [lease_pb2.EngineStatus.FromString(value) for value in values if value]

    @_guarded
    async def incarnation(self, mine: str) -> bool:
        return not await self._redis.set(_INCARNATION, mine, nx=True)

    # Leases.

    @_guarded
    async def put_leases(self, leases: Sequence[lease_pb2.Lease]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for lease in leases:
            key = _leases_key(lease.tenant, lease.session_id)
            pipe.hset(key, lease.lease_id, lease.SerializeToString())
            ttl = max(1, _ms(lease.ttl.ToTimedelta()))
            pipe.pexpire(key, ttl, nx=True)
            pipe.pexpire(key, ttl, gt=True)
        await pipe.execute()

    @_guarded
    async def drop_lease(self, lease: lease_pb2.Lease) -> None:
        key = _leases_key(lease.tenant, lease.session_id)
        await self._drop_lease(keys=[key], args=[lease.lease_id, lease.SerializeToString()])

    @_guarded
    async def leases(self, tenant: str, session_id: str) -> list[lease_pb2.Lease]:
        values = await self._redis.hvals(_leases_key(tenant, session_id))
        return [lease_pb2.Lease.FromString(value) for value in values]

    # Sessions.

    def _keys(self, tenant: str, session_id: str) -> list[str]:
        base = f"kvtide:{{{tenant}}}"
        return [f"{base}:session:{session_id}", f"{base}:sessions", f"{base}:events"]

    @_guarded
    async def create(self, record: SessionRecord) -> bool:
        await self._redis.sadd(_TENANTS, record.tenant)
        keys, ttl = self._keys(record.tenant, record.session_id), _ms(record.granted_ttl)
        labels = json.dumps(record.labels)
        args: list[Any] = [self._history, record.session_id, ttl, record.request_id, record.model, labels]
        return bool(await self._create(keys=keys, args=args))

    @_guarded
    async def get(self, tenant: str, session_id: str) -> SessionRecord | None:
        return (await self._read(tenant, [session_id]))[0]

    async def _read(self, tenant: str, session_ids: Sequence[str]) -> list[SessionRecord | None]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.time()
        for session_id in session_ids:
            key = self._keys(tenant, session_id)[0]
            pipe.hgetall(key)
            pipe.pttl(key)
        (seconds, micros), *rows = await pipe.execute()
        now = seconds * 1000 + micros // 1000
        pairs = zip(session_ids, rows[::2], rows[1::2], strict=True)
        return [_record(tenant, i, fields, left, now) for i, fields, left in pairs]

    @_guarded
    async def page(self, tenant: str, after: str, count: int) -> list[SessionRecord]:
        ids = await self._redis.zrange(self._keys(tenant, "")[1], 0, -1)
        behind = sorted(i.decode() for i in ids if i.decode() > after)[:count]
        return [record for record in await self._read(tenant, behind) if record] if behind else []

    @_guarded
    async def close(self, tenant: str, session_id: str) -> bool:
        return bool(await self._close(keys=self._keys(tenant, session_id), args=[self._history, session_id]))

    @_guarded
    async def renew(self, tenant: str, session_id: str, ttl: timedelta | None) -> timedelta | None:
        args: list[Any] = [self._history, session_id, _ms(ttl) if ttl else 0]
        left = await self._renew(keys=self._keys(tenant, session_id), args=args)
        return timedelta(milliseconds=left) if left >= 0 else None

    @_guarded
    async def record_turn(self, tenant: str, session_id: str, turn: TurnRecord, ttl: timedelta) -> timedelta:
        await self._redis.sadd(_TENANTS, tenant)
        span, engine, boot_id = _ms(ttl), turn.decode_engine, turn.decode_boot_id
        args: list[Any] = [self._history, session_id, span, turn.number, turn.model, engine, boot_id]
        return timedelta(milliseconds=await self._record(keys=self._keys(tenant, session_id), args=args))

    @_guarded
    async def lapse(self) -> list[tuple[str, str]]:
        lapsed: list[tuple[str, str]] = []
        for tenant in [t.decode() for t in await self._redis.smembers(_TENANTS)]:
            ids = await self._lapse(keys=self._keys(tenant, ""), args=[self._history])
            lapsed += [(tenant, i.decode()) for i in ids]
        return lapsed

    @_guarded
    async def last_token(self, tenant: str) -> str:
        rows = await self._redis.xrevrange(self._keys(tenant, "")[2], count=1)
        return rows[0][0].decode() if rows else "0-0"

    @_guarded
    async def events(self, tenant: str, after: str, wait: timedelta) -> list[SessionEvent]:
        stream = self._keys(tenant, "")[2]
        try:
            await self._check_age(stream, after)
            rows = await self._blocking.xread({stream: after}, count=1000, block=max(1, _ms(wait)))
        except ResponseError as error:
            raise InvalidToken("resume_token") from error
        entries = rows[0][1] if rows else []
        return [SessionEvent(token.decode(), f[b"k"].decode(), f[b"s"].decode()) for token, f in entries]

    async def _check_age(self, stream: str, after: str) -> None:
        """A token older than the trimmed history would silently miss events."""
        first = await self._redis.xrange(stream, count=1)
        length = await self._redis.xlen(stream)
        if first and length >= self._history and after != "0-0" and _order(after) < _order(first[0][0].decode()):
            raise InvalidToken("resume_token")


def _order(token: str) -> tuple[int, int]:
    milliseconds, _, sequence = token.partition("-")
    try:
        return int(milliseconds), int(sequence or 0)
    except ValueError:
        raise InvalidToken("resume_token") from None


def _ms(span: timedelta) -> int:
    return int(span.total_seconds() * 1000)


def _leases_key(tenant: str, session_id: str) -> str:
    return f"kvtide:{{{tenant}}}:leases:{session_id}"


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
